"""What runs inside a worker: a thin host around one engine of one role.

A host adds what the controller needs and no engine should care about: the dispatch declaration of each method, the
packed form of samples, and the doors through which weights leave and arrive.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsdk.cluster import Join, Split, dispatch
from rlsdk.config import build_options, config_error
from rlsdk.interfaces import (
    BackendSpec,
    Batch,
    Bucket,
    FinishReason,
    ForwardBackwardResult,
    GenerationOutput,
    GenerationRequest,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    TrainEngine,
    TrainSpec,
    Transfer,
    WeightLayout,
)
from rlsdk.kit.guarded_rollout import GuardedRolloutEngine
from rlsdk.kit.guarded_train import GuardedTrainEngine
from rlsdk.sharding import WeightSource, WeightTarget

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlsdk.interfaces import Peer


def import_class(path: str) -> Any:
    """The object that `package.module:Name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """A backend's own options on their way to its worker: plain data, of which only the worker makes the plugin's own
    class. The controller may live in an environment that cannot import it."""

    spec: BackendSpec
    raw: Mapping[str, Any]

    def build(self) -> object | None:
        """The instance that goes into `TrainSpec.options` or `RolloutSpec.options`.

        Raises:
            ConfigError: what only the plugin's own class could find wrong.
        """
        if self.spec.options is None:
            return None
        built, problems = build_options(import_class(self.spec.options), self.raw)
        if problems:
            prefix = f"{self.spec.kind}.{self.spec.name}"
            raise config_error([replace(problem, path=f"{prefix}.{problem.path}") for problem in problems])
        return built


@dataclass(frozen=True, kw_only=True)
class MiniBatchResult:
    """One optimizer step over one mini-batch."""

    update: ForwardBackwardResult
    step: OptimStepResult
    seconds: float


class TrainHost:
    """One rank of a train engine."""

    def __init__(self, ctx: RankContext, engine: str, spec: TrainSpec, options: EngineOptions) -> None:
        self.engine: TrainEngine = GuardedTrainEngine(import_class(engine)())
        self.engine.initialize(ctx, replace(spec, options=options.build()))
        self.source = WeightSource(self.engine, ctx.accelerators)

    @property
    def parallel(self) -> Parallel:
        return self.engine.parallel

    @dispatch(split=Split.DATA, join=Join.ROWS)
    def forward(self, batch: Batch, outputs: Mapping[str, str]) -> Batch:
        """Computes engine outputs without gradient; `outputs` maps an output to the field it is stored under."""
        result = self.engine.forward(batch, tuple(outputs))
        fields = {outputs[name]: tensor for name, tensor in result.items()}
        per_row = {field: tensor for field, tensor in fields.items() if field == "scores"}
        per_token = {field: tensor for field, tensor in fields.items() if field != "scores"}
        return batch.keep(()).with_tokens(**per_token).with_rows(**per_row)

    @dispatch(split=Split.DATA, join=Join.FIRST)
    def update(self, batch: Batch, objective: Objective) -> MiniBatchResult:
        """One mini-batch: gradient of the objective over all ranks, then one optimizer step."""
        start = time.perf_counter()
        update = self.engine.forward_backward(batch, objective)
        step = self.engine.optim_step()
        return MiniBatchResult(update=update, step=step, seconds=time.perf_counter() - start)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def reset_optimizer(self, optim: OptimSpec) -> None:
        self.engine.reset_optimizer(optim)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def save_checkpoint(self, path: str) -> None:
        self.engine.save_checkpoint(Path(path))

    @dispatch(split=Split.ALL, join=Join.NONE)
    def load_checkpoint(self, path: str) -> None:
        self.engine.load_checkpoint(Path(path))

    @dispatch(split=Split.ALL, join=Join.NONE)
    def save_pretrained(self, path: str) -> None:
        self.engine.save_pretrained(Path(path))

    @dispatch(split=Split.ALL, join=Join.NONE)
    def offload(self, parts: Sequence[str]) -> None:
        self.engine.offload(parts)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def onload(self, parts: Sequence[str]) -> None:
        self.engine.onload(parts)

    @dispatch(split=Split.ALL, join=Join.LIST)
    def weight_layout(self) -> WeightLayout:
        return self.source.layout()

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def export_weights(self, bucket: Bucket) -> Mapping[str, Any]:
        return self.source.export(bucket)

    @dispatch(split=Split.ALL, join=Join.LIST)
    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> dict[str, int]:
        return self.source.fingerprints(transfers)

    def close(self) -> None:
        self.source.close()
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Finished samples of many requests, packed: sample k has tokens `[ends[k] - lengths[k], ends[k])`."""

    request: NDArray[np.int64]
    """`[S]`: position of the sample's request in the list that was asked."""
    lengths: NDArray[np.int64]
    """`[S]` response tokens."""
    token_ids: NDArray[np.int64]
    """Flat, sample after sample."""
    log_probs: NDArray[np.float32]
    truncated: NDArray[np.bool_]
    """`[S]` finished by length."""
    aborted: NDArray[np.bool_]
    policy_version: NDArray[np.int64]
    """`[S]` of the first token."""

    @classmethod
    def pack(cls, requests: Sequence[GenerationRequest], outputs: Sequence[GenerationOutput]) -> Samples:
        """Orders outputs by request and sample index, so that a run does not depend on who finished first."""
        position = {request.request_id: at for at, request in enumerate(requests)}
        ordered = sorted(outputs, key=lambda o: (position[o.request_id], o.sample_index))
        return cls(
            request=np.array([position[o.request_id] for o in ordered], np.int64),
            lengths=np.array([len(o.token_ids) for o in ordered], np.int64),
            token_ids=np.concatenate([o.token_ids for o in ordered] or [np.empty(0, np.int64)]),
            log_probs=np.concatenate([o.log_probs for o in ordered] or [np.empty(0, np.float32)]),
            truncated=np.array([o.finish_reason is FinishReason.LENGTH for o in ordered], np.bool_),
            aborted=np.array([o.finish_reason is FinishReason.ABORT for o in ordered], np.bool_),
            policy_version=np.array([o.policy_version for o in ordered], np.int64),
        )

    @classmethod
    def merge(cls, parts: Sequence[Samples], requests: Sequence[Sequence[int]]) -> Samples:
        """Joins what replicas made; `requests[r][i]` is the overall position of replica r's request i."""
        overall = [np.asarray(index, np.int64)[part.request] for part, index in zip(parts, requests, strict=True)]
        request = np.concatenate(overall)
        order = np.argsort(request, kind="stable")
        lengths = np.concatenate([p.lengths for p in parts])
        starts = np.cumsum(lengths) - lengths
        flat = np.repeat(starts[order] - (np.cumsum(lengths[order]) - lengths[order]), lengths[order])
        flat += np.arange(len(flat))
        return cls(
            request=request[order],
            lengths=lengths[order],
            token_ids=np.concatenate([p.token_ids for p in parts])[flat],
            log_probs=np.concatenate([p.log_probs for p in parts])[flat],
            truncated=np.concatenate([p.truncated for p in parts])[order],
            aborted=np.concatenate([p.aborted for p in parts])[order],
            policy_version=np.concatenate([p.policy_version for p in parts])[order],
        )


class RolloutHost:
    """One replica of a rollout engine."""

    def __init__(self, ctx: RankContext, engine: str, spec: RolloutSpec, options: EngineOptions) -> None:
        self.parallel = Parallel(dp_rank=ctx.rank, dp_size=ctx.world_size)
        self.engine: RolloutEngine = GuardedRolloutEngine(import_class(engine)())
        self.engine.initialize(ctx, replace(spec, options=options.build()))
        self.target = WeightTarget(self.engine, ctx.accelerators)

    @dispatch(split=Split.ALL, join=Join.LIST)
    async def generate(self, requests: Sequence[GenerationRequest]) -> Samples:
        """Runs requests to their end."""
        outputs = [output async for output in self.engine.generate(requests)]
        return Samples.pack(requests, outputs)

    @dispatch(split=Split.ALL, join=Join.LIST)
    def target_layouts(self) -> Sequence[WeightLayout]:
        return self.target.layouts()

    @dispatch(split=Split.ALL, join=Join.LIST)
    def pull_weights(
        self, buckets: Sequence[Bucket], peers: Mapping[int, Peer], version: int, timeout_s: float
    ) -> SyncReceipt:
        return self.target.pull(buckets, peers, version, timeout_s)

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def abort(self) -> None:
        self.engine.abort()

    @dispatch(split=Split.ALL, join=Join.NONE)
    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def wake(self, parts: Sequence[str]) -> None:
        self.engine.wake(parts)

    def close(self) -> None:
        self.target.close()
        self.engine.close()
