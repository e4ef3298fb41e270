"""Requirements: sleeping frees memory, nothing leaks, and sleeping changes nothing else."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest

from rlsdk.interfaces import Capability, GenerationOutput, RlsdkError, RolloutEngine, WeightSyncError
from rlsdk.testing.process.resources import grown, handles, mapped_files, objects, only_new_objects, resident_bytes
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.draw_statistics import Noise
from rlsdk.testing.rollout.lab import RolloutLab, whole_shards
from rlsdk.testing.rollout.neutral_events import events
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.rollout.requirements.distribution import in_order
from rlsdk.testing.suites.requirements import NOT_CLAIMED, Measured, requirement

MIB = 2**20
ROUNDS = 4
"""Rounds of all events of an engine over which threads and files are counted, after half as many uncounted ones."""

WHEN = ("awake", "asleep", "awake again", "behind an update")
"""Moments at which the layout is read."""
HALF_AWAKE = (
    (1, "weights", True, 1),
    (1, "weights", False, 1),
    (1, "kv_cache", False, 1),
    (1, "weights", True, 2),
    (2, "weights", True, 1),
    (2, "kv_cache", False, 1),
)
"""Level of a sleep, the part that wakes, whether an update follows, and the level of the next sleep."""


class LifetimeRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("sleep", needs=Capability.SLEEP, basic=True)
    def test_sleep(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A sleeping engine generates nothing; after `wake` everything is as before (level 1: the same weights)."""
        request = lab.ask("r", lab.prompt(20, 110), 3, max_tokens=12)
        lab.run([request])
        engine.sleep(1)
        measured.none("samples of a sleeping engine", refused(lab, engine))
        engine.wake(("weights",))
        engine.wake(("kv_cache",))
        outputs = lab.run([request])
        measured.at_most("largest difference after it", lab.worst([request], outputs), lab.suite.tolerance)

    @requirement("sleep.update", needs=Capability.SLEEP, basic=True)
    def test_sleep_update(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Level 2 drops the weights: nothing is served before an update, which may come before the KV cache wakes.
        `layout` never changes."""
        request = lab.ask("r", lab.prompt(20, 111), 3, max_tokens=12)
        lab.run([request])
        layouts = [changing.layout()]
        changing.sleep(2)
        layouts.append(changing.layout())
        changing.wake()
        layouts.append(changing.layout())
        measured.none("samples of dropped weights", refused(lab, changing, WeightSyncError))
        changing.update_weights(whole_shards(lab.base), 0)
        layouts.append(changing.layout())
        changed = [when for when, layout in zip(WHEN, layouts, strict=True) if list(layout) != list(layouts[0])]
        measured.none("moments at which the layout was another", changed)
        changing.sleep(2)
        changing.wake(("weights",))
        state = lab.changed(9)
        changing.update_weights(whole_shards(state), 6)
        changing.wake(("kv_cache",))
        outputs = lab.run([request])
        worst = lab.worst([request], outputs, lab.plain.with_state(state))
        measured.at_most("largest difference after it", worst, lab.suite.tolerance)
        measured.none("other versions than 6", sorted({o.policy_version for o in outputs} - {6}))

    @requirement("sleep.kept", needs=Capability.SLEEP, since=(2, 0))
    def test_sleep_kept(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Repeated sleep at level 1 changes nothing: not the version, not updated weights, not the tokens of seeds; and
        waking the other parts does not restore weights that were replaced meanwhile."""
        requests = [lab.ask(f"r{at}", lab.prompt(5 + 40 * at, 114), 2, max_tokens=20, seed=at) for at in range(3)]
        state = lab.changed(81)
        # Also once before the update: a host copy that is made only once would hold the first weights.
        changing.sleep(1)
        changing.wake()
        changing.update_weights(whole_shards(state), 5)
        plain, whole = lab.plain.with_state(state), tokens_of(lab.run(requests))
        for parts in ((("weights",), ("kv_cache",)), (("weights", "kv_cache"),), (("kv_cache",), ("weights",))):
            changing.sleep(1)
            for part in parts:
                changing.wake(part)
            outputs = lab.run(requests)
            measured.none(f"wrong samples, woken {parts}", audit(lab, requests, outputs, plain, version=5)[0])
            if Capability.SEED in lab.spec.capabilities:
                changed = [key for key, tokens in tokens_of(outputs).items() if whole[key] != tokens]
                measured.none("seeded samples that sleep changed", changed)
        # As a trainer does: weights wake first, then an update, then the rest.
        changing.sleep(1)
        changing.wake(("weights",))
        newer = lab.changed(82)
        changing.update_weights(whole_shards(newer), 7)
        changing.wake(("kv_cache",))
        faults, _ = audit(lab, requests, lab.run(requests), lab.plain.with_state(newer), version=7)
        measured.none("wrong samples of an update between the stages of waking", faults)
        changing.sleep(1)
        changing.sleep(2)
        changing.wake()
        measured.none("samples of dropped weights", refused(lab, changing, WeightSyncError))
        changing.update_weights(whole_shards(state), 6)
        measured.none("wrong samples", audit(lab, requests, lab.run(requests), plain, version=6)[0])

    @requirement("sleep.stages", needs=Capability.SLEEP, since=(2, 0))
    def test_sleep_stages(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A partly awake engine may sleep again at either level, with or without an update in between: once awake it
        serves the latest weights."""
        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        requests = [lab.ask("r", lab.prompt(12, 119), 2, max_tokens=8)]
        states = [lab.changed(84), lab.changed(85)]
        plain = [lab.plain.with_state(state) for state in states]
        version = 0

        def update() -> None:
            nonlocal version
            version += 1
            changing.update_weights(whole_shards(states[version % 2]), version)

        update()
        for first, part, updated, again in HALF_AWAKE:
            changing.sleep(first)
            changing.wake((part,))
            if updated:
                update()
            changing.sleep(again)
            for one in ("weights", "kv_cache") if updated else ("kv_cache", "weights"):
                changing.wake((one,))
            if again == 2 or (first == 2 and not updated):
                update()
            said = f"slept at {first}, woke {part}{', updated' * updated}, slept at {again}, woke"
            faults, _ = audit(lab, requests, lab.run(requests), plain[version % 2], version=version)
            measured.none(f"wrong samples, {said}", faults)

    @requirement("independent_draws.lifetime", since=(2, 0))
    def test_independent_draws_lifetime(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Without seeds draws never repeat: not after an update, a sleep, an abort, a pause or an abandoned call of any
        kind."""
        request = lab.ask("r", lab.prompt(6, 115), 2, max_tokens=28, seed=None)
        samples = in_order(lab, [request])
        for event in events(lab).values():
            event(changing, lab)
            samples += in_order(lab, [request])
        distinct = {tuple(sample.tokens.tolist()) for sample in samples}
        measured.equal("distinct samples", len(distinct), len(samples))
        measured.none("draws that depend on others", Noise.of(samples).faults())

    @requirement("handles", since=(2, 0))
    def test_handles(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Threads, open and mapped files, processes, memory and files in the scratch folder do not grow with calls,
        updates, aborts, pauses and sleeps of any kind, and an engine keeps no Python object of any of them."""
        before: dict[str, int] = {}
        memory, inner = 0, lab.inner  # without the recorder, which keeps every answer
        next_one = [lab.ask("next", lab.prompt(5, 121), max_tokens=1)]
        turns = list[Counter[str]]()
        with only_new_objects():
            for turn in range(ROUNDS + ROUNDS // 2):
                if turn == ROUNDS // 2:
                    before, memory = self._resources(lab), resident_bytes()
                lab.run([lab.ask("r", lab.prompt(8, 116 + turn), 2, max_tokens=4)], inner)
                for event in events(lab).values():
                    event(inner, lab)
                lab.run(next_one, inner)  # some events take effect in the next step
                turns.append(objects())
        added = (resident_bytes() - memory) / MIB
        measured.at_most(f"MiB that {ROUNDS} rounds added", added, lab.suite.leak_mib)
        for name, count in self._resources(lab).items():
            measured.at_most(f"{name} that {ROUNDS} rounds added", count - before[name], ROUNDS - 1)
        kept = grown(turns)
        measured.none("objects kept in every round", [f"{count} {name}" for name, count in sorted(kept.items())])

    def _resources(self, lab: RolloutLab) -> dict[str, int]:
        files = sum(path.is_file() for path in lab.scratch.rglob("*"))
        return {**handles(), "mapped files": mapped_files(), "files in the scratch folder": files}

    @requirement("memory.updates", since=(2, 0))
    def test_memory_updates(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Memory does not grow from update to update."""
        counted = 2 * lab.suite.leak_calls
        for turn in range(counted + counted // 3):
            if turn == counted // 3:
                before = resident_bytes()
            changing.update_weights(whole_shards(lab.base), turn)
        added = (resident_bytes() - before) / MIB
        measured.at_most(f"MiB that {counted} updates added", added, lab.suite.leak_mib)

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
        added = (resident_bytes() - before) / MIB
        measured.at_most(f"MiB that {counted} calls added", added, lab.suite.leak_mib)


def refused(lab: RolloutLab, engine: RolloutEngine, by: type[RlsdkError] = RlsdkError) -> list[GenerationOutput]:
    """Samples that an engine returns although it should refuse; none if it raises an error of this class."""
    with suppress(by):
        return lab.run([lab.ask("r", lab.prompt(8, 113), 1)], engine)
    return []
