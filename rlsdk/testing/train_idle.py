"""Requirements: steps that nothing was learned for."""

from __future__ import annotations

from dataclasses import replace

from rlsdk.testing.cases import OPTIM, rows_of
from rlsdk.testing.plain_steps import scheduled
from rlsdk.testing.requirements import Measured, requirement
from rlsdk.testing.scripts import Act, learn, learn_nothing, look, step
from rlsdk.testing.train_lab import TrainLab

SCHEDULED = replace(OPTIM, schedule="linear", warmup_steps=2, total_steps=8, min_lr_ratio=0.1, weight_decay=0.0)


class IdleRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("step.idle", since=(2, 0))
    def test_idle(self, lab: TrainLab, measured: Measured) -> None:
        """A step without any gradient, at first, in the middle and twice, after no call at all and after batches of
        no rows, is a step of the schedule: it is not skipped, its norm is 0, and the rates after it go on."""
        batch = rows_of((8, 3, 13), seed=130)
        idle: dict[str, list[Act]] = {"no call": [step], "no rows": [learn_nothing(batch), step]}
        for name, nothing in idle.items():
            script: list[Act] = [*nothing, learn(batch), step, *nothing, *nothing, learn(batch), step, *nothing]
            # What AdamW does to weights without a gradient is not said: torch leaves alone what has none.
            found = lab.play([*script, look(batch, "log_probs")], optim=SCHEDULED, witness=False)
            measured.none(f"faults, {name}", found.faults)
            measured.equal(f"steps that were skipped, {name}", sum(found.skipped), 0)
            measured.none(
                f"norms of nothing, {name}", [n for at, n in enumerate(found.norms) if at not in (1, 4) and n]
            )
            rates = [abs(rate - scheduled(at, SCHEDULED)) for at, rate in enumerate(found.lrs)]
            measured.at_most(f"largest difference of the rate, {name}", max(rates), 1e-9)
            measured.at_least(f"norms of rows, {name}", min(found.norms[1], found.norms[4]), 1e-6)
            moved = found.seen[0]["log_probs"]
            measured.none(f"log-probs that are no number, {name}", moved[~moved.isfinite()].tolist())
