"""Configures, starts and ends an SGLang engine in this process.

Tested: 0.5.23.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil

from rlsdk.interfaces import ConfigError, RankContext, RolloutSpec, nearest
from rlsdk.kit.memory.kv_cache import bytes_per_token
from rlsdk.kit.model.hf import load_model_config
from rlsdk.kit.ranks.companions import get_companions
from rlsdk.kit.ranks.other_nodes import OtherNodes, free_port, node_names, num_here
from rlsdk.kit.ranks.replica_devices import check_devices, spans_nodes, visible_devices
from rlsdk.kit.ranks.waiting import LOOK_S
from rlsdk_sglang import weights
from rlsdk_sglang.client import ClientThread
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.contained_engine import ContainedEngine
from rlsdk_sglang.low_rank import adapter_modules, adapter_slots, lora_arguments
from rlsdk_sglang.nodes import FOLLOWER, NEIGHBOURS, NodePlace, check_nodes, peers

OWNED = {
    *("model_path", "load_format", "tp_size", "pp_size", "dp_size", "attn_dp_size", "ep_size"),
    *("nnodes", "node_rank", "dist_init_addr"),
    *("tokenizer_worker_num", "enable_weights_cpu_backup"),
    *("custom_weight_loader", "sampling_backend", "skip_tokenizer_init"),
    *("enable_lora", "max_lora_rank", "lora_target_modules", "max_loras_per_batch"),
}
"""Arguments that only this plugin sets."""
RESERVED_TOKENS = 16
"""Tokens added to the context length; more than the number that SGLang reserves."""
MAX_SHARE = 0.25
"""Largest share of a machine's free memory that the KV cache takes by default, on a CPU."""
STARTING_ERRORS = (ValueError, NotImplementedError, AssertionError, RuntimeError, EOFError, OSError)
"""Exceptions that SGLang raises for arguments that it does not support."""


