"""What requirements of a rollout engine share: one engine, requests in one line, and the plain model to hold it to."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Capability,
    GenerationOutput,
    GenerationRequest,
    LogProbKind,
    ModelSpec,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    SamplingParams,
    WeightShard,
)
from rlsdk.kit.guarded_rollout import GuardedRolloutEngine
from rlsdk.kit.hf import canonical_parameters
from rlsdk.testing.reference import load_plain_model

if TYPE_CHECKING:
    from rlsdk.testing.rollout_suite import RolloutConformance

T = TypeVar("T")
ATTEMPTS = 8
"""Tries to catch a call midway: engines that decode on their own may be done before they are reached."""
FIRST_PLAIN_ID = 8
"""Prompts are made of ids from here on: those below may have a meaning."""


class PlainModel:
    """transformers alone, with weights that can be exchanged."""

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False)

    @classmethod
    def load(cls, folder: Path) -> PlainModel:
        return cls(load_plain_model(str(folder)))

    @property
    def state(self) -> dict[str, Tensor]:
        """Canonical name -> parameter, tied copies once."""
        return {name: parameter.detach() for name, parameter in canonical_parameters(self.model)[0].items()}

    def with_state(self, state: Mapping[str, Tensor]) -> PlainModel:
        """A copy with these weights."""
        other = PlainModel(copy.deepcopy(self.model))
        for name, parameter in other.state.items():
            parameter.copy_(state[name])
        return other

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """`[L, V]` float64: what each token of a response was chosen from, in one pass over the whole row."""
        row = torch.tensor([[*prompt, *tokens]])
        found: Tensor = self.model(row).logits[0, len(prompt) - 1 : row.shape[1] - 1]
        return found.double()

    def next_logits(self, prompt: Sequence[int]) -> Tensor:
        """`[V]` float64: behind a prompt."""
        found: Tensor = self.model(torch.tensor([list(prompt)])).logits[0, -1]
        return found.double()


def kept(probabilities: Tensor, sampling: SamplingParams, slack: float = 0.0) -> Tensor:
    """`[..., V]` bool: what top-k, then top-p, then min-p leave.

    Args:
        probabilities: `[..., V]` after temperature.
        sampling: whose filters.
        slack: relative; tokens that miss a border by no more stay, where rounding may decide either way.
    """
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        border = ordered[..., min(sampling.top_k, ordered.shape[-1]) - 1 :][..., :1]
        keep &= ordered >= border * (1 - slack)
    if sampling.top_p < 1:
        inside = torch.where(keep, ordered, 0.0)
        before = inside.cumsum(-1) - inside
        keep &= before < (sampling.top_p + slack) * inside.sum(-1, keepdim=True)
    if sampling.min_p > 0:
        keep &= ordered >= sampling.min_p * ordered[..., :1] * (1 - slack)
    keep[..., 0] = True
    return torch.zeros_like(keep).scatter(-1, index, keep)


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """`[..., V]`: what tokens are drawn from."""
    probabilities = (logits / (sampling.temperature or 1.0)).softmax(-1)
    left = torch.where(kept(probabilities, sampling), probabilities, 0.0)
    return left / left.sum(-1, keepdim=True)


def contract_log_probs(logits: Tensor, sampling: SamplingParams, kind: LogProbKind) -> Tensor:
    """`[..., V]`: what a backend that gives log-probs of this kind has to say of each token."""
    if kind is LogProbKind.RAW:
        return logits.log_softmax(-1)
    if kind is LogProbKind.PROCESSED:
        return distribution(logits, sampling).log()
    return (logits / (sampling.temperature or 1.0)).log_softmax(-1)


def whole_shards(state: Mapping[str, Tensor]) -> Iterator[WeightShard]:
    """One shard per tensor."""
    return (WeightShard(name=name, box=Box.whole(tuple(t.shape)), tensor=t) for name, t in state.items())


def pieces(state: Mapping[str, Tensor]) -> list[WeightShard]:
    """Every tensor in two unequal pieces, those of one name together, the last name first."""
    found = []
    for name, tensor in reversed(list(state.items())):
        whole, cut = Box.whole(tuple(tensor.shape)), tensor.shape[0] // 3
        low = Box(whole.offset, (cut, *whole.size[1:]))
        high = Box((cut, *whole.offset[1:]), (tensor.shape[0] - cut, *whole.size[1:]))
        found += [WeightShard(name=name, box=box, tensor=tensor[box.slices(whole)]) for box in (high, low)]
    return found


class RolloutLab:
    """One backend under test. Its engine starts when it is first needed, and again after a requirement failed on it."""

    def __init__(self, suite: type[RolloutConformance], folder: Path, scratch: Path) -> None:
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
        """Engines so far."""
        self._engine: GuardedRolloutEngine | None = None

    @property
    def engine(self) -> GuardedRolloutEngine:
        """The shared engine: serves the model's own weights as version 0."""
        if self._engine is None:
            self._engine = self.start()
        return self._engine

    @property
    def inner(self) -> Any:
        """The shared engine without its guard, for tests of a plugin that look inside."""
        return self.engine.engine

    def start(self, **fields: Any) -> GuardedRolloutEngine:
        """Another engine; fields of its `RolloutSpec`, and `seed` and `rank` of its context."""
        model = fields.pop("model", None) or ModelSpec(path=str(self.folder), dtype="float32")
        self.num_started += 1
        engine = GuardedRolloutEngine(self.suite.registry().load_engine(self.spec)())
        ctx = RankContext(
            role="rollout",
            device=self.suite.device,
            seed=fields.pop("seed", 0),
            rank=fields.pop("rank", 0),
            scratch_dir=str(self.scratch),
            timeout_s=self.suite.timeout_s,
        )
        given: dict[str, Any] = {
            "max_model_tokens": self.suite.max_model_tokens,
            "max_running": self.suite.max_running,
            "tp_size": self.suite.tp_size,
            "options": self.options,
            "engine_kwargs": dict(self.suite.engine_kwargs),
            **fields,
        }
        try:
            engine.initialize(ctx, RolloutSpec(model=model, **given))
        except BaseException:
            engine.close()
            raise
        return engine

    def drop(self) -> None:
        """Ends the shared engine; the next use starts another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def restore(self) -> None:
        """Gives the shared engine its first weights back."""
        if self._engine is not None:
            self._engine.update_weights(whole_shards(self.base), 0)

    def close(self) -> None:
        try:
            self.drop()
        finally:
            self.runner.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the one event loop of this backend; never longer than the suite's deadline."""
        try:
            return self.runner.run(asyncio.wait_for(work, self.suite.timeout_s))
        except BaseException:
            # Calls that it left behind would be in the way of whatever is measured next.
            self.runner.run(_end_all_others())
            raise

    def run(self, requests: Sequence[GenerationRequest], engine: RolloutEngine | None = None) -> list[GenerationOutput]:
        """All samples of one call."""
        return self.wait(collect(engine or self.engine, requests))

    async def paused_midway(
        self, requests: Sequence[GenerationRequest], engine: RolloutEngine | None = None
    ) -> asyncio.Task[list[GenerationOutput]]:
        """A call that was paused when its samples had begun and had not all ended; the caller lets it go on.

        Raises:
            AssertionError: the engine was done before every pause.
        """
        engine = engine or self.engine
        for _ in range(ATTEMPTS):
            task = await self.under_way(requests, engine)
            engine.pause()
            # What was made before the pause may still be on its way.
            await asyncio.sleep(0.1)
            if not task.done():
                return task
            engine.resume()
            await task
        raise AssertionError(f"{ATTEMPTS} calls were done before they were paused")

    async def under_way(
        self, requests: Sequence[GenerationRequest], engine: RolloutEngine | None = None
    ) -> asyncio.Task[list[GenerationOutput]]:
        """A call whose samples have begun, if the engine gives samples out as they end; else it is done."""
        # Runs beside them: when it ends, they have begun. Long enough for all of them to come in, one at a time.
        scout, begun = self.ask("scout", self.prompt(4, 120), max_tokens=12), asyncio.Event()
        task = asyncio.create_task(_behind(engine or self.engine, scout, requests, begun))
        task.add_done_callback(lambda _: begun.set())
        await begun.wait()
        return task

    def prompt(self, length: int, salt: int = 0) -> tuple[int, ...]:
        """Tokens without a meaning; each `salt` gives others."""
        source = random.Random(1000 * salt + length)
        return tuple(source.randrange(FIRST_PLAIN_ID, self.vocabulary) for _ in range(length))

    def likely_end(self, length: int = 16, temperature: float = 1.5) -> tuple[tuple[int, ...], float]:
        """The prompt of many behind which the end-of-sequence token is likeliest, and its chance there."""
        prompts = [self.prompt(length, salt) for salt in range(100, 400)]
        logits = self.plain.model(torch.tensor(prompts)).logits[:, -1].double()
        chances = (logits / temperature).softmax(-1)[:, self.eos]
        return prompts[int(chances.argmax())], float(chances.max())

    def ask(self, name: str, prompt: Sequence[int], n: int = 1, **sampling: Any) -> GenerationRequest:
        """A request; seeded where the backend claims that seeds count."""
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
        """Largest difference of any log-prob from the plain model's; infinite where lengths differ."""
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
        """Other weights, every tensor some way off."""
        generator = torch.Generator().manual_seed(seed)
        return {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in self.base.items()}


