"""Requirements: optimizer steps without any gradient."""

from __future__ import annotations

import math
from dataclasses import replace

from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, learn, learn_nothing, load, look, save, skip, step
from rlsdk.testing.train.cases import OPTIM, rows_of
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.objectives import Unfit
from rlsdk.testing.train.plain_steps import scheduled

SCHEDULED = replace(OPTIM, schedule="linear", warmup_steps=2, total_steps=8, min_lr_ratio=0.1, weight_decay=0.0)


class IdleStepRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("step.idle", since=(2, 0))
    def test_idle(self, lab: TrainLab, measured: Measured) -> None:
        """A step without any gradient (first, in the middle or twice, after no call or after batches without rows) is a
        step of the schedule: it is not skipped, its norm is 0, and later rates continue."""
        batch = rows_of((8, 3, 13), seed=130)
        idle: dict[str, list[Act]] = {"no call": [step], "no rows": [learn_nothing(batch), step]}
        for name, nothing in idle.items():
            script: list[Act] = [*nothing, learn(batch), step, *nothing, *nothing, learn(batch), step, *nothing]
            # The contract does not define AdamW's effect on weights without a gradient; torch does not change them.
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

    @requirement("checkpoint.idle", since=(2, 0))
    def test_checkpoint_idle(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint after steps without any gradient, or after skipped ones, continues exactly: the schedule and the
        optimizer count steps differently."""
        batches = [rows_of((8, 3, 13), seed=131 + at) for at in range(2)]
        unfit = learn(batches[0], Unfit(int(batches[0]["row_id"][0]), math.inf))
        parts: dict[str, list[Act]] = {
            "an idle step": [step],
            "one and an idle step": [learn(batches[0]), step, learn_nothing(batches[0]), step],
            "a skipped one too": [unfit, skip],
        }
        last: list[Act] = [learn(batches[1]), step]
        folders = {name: lab.new_folder("idle") for name in parts}
        whole = [act for name, part in parts.items() for act in (*part, save(folders[name]))]
        expected = lab.play([*whole, *last], optim=SCHEDULED, witness=False)
        for at, name in enumerate(parts):
            rest = [act for part in [*parts.values()][at + 1 :] for act in part]
            found = lab.play([load(folders[name]), *rest, *last], optim=SCHEDULED, witness=False)
            behind = 4 - len(found.lrs)
            rates = [abs(rate - scheduled(behind + n, SCHEDULED)) for n, rate in enumerate(found.lrs)]
            measured.at_most(f"largest difference of the rate, behind {name}", max(rates), 1e-9)
            off = furthest_weight(whole_of(found), whole_of(expected))
            measured.equal(f"largest difference of weights, behind {name}", off, 0.0)