class OwnEngine:
    """`sglang.Engine`: its front in this process, its schedulers in other processes."""

    def __init__(self, client: ClientThread, ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> None:
        self._client = client
        self.num_ranks = spec.tp_size * spec.dp_size
        self.num_stages = spec.pp_size
        self._engine = ContainedEngine()
        self.others: OtherNodes | None = None
        """Processes on the other nodes of the replica."""
        place: NodePlace | None = None
        if spans_nodes(ctx):
            check_devices(ctx, spec)
            check_nodes(ctx, spec)
            host = get_companions().address
            port = free_port(host, NEIGHBOURS)
            listens = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            first = NodePlace(
                rank=0,
                count=len(node_names(ctx)),
                first=listens,
                num_cached_tokens=num_cached_tokens(ctx, spec, options),
            )
            self.others = OtherNodes(
                ctx, FOLLOWER, lambda there, rank: (there, spec, options, replace(first, rank=rank))
            )
            place = first
        try:
            self._start(ctx, spec, options, place)
        except BaseException:
            if self.others is not None:
                self.others.end()
            raise
        self.front = self._engine.front
        """SGLang's `TokenizerManager`, which handles samples and updates."""
        # For programs that exit without calling `close`.
        atexit.register(self.close)

    def _start(self, ctx: RankContext, spec: RolloutSpec, options: SglangOptions, place: NodePlace | None) -> None:
        """Starts the engine on the client's thread, which must live as long as the schedulers: they end with it. An
        error on one node ends the wait for all others."""
        arguments = engine_arguments(ctx, spec, options, place)
        starting = self._client.begin(started, self._engine, arguments, environment(ctx, spec))
        if self.others is None:
            starting.result()
            return
        try:
            while not starting.done():
                self.others.check_starting()
                wait([starting], timeout=LOOK_S)
            self.others.check_starting()
            starting.result()
            self.others.wait(ctx.timeout_s)
        except BaseException:
            # Repeat: schedulers may start only now, and would wait for a missing node.
            while not starting.done():
                self._engine.kill()
                wait([starting], timeout=LOOK_S)
            self._client.call(self._engine.end)
            raise

    def check_alive(self) -> None:
        """Raises `RlsdkError` if a scheduler ended."""
        self._engine.check_alive()
        if self.others is not None:
            self.others.check_alive()

    def close(self) -> None:
        atexit.unregister(self.close)
        try:
            self._client.call(self._engine.end)
        finally:
            if self.others is not None:
                self.others.end()


def engine_arguments(
    ctx: RankContext, spec: RolloutSpec, options: SglangOptions, place: NodePlace | None = None
) -> dict[str, Any]:
    """Builds the arguments of `sglang.Engine`; `spec.engine_kwargs` overrides them.

    Args:
        ctx: context of the process that starts the engine.
        spec: the replica's specification.
        options: the engine's options.
        place: this node, if the replica has several nodes; None: one node.

    Raises:
        ConfigError: SGLang has no such argument, or only the plugin may set it.
    """
    check_devices(ctx, spec)
    on_cpu = ctx.device == "cpu"
    arguments: dict[str, Any] = {
        "model_path": spec.model.path,
        "revision": spec.model.revision,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.model.dtype,
        "device": "cpu" if on_cpu else "cuda",
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
        "load_format": "auto" if spec.load_weights else "dummy",
        "weight_version": "0",
        "custom_weight_loader": [weights.LOADER],
        "sampling_backend": "pytorch",
        "context_length": spec.max_model_tokens + RESERVED_TOKENS,
        "max_running_requests": spec.max_running,
        # SGLang counts the copies of attention as tensor-parallel ranks.
        "tp_size": spec.tp_size * spec.dp_size,
        "attn_dp_size": spec.dp_size,
        "pp_size": spec.pp_size,
        "ep_size": spec.ep_size,
        "random_seed": ctx.seed + ctx.rank,
        "disable_radix_cache": not options.enable_prefix_caching,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": on_cpu or not options.cuda_graphs,
        "grammar_backend": "none",
        "attention_backend": options.attention_backend or ("torch_native" if on_cpu else None),
        "mem_fraction_static": options.memory_share,
        "max_total_tokens": num_cached_tokens(ctx, spec, options) if place is None else place.num_cached_tokens,
        "enable_memory_saver": not on_cpu,
        # A host copy of weights that the next update overwrites would cost a model's memory and traffic for nothing.
        "enable_weights_cpu_backup": not on_cpu and spec.load_weights,
        # Otherwise each idle scheduler keeps a core busy.
        "sleep_on_idle": True,
        "stream_interval": options.stream_interval,
        # Reports contain only new tokens. Otherwise each contains the whole response: quadratic traffic.
        "incremental_streaming_output": True,
        "log_level": options.log_level,
    }
    if spec.model.adapter is not None:
        modules = adapter_modules(spec.model)
        arguments |= lora_arguments(spec.model.adapter, modules, adapter_slots(spec, options), on_cpu=on_cpu)
    if place is not None:
        arguments |= place.arguments(ctx.timeout_s)
    if not on_cpu:
        # `environment` shows the schedulers only the replica's own devices, numbered from 0.
        arguments["base_gpu_id"] = 0 if visible_devices(ctx) else int(ctx.device.partition(":")[2] or 0)
    owned = sorted(OWNED & set(spec.engine_kwargs))
    if owned:
        raise ConfigError(f"rollout.engine_kwargs: only the plugin sets {owned}; leave them out")
    if spec.engine_kwargs:
        known = _known_arguments(environment(ctx, spec))
        for name in spec.engine_kwargs:
            if name not in known:
                raise ConfigError(
                    f"rollout.engine_kwargs.{name}: SGLang's ServerArgs has no such field{nearest(name, known)}"
                )
    return {**arguments, **spec.engine_kwargs}


def num_cached_tokens(ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> int | None:
    """Tokens in the KV cache; None: SGLang's default."""
    if options.kv_cache_mb is None and ctx.device != "cpu":
        return None
    one = bytes_per_token(load_model_config(spec.model), spec.model.dtype)
    if options.kv_cache_mb is not None:
        return (options.kv_cache_mb << 20) // one
    longest = spec.max_model_tokens + RESERVED_TOKENS
    free = int(psutil.virtual_memory().available * MAX_SHARE)
    return max(min(longest * spec.max_running, free // one), longest)


def environment(ctx: RankContext, spec: RolloutSpec) -> dict[str, str]:
    """Environment variables of SGLang's processes. Values set by the user are kept."""
    settings = {
        # Allows a context that exceeds the model's by the tokens that SGLang reserves; these positions are never used.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "OMP_NUM_THREADS": str(ctx.num_threads),
        **peers(ctx),
    }
    if ctx.device == "cpu":
        settings["SGLANG_USE_CPU_ENGINE"] = "1"
        # If there are more schedulers than NUMA nodes, SGLang needs a set of cores for each scheduler.
        settings["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(num_here(ctx, spec.num_devices)))
    # Ray shows this process only one device. Not configurable.
    return {name: value for name, value in settings.items() if name not in os.environ} | visible_devices(ctx)


def _cores(num_ranks: int) -> list[str]:
    """The cores of this process, split over schedulers; if there are too few, each scheduler gets all cores."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // num_ranks
    shares = [cores[rank * each : (rank + 1) * each] or cores for rank in range(num_ranks)]
    return [",".join(map(str, share)) for share in shares]


def started(engine: ContainedEngine, arguments: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Starts an engine, on the thread that must live as long as its schedulers.

    Raises:
        ConfigError: SGLang does not support these arguments.
    """
    with _undisturbed_process(environment):
        try:
            engine.start(arguments)
        except BaseException as error:
            engine.end()
            if not isinstance(error, STARTING_ERRORS):
                raise
            raise ConfigError(
                f"model.path {arguments['model_path']!r}: SGLang could not start: {error or type(error).__name__}. "
                "Give a model and rollout.engine_kwargs that SGLang supports (its messages are in this worker's log), "
                "or another rollout backend"
            ) from error


def _known_arguments(environment: Mapping[str, str]) -> set[str]:
    with _undisturbed_process(environment):
        from sglang.srt.server_args import ServerArgs

        return set(ServerArgs.__struct_fields__)


@contextmanager
def _undisturbed_process(environment: Mapping[str, str]) -> Iterator[None]:
    """Restores what SGLang's import and start change for the whole process."""
    before = dict(os.environ)
    policy = asyncio.get_event_loop_policy()
    method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level, thresholds = list(root.handlers), root.level, gc.get_threshold()
    os.environ.update(environment)
    try:
        yield
    finally:
        # Variables are set one by one, because other threads read the environment meanwhile.
        for name in [name for name, value in os.environ.items() if before.get(name) != value]:
            del os.environ[name]
        for name in before.keys() - os.environ.keys():
            os.environ[name] = before[name]
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)
        root.handlers[:] = handlers
        root.setLevel(level)
        gc.set_threshold(*thresholds)
