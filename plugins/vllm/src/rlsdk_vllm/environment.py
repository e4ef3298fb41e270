"""Environment variables of vLLM, and restoration of what its start changes in this process.

Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlsdk.interfaces import RankContext, RolloutSpec
from rlsdk.kit.ranks.replica_devices import set_environment, spans_nodes, visible_devices
from rlsdk_vllm.config import VllmOptions

RAY_WORKER_GPUS = "0.25"
"""Share of a GPU that a worker requests from Ray, if a replica spans nodes: two replicas (a policy and a judge) fit
next to the run's own workers, which take 0.125 each."""


def has_copies_apart(ctx: RankContext, spec: RolloutSpec) -> bool:
    """Whether some copies of attention are on other nodes, each copy on one node. A process there starts them
    (`rlsdk_vllm.nodes`)."""
    return spec.dp_size > 1 and spans_nodes(ctx)


def has_workers_apart(ctx: RankContext, spec: RolloutSpec) -> bool:
    """Whether workers of one copy of the model are on other nodes, started by Ray. On a CPU vLLM does not support Ray,
    and starts all of them here."""
    if spec.dp_size > 1:
        return False
    if ctx.device != "cpu" or not spans_nodes(ctx):
        return spans_nodes(ctx)
    from vllm.platforms import current_platform

    return bool(current_platform.ray_device_key)


def has_own_process(ctx: RankContext, spec: RolloutSpec, options: VllmOptions) -> bool:
    """Whether the engine runs in its own process (`VllmOptions.asynchronous`). Copies of attention need one; on a GPU
    it leaves this process free to prepare the next step, and gives vLLM's allocator, which serves one engine of a
    process, a process of its own."""
    if options.asynchronous is not None:
        return options.asynchronous
    return spec.dp_size > 1 or (ctx.device != "cpu" and not has_workers_apart(ctx, spec))


def prepare_environment(ctx: RankContext, spec: RolloutSpec, options: VllmOptions) -> None:
    """Sets variables that vLLM reads when it is imported. Values of the user are kept."""
    settings = {
        "VLLM_LOGGING_LEVEL": options.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        # The host binds threads: otherwise all replicas would take the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The model runner that this plugin supports.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Timeout of each pass of workers in other processes.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(ctx.timeout_s)),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(ctx.timeout_s)),
    }
    if ctx.device != "cpu":
        # A forked child would inherit the locks of this process's threads, such as a trainer's.
        settings["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # Not configurable: it would put the engine into a process that this one cannot access.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def spread_environment(ctx: RankContext, spec: RolloutSpec) -> dict[str, str]:
    """Variables for the processes of a replica with several devices, overriding those of the user, as they differ
    between replicas. Empty for a single device."""
    if spec.num_devices == 1:
        return {}
    if has_workers_apart(ctx, spec):
        # vLLM's Ray workers, one in each bundle of this pool's placement group, next to the trainer's worker there.
        # This executor numbers workers in the order of the bundles; the older one sorts them by node address.
        return {
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
            "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, ctx.bundles)),
            "VLLM_RAY_PER_WORKER_GPUS": RAY_WORKER_GPUS,
        }
    return visible_devices(ctx)


@contextmanager
def replica_environment(ctx: RankContext, spec: RolloutSpec) -> Iterator[None]:
    """In this context vLLM and its processes see only the devices of this replica."""
    from vllm import envs

    settings = spread_environment(ctx, spec)
    if settings:
        # vLLM caches the environment of earlier engines of this process.
        envs.disable_envs_cache()
    with set_environment(settings):
        yield


@contextmanager
def eager_processes(arguments: Any, ctx: RankContext) -> Iterator[None]:
    """Disables compilation in processes started in this context, if the engine is eager on a CPU.

    Otherwise vLLM still compiles single functions, such as the tensor-parallel embedding: this takes seconds in each
    worker, and half a minute without a compilation cache. This process, which may train, is not changed.
    """
    name = "TORCH_COMPILE_DISABLE"
    before = os.environ.get(name)
    if ctx.device == "cpu" and arguments.enforce_eager and before is None:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """Restores what vLLM's start changes for the whole process: random states and torch's thread setting."""
    set_num_threads = torch.set_num_threads
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(states[0])
            np.random.set_state(states[1])
