"""Requirements: an engine does not change what its caller passes in, its results do not change later, and any thread
may call it."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from rlsdk.interfaces import (
    Capability,
    ConfigError,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
)
from rlsdk.testing.process.modes import random_states
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.lab import RolloutLab, collect
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.suites.requirements import Measured, requirement


class SideEffectRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("outputs.ownership", since=(2, 0))
    def test_outputs_ownership(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Yielded outputs belong to the caller: writing into their arrays changes no other sample and no later call. A
        sample can be sent to another process and is equal there."""
        requests = [
            lab.ask("drawn", lab.prompt(6, 230), 4, max_tokens=12),
            lab.ask("greedy", lab.prompt(6, 230), 4, max_tokens=20, temperature=0.0),
            lab.ask("one", lab.prompt(6, 230), 6, max_tokens=1),
        ]
        for turn in range(2):
            outputs = lab.wait(_spoiling(engine, requests))
            measured.none(f"wrong samples, call {turn}", audit(lab, requests, outputs)[0])
        sent = [pickle.loads(pickle.dumps(output)) for output in outputs]
        measured.none("wrong samples in another process", audit(lab, requests, sent)[0])
        lab.forget()  # this test, as the caller, changed the arrays

    @requirement("requests.ownership", since=(2, 0))
    def test_requests_ownership(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Requests belong to the caller: any kind of sequence is accepted, and no request is changed."""
        requests = [lab.ask(f"r{at}", lab.prompt(5 + at, 231), 2, max_tokens=6, top_k=5 * at) for at in range(4)]
        requests[1] = replace(requests[1], response_ids=lab.prompt(3, 232))
        given = pickle.dumps(requests)
        for name, sequence in {"a tuple": tuple(requests), "a list": requests}.items():
            measured.none(f"wrong samples of {name}", audit(lab, requests, lab.run(sequence))[0])
        measured.equal("requests that changed", given != pickle.dumps(requests), 0)

    @requirement("random_state", since=(2, 0))
    def test_random_state(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Draws neither depend on nor advance the random generators of the process (torch's, numpy's, Python's), which
        other engines and the user's code share."""
        requests = [lab.ask("fresh", lab.prompt(6, 245), 3, max_tokens=24, temperature=1.3, seed=None)]
        requests.append(lab.ask("seeded", lab.prompt(7, 245), 2, max_tokens=24, seed=6))
        held = torch.get_rng_state(), np.random.get_state(), random.getstate()
        drawn, moved = [], []
        try:
            for _ in range(2):
                torch.manual_seed(5)
                np.random.seed(5)
                random.seed(5)
                before = random_states()
                drawn.append(tokens_of(lab.run(requests)))
                moved += [name for name, state in random_states().items() if state != before[name]]
        finally:
            torch.set_rng_state(held[0])
            np.random.set_state(held[1])
            random.setstate(held[2])
        measured.none("generators that were moved on", moved)
        again = [key for key, tokens in drawn[0].items() if key[0] == "fresh" and drawn[1][key] == tokens]
        measured.none("samples without a seed that came again with the process's random numbers", again)

    @requirement("refusals.nothing", since=(2, 0))
    def test_refusals_nothing(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """If any request of a call cannot be served, nothing of the call is generated, and concurrent calls are not
        affected."""
        fine = [lab.ask(f"fine{at}", lab.prompt(4 + at, 233), 2, max_tokens=12, seed=at) for at in range(2)]
        other = [lab.ask("other", lab.prompt(6, 234), 2, max_tokens=40, seed=5)]
        shared = Capability.ABORT in lab.spec.capabilities
        for name, wrong in unservable(lab).items():
            for calls in ([wrong, *fine], [fine[0], wrong, fine[1]], [*fine, wrong]):
                before = engine.num_decoded()
                given, refused = lab.wait(_until_refused(engine, calls))
                measured.equal(f"refused, {name}", refused, 1)
                measured.none(f"samples of a call with {name}", given)
                measured.equal(f"tokens of a call with {name}", (engine.num_decoded() or 0) - (before or 0), 0)
                made = sum(len(output.token_ids) for output in lab.run(fine))
                grown = (engine.num_decoded() or 0) - (before or 0)
                measured.at_most(f"tokens of it that came later, with {name}", grown - made, made // 3)
            if shared:
                outputs = lab.wait(_refused_beside(engine, other, [*fine, wrong]))
                measured.none(f"wrong samples of a call beside {name}", audit(lab, other, outputs)[0])
        measured.none("wrong samples afterwards", audit(lab, fine, lab.run(fine))[0])

    @requirement("threads", needs=Capability.PARTIAL_ROLLOUT, since=(2, 0))
    def test_threads(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """`pause`, `resume` and `abort` work from another thread while `generate` runs, even if nothing else wakes its
        event loop."""
        requests = [lab.ask(f"r{at}", lab.prompt(6 + at, 235), 3, max_tokens=100, seed=at) for at in range(2)]
        whole = tokens_of(lab.run(requests))

        async def held() -> tuple[list[GenerationOutput], int]:
            task = await lab.under_way(requests)
            await asyncio.to_thread(engine.pause)
            late = task.done()  # before it could be paused
            await asyncio.sleep(0.1)
            before = engine.num_decoded() or 0
            await asyncio.sleep(0.1)
            grown = (engine.num_decoded() or 0) - before + 10**6 * (task.done() and not late)
            resuming = threading.Timer(0.1, engine.resume)
            resuming.start()
            try:
                return await task, grown
            finally:
                resuming.join()

        outputs, grown = lab.wait(held())
        measured.equal("tokens that came in a pause", grown, 0)
        measured.none("wrong samples", audit(lab, requests, outputs)[0])
        if Capability.SEED in lab.spec.capabilities:
            measured.none("samples that a pause changed", [k for k, t in tokens_of(outputs).items() if whole[k] != t])


def unservable(lab: RolloutLab) -> dict[str, GenerationRequest]:
    """Requests that must raise a ConfigError."""
    room, prompt = lab.suite.max_model_tokens, lab.prompt(4, 240)
    given = lab.prompt(9, 241)
    wrong = {
        "an empty prompt": lab.ask("wrong", ()),
        "a prompt of all the room": lab.ask("wrong", lab.prompt(room, 240)),
        "a prompt of more than the room": lab.ask("wrong", lab.prompt(room + 40, 240)),
        "response_ids up to max_tokens": replace(lab.ask("wrong", prompt, max_tokens=9), response_ids=given),
        "response_ids behind max_tokens": replace(lab.ask("wrong", prompt, max_tokens=4), response_ids=given),
        "response_ids up to the room": replace(
            lab.ask("wrong", lab.prompt(room - 9, 240), max_tokens=99), response_ids=given
        ),
    }
    if Capability.MIN_P not in lab.spec.capabilities:
        wrong["min_p, not claimed"] = lab.ask("wrong", prompt, min_p=0.01)
    if Capability.STOP_STRINGS not in lab.spec.capabilities:
        wrong["stop strings, not claimed"] = lab.ask("wrong", prompt, stop_strings=("x", "yz"))
    return wrong


async def _spoiling(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    """Copies of samples from when they were yielded; the caller then overwrites the samples."""
    outputs = []
    async for output in engine.generate(requests):
        outputs.append(replace(output, token_ids=output.token_ids.copy(), log_probs=output.log_probs.copy()))
        for values, nonsense in ((output.token_ids, 1), (output.log_probs, np.nan)):
            with suppress(ValueError):  # read-only arrays cannot be overwritten
                values[:] = nonsense
    return outputs


async def _until_refused(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> tuple[list[GenerationOutput], bool]:
    """Samples that were yielded before a ConfigError, and whether it was raised."""
    outputs = []
    try:
        async for output in engine.generate(requests):
            outputs.append(output)
    except ConfigError:
        return outputs, True
    return outputs, False


async def _refused_beside(
    engine: RolloutEngine, others: Sequence[GenerationRequest], wrong: Sequence[GenerationRequest]
) -> list[GenerationOutput]:
    """Samples of a call during which another call was refused."""
    task = asyncio.create_task(collect(engine, others))
    for _ in range(4):
        await asyncio.sleep(0)
    await _until_refused(engine, wrong)
    return await task