async def collect(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    return [output async for output in engine.generate(requests)]


async def _end_all_others() -> None:
    """Cancels every task of the loop that is still there, and waits until it has cleaned up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _behind(
    engine: RolloutEngine, scout: GenerationRequest, requests: Sequence[GenerationRequest], begun: asyncio.Event
) -> list[GenerationOutput]:
    """Samples of all but the scout, whose end sets `begun`."""
    outputs = []
    async for output in engine.generate([scout, *requests]):
        begun.set()
        if output.request_id != scout.request_id:
            outputs.append(output)
    return outputs


def sample_indices(request: GenerationRequest) -> range:
    """Of the samples that a request asks for."""
    return range(request.first_sample, request.first_sample + request.n)


def tokens_of(outputs: Sequence[GenerationOutput]) -> dict[tuple[str, int], list[int]]:
    """Request and sample index -> tokens."""
    return {(o.request_id, o.sample_index): o.token_ids.tolist() for o in outputs}


def wrong_identities(requests: Sequence[GenerationRequest], outputs: Sequence[GenerationOutput]) -> list[str]:
    """Samples that are missing, came twice, or were never asked for."""
    wanted = [(request.request_id, index) for request in requests for index in sample_indices(request)]
    came = [(output.request_id, output.sample_index) for output in outputs]
    faults = [f"{key} is missing" for key in wanted if key not in came]
    faults += [f"{key} came {came.count(key)} times" for key in dict.fromkeys(came) if came.count(key) > 1]
    return faults + [f"{key} was not asked for" for key in dict.fromkeys(came) if key not in wanted]
