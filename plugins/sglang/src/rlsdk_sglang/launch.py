"""An engine of this process's own: how SGLang is configured, started and ended.

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rlsdk.interfaces import ConfigError, RankContext, RlsdkError, RolloutSpec, nearest
from rlsdk.kit.hf import load_model_config
from rlsdk.kit.kv_cache import bytes_per_token
from rlsdk_sglang import inside
from rlsdk_sglang.client import ClientThread
from rlsdk_sglang.config import SglangOptions

OWNED = {"model_path", "load_format", "tp_size", "custom_weight_loader", "sampling_backend", "skip_tokenizer_init"}
"""Arguments without which nothing here works."""
RESERVED_TOKENS = 16
"""More than what SGLang keeps back from a context for itself."""
MAX_SHARE = 0.25
"""Of a machine's free memory that keys and values take unasked, on a CPU."""
END_S = 20.0
"""Deadline of processes that were told to end."""


class OwnEngine:
    """`sglang.Engine`: its front in this process, its schedulers in others."""

    def __init__(self, client: ClientThread, ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> None:
        self._client = client
        arguments = engine_arguments(ctx, spec, options)
        self._engine = client.call(_start, arguments, environment(ctx, spec))
        self.front = self._engine.tokenizer_manager
        """What is asked for samples and updates."""
        self.num_ranks = spec.tp_size
        self._processes = [psutil.Process(pid) for pid in self._engine.get_all_child_pids()]

    def check_alive(self) -> None:
        """Raises: RlsdkError: a scheduler ended."""
        for process in self._processes:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise RlsdkError(
                    f"a scheduler of SGLang (process {process.pid}) ended; its last words are in this worker's log. "
                    "Start the run again, or give rollout.sglang.log_level 'info' to see more"
                )

    def close(self) -> None:
        """Ends its processes, and no others: SGLang's own end kills every child of this process."""
        atexit.unregister(self._engine.shutdown)
        for process in self._processes:
            _kill(process)
        # Sockets complain about what is cancelled, and nobody waits for it any more.
        self._client.loop.set_exception_handler(lambda *_: None)
        self._client.call(_close_sockets, self._engine)
        for name in vars(self._engine.port_args).values():
            if isinstance(name, str) and name.startswith("ipc://"):
                Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
        del self._engine, self.front


def engine_arguments(ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> dict[str, Any]:
    """What `sglang.Engine` is made from; `spec.engine_kwargs` has the last word.

    Raises:
        ConfigError: SGLang knows no such argument, or it is not the caller's.
    """
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
        "custom_weight_loader": [inside.LOADER],
        "sampling_backend": "pytorch",
        "context_length": spec.max_model_tokens + RESERVED_TOKENS,
        "max_running_requests": spec.max_running,
        "tp_size": spec.tp_size,
        "random_seed": ctx.seed + ctx.rank,
        "disable_radix_cache": not options.enable_prefix_caching,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": on_cpu or not options.cuda_graphs,
        "grammar_backend": "none",
        "attention_backend": options.attention_backend or ("torch_native" if on_cpu else None),
        "mem_fraction_static": options.memory_share,
        "max_total_tokens": num_cached_tokens(ctx, spec, options),
        "enable_memory_saver": not on_cpu,
        "enable_weights_cpu_backup": not on_cpu,
        "stream_interval": options.stream_interval,
        "log_level": options.log_level,
    }
    if not on_cpu:
        arguments["base_gpu_id"] = int(ctx.device.partition(":")[2] or 0)
    owned = sorted(OWNED & set(spec.engine_kwargs))
    if owned:
        raise ConfigError(f"rollout.engine_kwargs: {owned} belong to the plugin itself; leave them out")
    if spec.engine_kwargs:
        known = _known_arguments(environment(ctx, spec))
        for name in spec.engine_kwargs:
            if name not in known:
                raise ConfigError(
                    f"rollout.engine_kwargs.{name}: SGLang's ServerArgs has no such field{nearest(name, known)}"
                )
    return {**arguments, **spec.engine_kwargs}


def num_cached_tokens(ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> int | None:
    """Tokens whose keys and values are kept; None leaves it to SGLang."""
    if options.kv_cache_mb is None and ctx.device != "cpu":
        return None
    one = bytes_per_token(load_model_config(spec.model), spec.model.dtype)
    if options.kv_cache_mb is not None:
        return (options.kv_cache_mb << 20) // one
    longest = spec.max_model_tokens + RESERVED_TOKENS
    free = int(psutil.virtual_memory().available * MAX_SHARE)
    return max(min(longest * spec.max_running, free // one), longest)


def environment(ctx: RankContext, spec: RolloutSpec) -> dict[str, str]:
    """Settings that SGLang's processes read. What the user set stays."""
    settings = {
        # Positions beyond the model's own are never reached: this lets the context be longer by what SGLang reserves.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "OMP_NUM_THREADS": str(ctx.num_threads),
    }
    if ctx.device == "cpu":
        settings["SGLANG_USE_CPU_ENGINE"] = "1"
        # SGLang asks for a set of cores for each scheduler, where there are more of them than memory nodes.
        settings["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(spec.tp_size))
    return {name: value for name, value in settings.items() if name not in os.environ}


def _cores(num_ranks: int) -> list[str]:
    """The cores of this process, dealt out; all of them to everybody where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // num_ranks
    shares = [cores[rank * each : (rank + 1) * each] or cores for rank in range(num_ranks)]
    return [",".join(map(str, share)) for share in shares]


def _start(arguments: dict[str, Any], environment: Mapping[str, str]) -> Any:
    """Runs on the client's thread, which must live as long as the schedulers: they end with it."""
    with _undisturbed_process(environment):
        from sglang.srt.entrypoints.engine import Engine

        class QuietEngine(Engine):  # type: ignore[misc]
            """SGLang's own, with this plugin's schedulers, and without a process that would have nothing to do."""

            run_scheduler_process_func = staticmethod(inside.run_scheduler)

            @classmethod
            def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
                return [], []

        try:
            engine = QuietEngine(**arguments)
        except (ValueError, NotImplementedError, AssertionError, RuntimeError, EOFError, OSError) as error:
            raise ConfigError(
                f"model.path {arguments['model_path']!r}: SGLang could not start: {error or type(error).__name__}. "
                "Give a model and rollout.engine_kwargs that it takes (what it said is in this worker's log), or "
                "another rollout backend"
            ) from error
        # It would end this process where a scheduler fails; `check_alive` tells the caller.
        engine.tokenizer_manager._subprocess_watchdog.stop()
        return engine


def _known_arguments(environment: Mapping[str, str]) -> set[str]:
    with _undisturbed_process(environment):
        from sglang.srt.server_args import ServerArgs

        return set(ServerArgs.__struct_fields__)


@contextmanager
def _undisturbed_process(environment: Mapping[str, str]) -> Iterator[None]:
    """Gives back what SGLang's import and start change for the whole process."""
    before = dict(os.environ)
    policy = asyncio.get_event_loop_policy()
    method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level, thresholds = list(root.handlers), root.level, gc.get_threshold()
    os.environ.update(environment)
    try:
        yield
    finally:
        # One by one: other threads read it meanwhile.
        for name in [name for name, value in os.environ.items() if before.get(name) != value]:
            del os.environ[name]
        for name in before.keys() - os.environ.keys():
            os.environ[name] = before[name]
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)
        root.handlers[:] = handlers
        root.setLevel(level)
        gc.set_threshold(*thresholds)


def _kill(process: psutil.Process) -> None:
    """A process and all below it."""
    try:
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=END_S)


def _close_sockets(engine: Any) -> None:
    """With their contexts, whose threads SGLang leaves to the garbage collector."""
    front = engine.tokenizer_manager
    for socket in (engine.send_to_rpc, front.recv_from_detokenizer, front.send_to_scheduler):
        context = getattr(socket, "context", None)
        if context is not None:
            context.destroy(linger=0)
