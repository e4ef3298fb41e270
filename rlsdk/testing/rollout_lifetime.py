"""Requirements: memory is given back when asked for, and none is lost on the way."""

from __future__ import annotations

from contextlib import suppress

from rlsdk.interfaces import Capability, GenerationOutput, RlsdkError, RolloutEngine, WeightSyncError
from rlsdk.testing.requirements import Measured, requirement
from rlsdk.testing.resources import resident_bytes
from rlsdk.testing.rollout_lab import RolloutLab, whole_shards

MIB = 2**20


class LifetimeRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("sleep", needs=Capability.SLEEP)
    def test_sleep(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Asleep nothing is generated; after `wake` all is as before (level 1: the same weights)."""
        request = lab.ask("r", lab.prompt(20, 110), 3, max_tokens=12)
        lab.run([request])
        engine.sleep(1)
        measured.none("samples of a sleeping engine", refused(lab, engine))
        engine.wake(("weights",))
        engine.wake(("kv_cache",))
        outputs = lab.run([request])
        measured.at_most("largest difference after it", lab.worst([request], outputs), lab.suite.tolerance)

    @requirement("sleep.update", needs=Capability.SLEEP)
    def test_sleep_update(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Level 2 drops the weights: nothing is served before an update, which may come before the key-value cache."""
        request = lab.ask("r", lab.prompt(20, 111), 3, max_tokens=12)
        lab.run([request])
        changing.sleep(2)
        changing.wake()
        measured.none("samples of dropped weights", refused(lab, changing, WeightSyncError))
        changing.update_weights(whole_shards(lab.base), 0)
        changing.sleep(2)
        changing.wake(("weights",))
        state = lab.changed(9)
        changing.update_weights(whole_shards(state), 6)
        changing.wake(("kv_cache",))
        outputs = lab.run([request])
        worst = lab.worst([request], outputs, lab.plain.with_state(state))
        measured.at_most("largest difference after it", worst, lab.suite.tolerance)
        measured.none("other versions than 6", sorted({o.policy_version for o in outputs} - {6}))

    @requirement("memory")
    def test_memory(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Memory does not grow from call to call, updates included."""
        warm, counted, before = lab.suite.leak_calls // 3, lab.suite.leak_calls, 0
        for call in range(warm + counted):
            if call == warm:
                before = resident_bytes()
            lab.run([lab.ask("r", lab.prompt(8, 200 + call), 4, max_tokens=6, seed=call)])
            if lab.spec.takes_weights and call % 5 == 0:
                engine.update_weights(whole_shards(lab.base), 0)
        grown = (resident_bytes() - before) / MIB
        measured.at_most(f"MiB that {counted} calls added", grown, lab.suite.leak_mib)


def refused(lab: RolloutLab, engine: RolloutEngine, by: type[RlsdkError] = RlsdkError) -> list[GenerationOutput]:
    """Samples that an engine gives although it should refuse; none when it does, by an error of this class."""
    with suppress(by):
        return lab.run([lab.ask("r", lab.prompt(8, 113), 1)], engine)
    return []
