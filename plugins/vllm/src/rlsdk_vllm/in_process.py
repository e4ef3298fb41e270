"""vLLM's synchronous engine, stepped by the callers that wait for samples.

Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlsdk.interfaces import ConfigError, DeadlineError, RankContext, RolloutSpec
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk_vllm.adapter import VllmEngine
from rlsdk_vllm.arguments import check_split, engine_args, explained_start
from rlsdk_vllm.child_lifetime import started_within
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.environment import eager_processes, prepare_environment, replica_environment, undisturbed_process
from rlsdk_vllm.low_rank import lora_request
from rlsdk_vllm.patching import patched
from rlsdk_vllm.process_groups import WORLD
from rlsdk_vllm.requests import Progress, explained_refusal, progress_of, prompt_of, sampling_params
from rlsdk_vllm.samples import Sample


def check_only_sleeper(ctx: RankContext, spec: RolloutSpec) -> None:
    """Raises `ConfigError` for a second engine of this process that has to sleep."""
    if WORLD.users and spec.shares_devices and spec.num_devices == 1 and ctx.device != "cpu":
        raise ConfigError(
            f"rollout.vllm.asynchronous false: role {ctx.role!r} shares a device, so its engine has to sleep, and "
            "vLLM's memory allocator serves one engine of a process, which already has one; leave it out or give true: "
            "each engine then has its own process"
        )


class InProcessEngine(VllmEngine):
    """vLLM's synchronous engine in this process. The model is in this process too, unless several workers split it."""

    turn_s = 0.0

    def __init__(
        self,
        ctx: RankContext,
        spec: RolloutSpec,
        options: VllmOptions,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Sequence[Source] | None = None,
    ) -> None:
        super().__init__(ctx, spec)
        check_split(ctx, spec, options)
        check_only_sleeper(ctx, spec)
        prepare_environment(ctx, spec, options)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlsdk_vllm import unnamed_memory

        unnamed_memory.install()
        arguments = engine_args(EngineArgs, ctx, spec, options, shapes, sources)
        self._timeout_s = ctx.timeout_s
        self._is_on_gpu = ctx.device != "cpu"
        with (
            WORLD.entered(),
            undisturbed_process(),
            explained_start(spec),
            started_within(ctx.timeout_s),
            eager_processes(arguments, ctx),
            replica_environment(ctx, spec),
        ):
            self._engine = LLMEngine.from_engine_args(arguments)
        WORLD.users += 1
        self.is_spread = spec.num_devices > 1
        self.vocabulary = self._engine.model_config.get_vocab_size()

    def add(self, sample: Sample) -> None:
        with explained_refusal(sample):
            self._engine.add_request(
                sample.key, prompt_of(sample), sampling_params(sample), lora_request=lora_request(sample.adapter)
            )

    def step(self) -> list[Progress]:
        """One pass of the model."""
        if self.paused:
            return []
        with self._answered("a pass of the model"):
            return [progress_of(output.request_id, output) for output in self._engine.step()]

    def kv_used(self) -> float:
        return float(self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage)

    def abort(self, keys: Sequence[str]) -> None:
        self._engine.abort_request(list(keys))

    def drop_caches(self) -> None:
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not free its prefix cache")

    def call_workers(self, method: str, *args: Any, moving: bool = False) -> list[Any]:
        with self._answered(method):
            limit = None if moving else self._timeout_s
            return list(self._engine.collective_rpc(method, timeout=limit, args=args))

    @contextmanager
    def _answered(self, doing: str) -> Iterator[None]:
        """Raises `DeadlineError` if workers in other processes do not answer in time."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineError(
                f"vLLM's workers did not answer ({doing}) within {self._timeout_s:g} s: one hangs, or the machine is "
                "too slow for deadlines.collective_s. Give more time, or look for the cause with "
                "rollout.vllm.log_level INFO"
            ) from error

    def report_version(self, version: str) -> None:
        if update := getattr(self._engine, "set_weight_version", None):
            update(version)

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake(self, parts: Sequence[str]) -> None:
        self._engine.wake_up(list(parts))

    def close(self) -> None:
        """Ends the engine and its own process groups only."""
        from vllm.v1.engine import core

        # vLLM would destroy every process group of the process, including a train engine's.
        with WORLD.entered(), patched("cleanup_dist_env_and_memory", lambda: None, core):
            self._engine.engine_core.shutdown()
        WORLD.users -= 1
        if not WORLD.users:
            self._end_process_groups()
        del self._engine
        if self._is_on_gpu:
            # In the place of `cleanup_dist_env_and_memory`: the next engine's allocator requires that none is in use.
            gc.collect()
            torch.cuda.empty_cache()

    def _end_process_groups(self) -> None:
        """Destroys the groups that vLLM created, unless a train engine already destroyed all groups of the process."""
        from vllm.distributed import parallel_state

        for name, group in list(vars(parallel_state).items()):
            if isinstance(group, parallel_state.GroupCoordinator):
                if WORLD.alive:
                    group.destroy()
                setattr(parallel_state, name, None)
        WORLD.destroy()
