"""Requirement: random sequences of calls over the lifetime of a rollout engine."""

from __future__ import annotations

from rlsdk.interfaces import RolloutEngine
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.rollout.random_events import Life
from rlsdk.testing.rollout.requirements.capacity import FULL, OVERRUN, running_together
from rlsdk.testing.suites.requirements import Measured, requirement

LIVES = 4


class RandomCallRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("random_calls", since=(2, 0))
    def test_random_calls(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Single and concurrent calls, continued samples, aborts, pauses, abandoned calls, updates, sleep, refusals,
        weights that are not finite and repeated requests in random order, each also inside others (a pause in a sleep,
        a sleep after a failed update, an abort in an update, an update by a caller between two samples): every answer
        fits its request and is of the weights that it names, an idle engine's KV cache is unused, what a host polls
        meanwhile makes sense, and no event leaves a mode or a random generator of the process changed."""
        for seed in range(LIVES):
            if lab.spec.takes_weights:
                lab.restore()
            Life(lab, engine, seed).run(measured, f"random calls {seed}")
        if lab.spec.takes_weights:
            lab.restore()
        if engine.num_decoded() is not None:
            requests = [lab.ask("r", lab.prompt(6, 262), 3 * lab.suite.max_running, max_tokens=FULL)]
            together = lab.wait(running_together(engine, [requests]))
            measured.at_most("samples at once after all of them", together, OVERRUN * lab.suite.max_running)
