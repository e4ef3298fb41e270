"""Hosts: thin wrappers inside a worker around one engine of one role.

A host adds what the controller needs and engines should not care about: the dispatch declaration of each method, the
pump of a rollout engine, and the two ends of the weight transfer.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.cluster import Join, Split, dispatch
from rlsdk.cluster.workers.engine_thread import call_on
from rlsdk.config import build_options, config_error
from rlsdk.interfaces import (
    BackendSpec,
    Batch,
    Capability,
    ForwardBackwardResult,
    GenerationRequest,
    ModelSpec,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    TrainEngine,
    TrainSpec,
    WeightPart,
)
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.kit.guards.guarded_train import GuardedTrainEngine
from rlsdk.rollouts import Collected, Pump
from rlsdk.sharding import WeightSource, WeightTarget
from rlsdk.trainer.roles.adapter_sync import RolloutAdapter, TrainPart, keeps_versions
from rlsdk.trainer.roles.average import WeightAverage
from rlsdk.trainer.roles.weight_hosts import SourceHost, TargetHost

if TYPE_CHECKING:
    from torch import Tensor


def import_class(path: str) -> Any:
    """Imports the object named by `package.module:Name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """A backend's own options as plain data. Only the worker builds the plugin's options class from it: the
    controller's environment may not be able to import that class."""

    spec: BackendSpec
    raw: Mapping[str, Any]

    def build(self) -> object | None:
        """Builds the instance for `TrainSpec.options` or `RolloutSpec.options`.

        Raises:
            ConfigError: the plugin's options class refuses the values.
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
    """Result of one optimizer step over one mini-batch."""

    update: ForwardBackwardResult
    step: OptimStepResult
    seconds: float
    added: Sequence[ForwardBackwardResult] = ()
    """Results of the gradients that were accumulated before it, in order."""


class TrainHost(SourceHost):
    """One rank of a train engine."""

    def __init__(self, ctx: RankContext, engine: str, spec: TrainSpec, options: EngineOptions) -> None:
        self.engine: TrainEngine = GuardedTrainEngine(import_class(engine)())
        self.engine.initialize(ctx, replace(spec, options=options.build()))
        parts = {p: SourceHost(WeightSource(TrainPart(self.engine, p), ctx.accelerators)) for p in WeightPart}
        super().__init__(WeightSource(self.engine, ctx.accelerators), parts)
        self.rank = ctx.rank
        self.average: WeightAverage | None = None

    @property
    def parallel(self) -> Parallel:
        return self.engine.parallel

    @dispatch(split=Split.DATA, join=Join.ROWS)
    def forward(self, batch: Batch, outputs: Mapping[str, str]) -> Batch:
        """Computes engine outputs without gradient; `outputs` maps an output to the field it is stored under."""
        return self._stored(batch, outputs, self.engine.forward(batch, tuple(outputs)))

    @dispatch(split=Split.DATA, join=Join.ROWS)
    def forward_reference(self, batch: Batch, outputs: Mapping[str, str]) -> Batch:
        """As `forward`, by the reference policy that the actor has in itself."""
        return self._stored(batch, outputs, self.engine.forward_reference(batch, tuple(outputs)))

    @staticmethod
    def _stored(batch: Batch, outputs: Mapping[str, str], result: Mapping[str, Tensor]) -> Batch:
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

    @dispatch(split=Split.DATA, join=Join.FIRST)
    def add_gradient(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """Accumulates the gradient of the objective over all ranks for the optimizer step of the next `update`."""
        return self.engine.forward_backward(batch, objective)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def load_teacher(self, spec: ModelSpec, number: int = 0) -> None:
        self.engine.load_teacher(spec, number)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def reset_optimizer(self, optim: OptimSpec) -> None:
        self.engine.reset_optimizer(optim)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def keep_reference(self) -> None:
        self.engine.keep_reference()

    @dispatch(split=Split.ALL, join=Join.FIRST)
    def moved_share(self) -> float:
        return self.engine.moved_share()

    @dispatch(split=Split.ALL, join=Join.NONE)
    def start_average(self, decay: float) -> None:
        """Starts an average of the weights; loading a checkpoint later replaces it."""
        self.average = WeightAverage(self.engine, decay)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def update_average(self) -> None:
        assert self.average is not None
        self.average.update()

    @dispatch(split=Split.ALL, join=Join.NONE)
    def save_average(self, folder: str) -> None:
        """Writes this rank's part of the average into an existing folder."""
        assert self.average is not None
        self.average.save(Path(folder) / f"rank_{self.rank:05d}.safetensors")

    @dispatch(split=Split.ALL, join=Join.NONE)
    def load_average(self, folder: str) -> None:
        assert self.average is not None
        self.average.load(Path(folder))

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

    @dispatch(split=Split.ALL, join=Join.NONE)
    def hold_weights(self, adapter: bool = False, keep: int = 1) -> None:
        """Copies the current weights, or the adapter alone; syncs use this copy while training continues. The newest
        `keep` copies are kept."""
        (self._adapter if adapter else self.source).hold(keep)

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def use_adapter_copy(self, back: int) -> None:
        """Lets syncs use an older copy of the adapter; 0: the newest one."""
        self._adapter.use_copy(back)

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def release_weights(self) -> None:
        """Ends the use of the copy: syncs take the engine's own weights again."""
        for source in self._sources():
            source.release()

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def close_transports(self) -> None:
        """Frees resources that are kept between syncs, because the next sync goes to other replicas."""
        for source in self._sources():
            source.close()

    @property
    def _adapter(self) -> WeightSource:
        return self.parts[WeightPart.ADAPTER].source

    def _sources(self) -> list[WeightSource]:
        return [self.source, *(part.source for part in self.parts.values())]

    def close(self) -> None:
        self.close_transports()
        self.engine.close()


class RolloutHost(TargetHost):
    """One replica of a rollout engine."""

    def __init__(self, ctx: RankContext, engine: str, spec: RolloutSpec, options: EngineOptions) -> None:
        self.parallel = Parallel(dp_rank=ctx.rank, dp_size=ctx.world_size)
        self.engine: RolloutEngine = GuardedRolloutEngine(import_class(engine)())
        self.engine.initialize(ctx, replace(spec, options=options.build()))
        on_thread, beside = functools.partial(call_on, asyncio.get_running_loop()), keeps_versions(options.spec, spec)
        adapter = WeightTarget(RolloutAdapter(self.engine, on_thread if beside else None), ctx.accelerators)
        parts = {WeightPart.ADAPTER: TargetHost(adapter, beside=beside)}
        super().__init__(WeightTarget(self.engine, ctx.accelerators), parts)
        self.pump = Pump(self.engine, shares=Capability.ABORT in options.spec.capabilities)

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def submit_requests(self, requests: Sequence[GenerationRequest]) -> None:
        """Passes requests to the engine; `collect` returns their samples."""
        self.pump.submit(requests)

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def collect(self, wait_s: float) -> Collected:
        """Samples that finished since the last call; waits at most `wait_s` seconds for the first."""
        return self.pump.collect(wait_s)

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.engine.abort(request_ids)

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def pause(self) -> None:
        self.engine.pause()

    @dispatch(split=Split.ALL, join=Join.NONE, concurrent=True)
    def resume(self, keep_cache: bool = False) -> None:
        if keep_cache:
            self.engine.resume(keep_cache=True)
        else:
            self.engine.resume()

    @dispatch(split=Split.ALL, join=Join.NONE)
    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    @dispatch(split=Split.ALL, join=Join.NONE)
    def wake(self, parts: Sequence[str]) -> None:
        self.engine.wake(parts)

    def close(self) -> None:
        self.target.close()
        for part in self.parts.values():
            part.target.close()
        self.engine.close()
