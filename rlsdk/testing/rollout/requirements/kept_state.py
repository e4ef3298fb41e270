"""Requirements: state that survives an interruption (all tokens of an aborted sample, and the pause), and state that
must not (results computed with old weights, however small the update)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from rlsdk.interfaces import Capability, GenerationOutput, RolloutEngine
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.lab import RolloutLab, collect, whole_shards
from rlsdk.testing.rollout.recorder import RecordingRolloutEngine
from rlsdk.testing.suites.requirements import Measured, requirement

STILL_S = 0.02
"""Seconds between two readings of a paused engine, in which running steps end."""
LOOKS = 50


class KeptStateRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("abort.keeps_tokens", needs=Capability.ABORT, since=(2, 0))
    def test_abort_keeps_tokens(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An aborted sample is returned with every token that it has: in a pause as many as were counted when it began,
        including the newest of each sample."""
        if engine.num_decoded() is None or Capability.PARTIAL_ROLLOUT not in lab.spec.capabilities:
            return measured.record("counts tokens, and pauses", 0)
        requests = [lab.ask(f"r{at}", lab.prompt(6 + 9 * at, 250), 3, max_tokens=100, seed=at) for at in range(3)]
        record = cast("RecordingRolloutEngine", engine).record

        async def aborted() -> tuple[int, list[GenerationOutput]]:
            task = await lab.paused_midway(requests, engine)
            counted, before = -1, engine.num_decoded() or 0
            for _ in range(LOOKS):
                if counted == before:
                    break
                await asyncio.sleep(STILL_S)
                counted, before = before, engine.num_decoded() or 0
            engine.abort()
            await asyncio.sleep(STILL_S)
            engine.resume()
            outputs = await task
            return counted, outputs

        started, given = engine.num_decoded() or 0, record.num_given
        counted, outputs = lab.wait(aborted())
        measured.none("wrong samples", audit(lab, requests, outputs, may_abort=[r.request_id for r in requests])[0])
        measured.at_least("tokens of aborted samples", sum(len(output.token_ids) for output in outputs), 1)
        lost = (counted - started) - (record.num_given - given)
        measured.at_most("tokens counted in the pause, and not given out", lost, 0)
        return None

    @requirement("abort.keeps_pause", needs=Capability.ABORT, since=(2, 0))
    def test_abort_keeps_pause(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Aborting all samples does not end a pause: a call that begins afterwards waits for `resume`."""
        if Capability.PARTIAL_ROLLOUT not in lab.spec.capabilities:
            return measured.record("pauses", 0)
        requests = [lab.ask(f"r{at}", lab.prompt(6 + 9 * at, 253), 2, max_tokens=100) for at in range(2)]
        late = [lab.ask("late", lab.prompt(7, 254), 2, max_tokens=4)]

        async def held() -> tuple[list[GenerationOutput], list[GenerationOutput], bool, int]:
            first = await lab.paused_midway(requests, engine)
            engine.abort()
            aborted = await asyncio.wait_for(first, lab.suite.timeout_s)
            second = asyncio.create_task(collect(engine, late))
            await asyncio.sleep(5 * STILL_S)
            before = engine.num_decoded() or 0
            await asyncio.sleep(10 * STILL_S)
            done, grown = second.done(), (engine.num_decoded() or 0) - before
            engine.resume()
            return aborted, await second, done, grown

        aborted, outputs, done, grown = lab.wait(held())
        ended = [request.request_id for request in requests]
        measured.none("wrong samples that were aborted", audit(lab, requests, aborted, may_abort=ended)[0])
        measured.none("wrong samples of a call that began in the pause", audit(lab, late, outputs)[0])
        measured.equal("a call that ended in the pause", done, False)
        measured.equal("tokens that came in the pause", grown, 0)
        return None

    @requirement("update.small_change", since=(2, 0))
    def test_update_small_change(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An update that changes all but the embeddings, only one layer, or only one tensor, is a full update: earlier
        prompts and paused samples continue only with the new weights."""
        requests = [lab.ask(f"r{at}", lab.prompt(70 - at, 251), 2, max_tokens=20) for at in range(2)]
        state, pauses = dict(lab.base), Capability.PARTIAL_ROLLOUT in lab.spec.capabilities
        long = [lab.ask("long", lab.prompt(70, 251), 2, max_tokens=100)]
        lab.run(requests)
        for at, (name, new) in enumerate(_little(lab.base).items(), start=1):
            state.update(new)
            version = 20 + at

            async def updated(served: Mapping[str, Tensor] = dict(state), version: int = version) -> None:
                task = await lab.paused_midway(long, changing) if pauses else None
                changing.update_weights(whole_shards(served), version)
                if task is not None:
                    # The checks after every requirement cover versions and log-probs of both parts.
                    changing.resume()
                    await task

            lab.wait(updated())
            plain = lab.plain.with_state(state)
            faults, _ = audit(lab, requests, lab.run(requests), plain, version=version)
            measured.none(f"wrong samples after an update of {name}", faults)


def _little(base: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Description -> new values. Tensors are chosen by name: canonical names of decoders contain the layer."""
    generator = torch.Generator().manual_seed(252)
    layers = sorted({name.split(".layers.")[1].partition(".")[0] for name in base if ".layers." in name}, key=int)
    names = list(base)
    embedding, backwards = names[0], names[::-1]
    parts = {
        "all but the embeddings": [name for name in names if name != embedding],
        "the last layer": [name for name in base if f".layers.{layers[-1]}." in name] if layers else [],
        "one tensor": [next(name for name in backwards if base[name].dim() > 1)],
        "one norm": [next(name for name in backwards if base[name].dim() == 1)],
    }
    return {
        what: {name: base[name] + 0.1 * torch.randn(base[name].shape, generator=generator) for name in changed}
        for what, changed in parts.items()
        if changed
    }
