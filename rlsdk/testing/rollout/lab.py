"""Test harness for requirements of rollout engines: one shared engine, requests, and the plain model."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from torch import Tensor

from rlsdk.interfaces import (
    AdapterSpec,
    Box,
    Capability,
    GenerationOutput,
    GenerationRequest,
    ModelSpec,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    SamplingParams,
    WeightShard,
)
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.testing.process.modes import kept_modes
from rlsdk.testing.process.resources import children
from rlsdk.testing.rollout.oracle import Oracle, wrong_counts
from rlsdk.testing.rollout.plain_model import PlainModel, contract_log_probs
from rlsdk.testing.rollout.recorder import Record, RecordingRolloutEngine

if TYPE_CHECKING:
    from rlsdk.testing.rollout.audit import Sample
    from rlsdk.testing.rollout.settings import RolloutSettings
    from rlsdk.testing.suites.requirements import Measured

T = TypeVar("T")
ATTEMPTS = 8
"""Attempts to interrupt a running call: engines that decode by themselves may finish before."""
SECOND: dict[str, Any] = {"seed": 23, "rank": 2}
"""Seed and rank in the context of a second replica; a third has this seed too, and rank 0."""
FIRST_PLAIN_ID = 8
"""Smallest id in prompts: ids below may be special tokens."""


def whole_shards(state: Mapping[str, Tensor]) -> Iterator[WeightShard]:
    """One shard per tensor."""
    return (WeightShard(name=name, box=Box.whole(tuple(t.shape)), tensor=t) for name, t in state.items())


def pieces(state: Mapping[str, Tensor]) -> list[WeightShard]:
    """Every tensor in two unequal pieces, which are adjacent; the last name comes first."""
    found = []
    for name, tensor in reversed(list(state.items())):
        whole, cut = Box.whole(tuple(tensor.shape)), tensor.shape[0] // 3
        low = Box(whole.offset, (cut, *whole.size[1:]))
        high = Box((cut, *whole.offset[1:]), (tensor.shape[0] - cut, *whole.size[1:]))
        found += [WeightShard(name=name, box=box, tensor=tensor[box.slices(whole)]) for box in (high, low)]
    return found


class RolloutLab:
    """One backend under test. Its engine starts when it is first needed, and again after a requirement failed on it."""

    def __init__(self, suite: type[RolloutSettings], folder: Path, scratch: Path) -> None:
        self.suite, self.folder, self.scratch = suite, folder, scratch
        self.spec = suite.spec()
        self.kind = self.spec.log_prob_kind
        self.options = suite.built_options()
        self.plain = PlainModel.load(folder)
        self.base = {name: tensor.clone() for name, tensor in self.plain.state.items()}
        self.vocabulary = int(self.plain.model.config.get_text_config().vocab_size)
        self.eos = int(self.plain.model.config.get_text_config().eos_token_id)
        self.runner = asyncio.Runner()
        self.num_started = 0
        """Number of engines so far."""
        self.oracle = Oracle(self)
        self.first_draws: list[Sample] = []
        """Samples of the first call, without seeds, of an engine with `SECOND`."""
        self.split_workers: Sequence[psutil.Process] = ()
        """Processes that the split engine started."""
        self._engine: GuardedRolloutEngine | None = None
        self._split: GuardedRolloutEngine | None = None
        self._adapting: GuardedRolloutEngine | None = None
        self._records: list[tuple[Record, int, weakref.ref[RecordingRolloutEngine]]] = []
        """Record of each engine, with the number of tokens that the engine has room for."""

    @property
    def engine(self) -> GuardedRolloutEngine:
        """The shared engine: serves the model's own weights as version 0."""
        if self._engine is None:
            self.drop_adapting()
            self._engine = self.start()
        return self._engine

    @property
    def split(self) -> GuardedRolloutEngine:
        """An engine with `tensor_parallel` workers, shared by the requirements about it, because such engines start
        slowly. The shared engine with one worker ends first. A requirement that fails calls `drop_split`."""
        if self._split is None:
            self.drop()
            before = set(children())
            self._split = self.start(tp_size=self.suite.tensor_parallel)
            self.split_workers = [process for process in children() if process not in before]
        return self._split

    def adapting(self, spec: AdapterSpec, versions: int = 1) -> GuardedRolloutEngine:
        """An engine that keeps so many versions of this adapter, without weights at first; shared by requirements that
        ask for the same one after another. The shared engine without one ends first."""
        if self._adapting is not None and self._adapts != (spec, versions):
            self.drop_adapting()
        if self._adapting is None:
            self.drop()
            self._adapting = self.start(adapter=spec, adapter_versions=versions, load_weights=False)
            self._adapts = spec, versions
        return self._adapting

    _adapts: tuple[AdapterSpec, int] | None = None

    @property
    def inner(self) -> Any:
        """The shared engine without its guard, for a plugin's tests of internals."""
        return self.engine.engine

    def start(self, **fields: Any) -> GuardedRolloutEngine:
        """Starts another engine. `fields`: fields of its `RolloutSpec`, `seed` and `rank` of its context, and `folder`
        or `adapter` of the model."""
        model, seed, rank = fields.get("model"), fields.pop("seed", 0), fields.pop("rank", 0)
        if (adapter := fields.pop("adapter", None)) is not None:
            fields["model"] = ModelSpec(path=str(self.folder), dtype="float32", adapter=adapter)
        spec = self.rollout_spec(**fields)
        self.num_started += 1
        inner = self.suite.registry().load_engine(self.spec)()
        engine = RecordingRolloutEngine(inner, self.base if model is None else None)
        ctx = RankContext(
            role="rollout",
            device=self.suite.device,
            seed=seed,
            rank=rank,
            scratch_dir=str(self.scratch),
            timeout_s=self.suite.timeout_s,
        )
        try:
            # An engine may set the number of threads for its process.
            with kept_modes("initialize", but="threads"):
                engine.initialize(ctx, spec)
        except BaseException:
            engine.close()
            raise
        self._records.append((engine.record, spec.max_model_tokens, weakref.ref(engine)))
        return engine

    def rollout_spec(self, *, folder: Path | None = None, **fields: Any) -> RolloutSpec:
        """The specification of engines, with these fields replaced; `folder`: another model folder."""
        given: dict[str, Any] = {
            "model": ModelSpec(path=str(folder or self.folder), dtype="float32"),
            "max_model_tokens": self.suite.max_model_tokens,
            "max_running": self.suite.max_running,
            "tp_size": self.suite.tp_size,
            "options": self.options,
            "engine_kwargs": dict(self.suite.engine_kwargs),
            **fields,
        }
        return RolloutSpec(**given)

    def verify(self, measured: Measured) -> None:
        """Checks the invariants of every answer on all answers of the requirement that has ended."""
        faults = [fault for record, room, _ in self._records for fault in self.oracle.faults(record, room)]
        faults += [fault for record, _, _ in self._records for fault in record.take_faults()]
        engines = [engine for _, _, one in self._records if (engine := one()) is not None]
        faults += [fault for engine in engines for fault in wrong_counts(engine)]
        self._records = [one for one in self._records if one[2]() is not None]
        if faults:
            measured.none("answers that are not what was asked for", faults)

    def forget(self) -> None:
        """Drops the records of a requirement that failed."""
        for record, _, _ in self._records:
            record.take_calls()
            record.take_faults()

    def drop(self) -> None:
        """Ends the shared engine; the next use starts another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def drop_split(self) -> None:
        """Ends the engine with several workers."""
        engine, self._split = self._split, None
        if engine is not None:
            engine.close()

    def drop_adapting(self) -> None:
        """Ends the engine with an adapter."""
        engine, self._adapting = self._adapting, None
        if engine is not None:
            engine.close()

    def restore(self) -> None:
        """Restores the first weights of the shared engine."""
        if self._engine is not None:
            self._engine.update_weights(whole_shards(self.base), 0)

    def close(self) -> None:
        try:
            self.drop_split()
            self.drop_adapting()
            self.drop()
        finally:
            self.runner.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on this backend's event loop, at most until the suite's deadline."""
        try:
            return self.runner.run(asyncio.wait_for(work, self.suite.timeout_s))
        except BaseException:
            # Calls that are still running would disturb the next measurement.
            self.runner.run(_end_all_others())
            raise

    def run(self, requests: Sequence[GenerationRequest], engine: RolloutEngine | None = None) -> list[GenerationOutput]:
        """All samples of one call."""
        return self.wait(collect(engine or self.engine, requests))

    async def paused_midway(
        self, requests: Sequence[GenerationRequest], engine: RolloutEngine | None = None
    ) -> asyncio.Task[list[GenerationOutput]]:
        """A call that was paused after its samples began and before all ended; the caller resumes it.

        Raises:
            AssertionError: the engine always finished before the pause.
        """
        engine = engine or self.engine
        for _ in range(ATTEMPTS):
            task = await self.under_way(requests, engine)
            engine.pause()
            # Tokens from before the pause may still arrive.
            await asyncio.sleep(0.1)
            if not task.done():
                return task
            engine.resume()
            await task
        raise AssertionError(f"{ATTEMPTS} calls were done before they were paused")

    async def under_way(
        self, requests: Sequence[GenerationRequest], engine: RolloutEngine | None = None
    ) -> asyncio.Task[list[GenerationOutput]]:
        """A call whose samples have begun, if the engine yields samples as they end; otherwise the call has ended."""
        # The scout runs with them: when it ends, they have begun. It is long enough for all to be admitted one by one.
        scout, begun = self.ask("scout", self.prompt(4, 120), max_tokens=12), asyncio.Event()
        task = asyncio.create_task(_behind(engine or self.engine, scout, requests, begun))
        task.add_done_callback(lambda _: begun.set())
        await begun.wait()
        return task

    def prompt(self, length: int, salt: int = 0) -> tuple[int, ...]:
        """Tokens that are not special; each `salt` gives different ones."""
        source = random.Random(1000 * salt + length)
        return tuple(source.randrange(FIRST_PLAIN_ID, self.vocabulary) for _ in range(length))

    def likely_end(self, length: int = 16, temperature: float = 1.5) -> tuple[tuple[int, ...], float]:
        """The prompt, of many, after which the end-of-sequence token is most probable, and its probability."""
        return self.best_prompts([self.eos], length, temperature)[0]

    def best_prompts(
        self, tokens: Sequence[int], length: int, temperature: float
    ) -> list[tuple[tuple[int, ...], float]]:
        """For each token, the prompt, of many, after which it is most probable, and its probability."""
        prompts = [self.prompt(length, salt) for salt in range(100, 400)]
        logits = self.plain.model(torch.tensor(prompts)).logits[:, -1].double()
        chances = (logits / temperature).softmax(-1)[:, list(tokens)]
        return [(prompts[int(own.argmax())], float(own.max())) for own in chances.T]

    def ask(self, name: str, prompt: Sequence[int], n: int = 1, **sampling: Any) -> GenerationRequest:
        """A request; seeded if the backend claims that it honours seeds."""
        seed = sampling.pop("seed", 7)
        if Capability.SEED not in self.spec.capabilities:
            seed = None
        params = SamplingParams(**{"max_tokens": 8, "seed": seed, **sampling})
        return GenerationRequest(request_id=name, prompt_ids=tuple(prompt), n=n, sampling=params)

    def expected(self, plain: PlainModel, request: GenerationRequest, output: GenerationOutput) -> Tensor:
        """`[L]` float64: the log-probs that this sample should have."""
        tokens = output.token_ids.tolist()
        logs = contract_log_probs(
            plain.logits((*request.prompt_ids, *request.response_ids), tokens), request.sampling, self.kind
        )
        return logs[range(len(tokens)), tokens]

    def worst(
        self,
        requests: Sequence[GenerationRequest],
        outputs: Sequence[GenerationOutput],
        plain: PlainModel | None = None,
    ) -> float:
        """Largest difference of any log-prob from the plain model's; infinite if lengths differ."""
        asked = {request.request_id: request for request in requests}
        differences = [0.0]
        for output in outputs:
            if len(output.log_probs) != len(output.token_ids):
                return float("inf")
            if len(output.token_ids):
                expected = self.expected(plain or self.plain, asked[output.request_id], output)
                found = torch.as_tensor(output.log_probs, dtype=torch.float64)
                differences.append(float((found - expected).abs().max()))
        return max(differences) if all(value == value for value in differences) else float("inf")

    def changed(self, seed: int) -> dict[str, Tensor]:
        """Other weights, in which every tensor is changed."""
        generator = torch.Generator().manual_seed(seed)
        return {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in self.base.items()}


async def decoded(engine: RolloutEngine, num_tokens: int, most_s: float) -> None:
    """Waits until the engine has decoded this number of further tokens: as many on fast machines as on slow ones. After
    `most_s` seconds it returns anyway, because in a pause none come."""
    before, loop = engine.num_decoded() or 0, asyncio.get_running_loop()
    deadline = loop.time() + most_s
    while loop.time() < deadline and (engine.num_decoded() or 0) - before < num_tokens:
        await asyncio.sleep(0)


async def collect(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    return [output async for output in engine.generate(requests)]


async def _end_all_others() -> None:
    """Cancels every remaining task of the loop, and waits until it has cleaned up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _behind(
    engine: RolloutEngine, scout: GenerationRequest, requests: Sequence[GenerationRequest], begun: asyncio.Event
) -> list[GenerationOutput]:
    """Samples of all requests except the scout, whose end sets `begun`."""
    outputs = []
    async for output in engine.generate([scout, *requests]):
        begun.set()
        if output.request_id != scout.request_id:
            outputs.append(output)
    return outputs
