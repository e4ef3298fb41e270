"""Requirements: batch invariance. A sample does not depend on other requests in its call or in the engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsdk.interfaces import Capability, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.process.modes import torch_modes
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.draw_statistics import DrawStatistics, Noise
from rlsdk.testing.rollout.lab import ATTEMPTS, RolloutLab, collect, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.rollout.requests import at_random, kinds, stopping, stopping_by_text
from rlsdk.testing.suites.requirements import Measured, requirement

NAMES = ("a", "a1", "a_1", "a-1", "a/1", "a:1", "a.1", "1", "10", "0", "a 1", "Ä", "x" * 200, "None", "a_1_0", "a-1-0")
"""Request ids that an engine may confuse once it has appended a number to them."""


FIRST_SHARE = 0.5
"""Largest share of a call's time until its first sample, if its longest response is a hundred times its shortest."""


class BatchInvarianceRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("batch_invariance.kinds", since=(2, 0))
    def test_batch_invariance_kinds(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """With requests of every kind in one call, each is sampled, filtered, limited and stopped as requested."""
        requests, fresh = list(kinds(lab)), []
        for order in (requests, random.Random(1).sample(requests, len(requests)), requests):
            outputs = lab.run(order)
            faults, samples = audit(lab, order, outputs)
            measured.none("wrong samples", faults)
            measured.none("draws that follow something else", DrawStatistics.of(samples, lab.eos).faults())
            fresh += [tuple(sample.tokens.tolist()) for sample in samples if sample.request.request_id == "no seed"]
        measured.record("kinds", len(requests))
        measured.equal("distinct samples without a seed", len(set(fresh)), len(fresh))

    @requirement("batch_invariance.seeded", needs=Capability.SEED, since=(2, 0))
    def test_batch_invariance_seeded(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Seeded requests of every kind get the same tokens in one call as each alone."""
        requests = [request for request in kinds(lab) if request.sampling.seed is not None]
        together = tokens_of(lab.run(requests))
        changed = []
        for request in requests:
            for key, tokens in tokens_of(lab.run([request])).items():
                if together.get(key) != tokens:
                    changed.append(f"{key[0]}/{key[1]}")
        measured.record("samples", len(together))
        measured.none("samples that other requests changed", changed)

    @requirement("batch_invariance.minority", needs=Capability.SEED, since=(2, 0), basic=True)
    def test_batch_invariance_minority(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A request that differs in kind from all others in its call gets the same tokens as alone: the majority does
        not affect it."""
        settings: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0.0},
            "hot": {"temperature": 1.6},
            "top-k": {"top_k": 5},
            "top-p": {"top_p": 0.6},
        }
        few = {
            name: lab.ask(f"one {name}", lab.prompt(7, 160), 2, max_tokens=12, seed=9, **sampling)
            for name, sampling in settings.items()
        }
        alone = {name: tokens_of(lab.run([request])) for name, request in few.items()}
        for most, sampling in settings.items():
            many = [
                lab.ask(f"many{at}", lab.prompt(5 + at, 161), max_tokens=12, seed=at, **sampling) for at in range(16)
            ]
            requests = [*many, *(request for name, request in few.items() if name != most)]
            outputs = lab.run(requests)
            faults, _ = audit(lab, requests, outputs)
            measured.none(f"wrong samples, most are {most}", faults)
            found = tokens_of(outputs)
            changed = [
                key for name in few if name != most for key, tokens in alone[name].items() if found[key] != tokens
            ]
            measured.none(f"samples that the majority changed, most are {most}", changed)

    @requirement("batch_invariance.random_batches", since=(2, 0))
    def test_batch_invariance_random_batches(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """In calls of randomly combined requests, each request gets what it asked for."""
        for seed in range(4):
            requests = list(at_random(lab, seed, 12))
            faults, _ = audit(lab, requests, lab.run(requests))
            measured.none(f"wrong samples, call {seed}", faults)

    @requirement("batch_invariance.many_samples", since=(2, 0))
    def test_batch_invariance_many_samples(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """64 and 200 samples of one prompt, together with requests with the same prompt, are independent; greedy
        samples are equal."""
        prompt = lab.prompt(7, 150)
        requests = [
            lab.ask("200", prompt, 200, max_tokens=12, temperature=1.5, seed=1),
            lab.ask("64", prompt, 64, max_tokens=12, temperature=1.5, seed=2),
            lab.ask("other", lab.prompt(9, 151), 3, max_tokens=30, seed=3),
            *(lab.ask(f"one{at}", prompt, 1, max_tokens=12, temperature=1.5, seed=10 + at) for at in range(6)),
            lab.ask("greedy", prompt, 20, max_tokens=12, temperature=0.0),
        ]
        outputs = lab.run(requests)
        faults, samples = audit(lab, requests, outputs)
        measured.none("wrong samples", faults)
        hot = [sample for sample in samples if sample.sampling.temperature == 1.5]
        distinct = {tuple(sample.tokens.tolist()) for sample in hot}
        measured.equal("distinct samples of one prompt", len(distinct), len(hot))
        ordered = sorted(hot, key=lambda sample: (sample.request.request_id, sample.output.sample_index))
        measured.none("draws that depend on others", Noise.of(ordered[:80]).faults())
        greedy = {tuple(tokens) for (name, _), tokens in tokens_of(outputs).items() if name == "greedy"}
        measured.equal("distinct greedy samples", len(greedy), 1)

    @requirement("batch_invariance.similar_prompts", since=(2, 0))
    def test_batch_invariance_similar_prompts(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Similar prompts are not confused: prompts of one length, with the same end, beginning or middle, or the same
        tokens in another order; in one call and in consecutive calls."""
        length = min(96, lab.suite.max_model_tokens // 2)
        first, second = lab.prompt(length, 260), lab.prompt(length, 261)
        texts = {"one": first, "reversed": first[::-1], "turned": (*first[1:], first[0])}
        for shared in (1, 4, 8, 16, 32, 64):
            texts |= {
                f"same {shared} last": (*second[:-shared], *first[-shared:]),
                f"same {shared} first": (*first[:shared], *second[shared:]),
                f"same {shared} in the middle": (*second[:8], *first[8 : 8 + shared], *second[8 + shared :]),
                f"all but {shared} first": (*second[:shared], *first[shared:]),
            }
        requests = [lab.ask(name, text, 1, max_tokens=3, seed=3) for name, text in texts.items()]
        measured.none("wrong samples", audit(lab, requests, lab.run(requests))[0])
        alone = [output for request in requests[::3] for output in lab.run([request])]
        measured.none("wrong samples, one after the other", audit(lab, requests[::3], alone)[0])

    @requirement("batch_invariance.request_ids", since=(2, 0))
    def test_batch_invariance_request_ids(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Request ids are arbitrary text: similar ids are not confused."""
        requests = [
            lab.ask(name, lab.prompt(3 + at, 152), 12 if at < 2 else 2, max_tokens=4 + at, seed=at)
            for at, name in enumerate(NAMES)
        ]
        measured.none("wrong samples", audit(lab, requests, lab.run(requests))[0])
        measured.none("samples of a call without requests", lab.run([]))

    @requirement("any_token", since=(2, 0))
    def test_any_token(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Every id of the vocabulary is an ordinary token in prompts and in responses to continue, including padding,
        end tokens and repeated tokens; and it has its log-prob, however improbable it is."""
        every = [*range(lab.vocabulary)]
        texts = {
            "padding and ends": [0, 9, 0, lab.eos, 10, lab.eos, 0, 0, 11, *every[:12]],
            "ends last": [9, 10, 11, lab.eos],
            "padding last": [9, 10, 11, 0, 0],
            "padding first": [0, 0, 0, 9, 10, 11],
            "one token": [12] * 40,
            "all": every[:200],
        }
        for special in (0, lab.eos, lab.vocabulary - 1):
            rest = (9, 10, 11)
            for name, ids in {"first": (special, *rest), "twice": (special, special, *rest), "alone": (special,),
                              "inside": (9, special, 10), "last": (*rest, special)}.items():  # fmt: skip
                texts[f"{special} {name}"] = [*ids]
        pad = lab.plain.model.config.get_text_config().pad_token_id
        if pad is not None:
            texts |= {f"id {pad}, {at}": [*[pad] * at, 9, pad, 10, *[pad] * at] for at in range(3)}
        requests = [lab.ask(name, ids, 2, max_tokens=12) for name, ids in texts.items()]
        requests += [
            replace(lab.ask(f"behind {name}", lab.prompt(5, 159), 2, max_tokens=len(ids) + 6), response_ids=tuple(ids))
            for name, ids in texts.items()
        ]
        # At the highest temperature, improbable tokens are sampled too.
        requests += [
            lab.ask(f"hot {at}", lab.prompt(5 + at, 159), 12, max_tokens=20, temperature=2.0) for at in range(3)
        ]
        faults, samples = audit(lab, requests, lab.run(requests))
        measured.none("wrong samples", faults)
        measured.record("least log-prob", min(float(sample.output.log_probs.min()) for sample in samples))

    @requirement("slow_caller", since=(2, 0))
    def test_slow_caller(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A caller may be slow between two samples: none is lost, and other calls continue meanwhile."""
        requests = [lab.ask(f"r{at}", lab.prompt(5, 161), 3, max_tokens=2 + 6 * at, seed=at) for at in range(3)]
        other = [lab.ask("other", lab.prompt(8, 162), 2, max_tokens=30)]
        shared = Capability.ABORT in lab.spec.capabilities

        async def slowly() -> tuple[list[GenerationOutput], list[GenerationOutput]]:
            outputs: list[GenerationOutput] = []
            others: list[GenerationOutput] = []
            async for output in engine.generate(requests):
                outputs.append(output)
                if shared and not others:
                    others = await collect(engine, other)
                await asyncio.sleep(0.06)
            return outputs, others

        outputs, others = lab.wait(slowly())
        measured.none("wrong samples", audit(lab, requests, outputs)[0])
        measured.none("wrong samples of another call", audit(lab, other, others)[0] if shared else [])

    @requirement("batch_invariance.stop_tokens", since=(2, 0))
    def test_batch_invariance_stop_tokens(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Each request stops at its own stop tokens (one or many), even as the first or the last allowed token, but not
        at those in its prompt."""
        for salt in range(3):
            requests = list(stopping(lab, salt))
            faults, samples = audit(lab, requests, lab.run(requests))
            measured.none("wrong samples", faults)
            measured.none("draws that follow something else", DrawStatistics.of(samples, lab.eos).faults())
        if Capability.STOP_STRINGS in lab.spec.capabilities:
            requests = list(stopping_by_text(lab))
            measured.none("wrong samples by text", audit(lab, requests, lab.run(requests))[0])

    @requirement("batch_invariance.staggered_calls", needs=Capability.ABORT, since=(2, 0))
    def test_batch_invariance_staggered_calls(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Calls that begin while others run do not change them, and get what they asked for; their ids may be equal."""
        calls = [list(at_random(lab, 20 + at, 5)) for at in range(4)]
        measured.record("calls", len(calls))
        for at, (requests, outputs) in enumerate(zip(calls, lab.wait(staggered(engine, calls)), strict=True)):
            measured.none(f"wrong samples, call {at}", audit(lab, requests, outputs)[0])
            if Capability.SEED in lab.spec.capabilities:
                seeded = [request for request in requests if request.sampling.seed is not None]
                alone, found = tokens_of(lab.run(seeded)), tokens_of(outputs)
                measured.none("samples that other calls changed", [key for key in alone if found[key] != alone[key]])

        long = [[lab.ask("long", lab.prompt(6, 163), max_tokens=lab.suite.max_model_tokens - 8)] for _ in range(5)]
        early = 0
        for _ in range(ATTEMPTS):
            early += lab.wait(_first_done(engine, [*long, [lab.ask("short", lab.prompt(6, 164), max_tokens=2)]])) == 5
            if early:
                break
        measured.at_least("short calls that ended before long ones that had begun", early, 1)

    @requirement("streaming", since=(2, 0))
    def test_streaming(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Samples are yielded as they finish, not when all have finished, and do not change afterwards. An engine with
        several threads may yield samples out of order by chance, so it gets several attempts."""
        requests = [
            lab.ask("long", lab.prompt(6, 155), 2, max_tokens=lab.suite.max_model_tokens - 8),
            *(lab.ask(f"short{at}", lab.prompt(5 + at, 156), 3, max_tokens=2 + 3 * at) for at in range(4)),
        ]
        late, share = len(requests) * 3, 1.0
        for _ in range(ATTEMPTS // 2):
            outputs, copies, waited = lab.wait(_with_copies(engine, requests))
            changed = [
                f"{output.request_id}/{output.sample_index}"
                for output, (tokens, logs) in zip(outputs, copies, strict=True)
                if output.token_ids.tolist() != tokens or output.log_probs.tolist() != logs
            ]
            measured.none("samples that changed after they were given out", changed)
            order = [output.request_id for output in outputs]
            late = min(late, sum(name != "long" for name in order[order.index("long") :]))
            share = min(share, waited)
            if late == 0 and share <= FIRST_SHARE:
                break
        measured.none("wrong samples", audit(lab, requests, outputs)[0])
        measured.equal("short samples behind a long one", late, 0)
        measured.at_most("share of the call's time that was over when the first sample came", share, FIRST_SHARE)

    @requirement("torch_modes", since=(2, 0))
    def test_torch_modes(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Code that runs between two samples sees no changed modes: gradients, default dtype and device, deterministic
        mode."""
        requests = [lab.ask(f"r{at}", lab.prompt(5, 158), 2, max_tokens=2 + 4 * at, seed=5) for at in range(3)]
        before = torch_modes()

        async def between() -> list[str]:
            found = []
            async for output in engine.generate(requests):
                found += [f"{name} {value} behind {output.request_id}" for name, value in torch_modes() - before]
            return found

        measured.none("modes that generate changed", lab.wait(between()))
        if lab.spec.takes_weights:
            engine.update_weights(whole_shards(lab.base), 0)
        measured.none("modes that stay changed", sorted(map(str, torch_modes() - before)))


async def staggered(
    engine: RolloutEngine, calls: Sequence[Sequence[GenerationRequest]]
) -> list[list[GenerationOutput]]:
    """The samples of every call; each call begins some steps after the previous one."""
    tasks = []
    for requests in calls:
        tasks.append(asyncio.create_task(collect(engine, requests)))
        for _ in range(5):
            await asyncio.sleep(0)
    return [await task for task in tasks]


async def _first_done(engine: RolloutEngine, calls: Sequence[Sequence[GenerationRequest]]) -> int:
    """Index of the call that ends first; the calls begin in this order."""
    tasks = []
    for requests in calls:
        tasks.append(asyncio.create_task(collect(engine, requests)))
        await asyncio.sleep(0)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first = [task.done() for task in tasks].index(True)
    await asyncio.gather(*tasks)
    return first


async def _with_copies(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> tuple[list[GenerationOutput], list[tuple[list[int], list[float]]], float]:
    """Samples, a copy of each from when it was yielded, and the share of the call's time until the first one."""
    outputs: list[GenerationOutput] = []
    copies: list[tuple[list[int], list[float]]] = []
    start = time.perf_counter()
    first = start
    async for output in engine.generate(requests):
        first = first if outputs else time.perf_counter()
        outputs.append(output)
        copies.append((output.token_ids.tolist(), output.log_probs.tolist()))
    return outputs, copies, (first - start) / (time.perf_counter() - start)
