"""What vLLM reads from the environment, and what its start would change of the process that it is started in.

Tested window: 0.31 and 0.32 (their CPU builds).
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
from rlsdk.kit.replica_devices import set_environment, spans_nodes, visible_devices
from rlsdk_vllm.config import VllmOptions

RAY_WORKER_GPUS = "0.25"
"""Share of its GPU that a worker asks Ray for, where a replica spans nodes: two replicas (a policy and a judge) fit
beside the run's own workers, which take 0.125 each."""


def has_copies_apart(ctx: RankContext, spec: RolloutSpec) -> bool:
    """Whether copies of attention are on other nodes, each whole on one: a process there starts them
    (`rlsdk_vllm.nodes`)."""
    return spec.dp_size > 1 and spans_nodes(ctx)


def has_workers_apart(ctx: RankContext, spec: RolloutSpec) -> bool:
    """Whether workers of one copy of the model are on other nodes, started by Ray. On a CPU vLLM knows no way to Ray,
    and starts all of them here."""
    if spec.dp_size > 1:
        return False
    if ctx.device != "cpu" or not spans_nodes(ctx):
        return spans_nodes(ctx)
    from vllm.platforms import current_platform

    return bool(current_platform.ray_device_key)


def prepare_environment(ctx: RankContext, spec: RolloutSpec, options: VllmOptions) -> None:
    """Settings that vLLM reads from the environment, before it is imported. What the user set stays."""
    settings = {
        "VLLM_LOGGING_LEVEL": options.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        # Threads are the host's to bind: several replicas would all take the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The runner whose sampler and weights this plugin knows.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Of each pass that workers in other processes make.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(ctx.timeout_s)),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(ctx.timeout_s)),
    }
    if ctx.device != "cpu":
        # A child that is forked would share this process's threads and locks, a trainer's among them.
        settings["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # Not the user's to choose: with it, the engine would be in a process that this one cannot see into.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def spread_environment(ctx: RankContext, spec: RolloutSpec) -> dict[str, str]:
    """What the processes of a replica with several devices are started under, whatever the user set: it is another for
    each replica. Empty where one device is all."""
    if spec.num_devices == 1:
        return {}
    if has_workers_apart(ctx, spec):
        # vLLM's Ray workers, one in each bundle of this pool's placement group, beside the trainer's worker there. This
        # executor numbers them as the bundles are given; the one before sorts them by the addresses of nodes.
        return {
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
            "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, ctx.bundles)),
            "VLLM_RAY_PER_WORKER_GPUS": RAY_WORKER_GPUS,
        }
    return visible_devices(ctx)


@contextmanager
def replica_environment(ctx: RankContext, spec: RolloutSpec) -> Iterator[None]:
    """Inside, vLLM and the processes that it starts see the devices of this replica."""
    from vllm import envs

    settings = spread_environment(ctx, spec)
    if settings:
        # Engines that were started in this process before have vLLM remember what the environment was then.
        envs.disable_envs_cache()
    with set_environment(settings):
        yield


@contextmanager
def eager_processes(arguments: Any, ctx: RankContext) -> Iterator[None]:
    """Processes that are started inside compile nothing, where the engine is eager on a CPU.

    vLLM compiles single functions all the same, the embedding of tensor parallelism among them: seconds in each worker,
    and half a minute where the compiler has nothing stored yet. Of this process nothing is changed: it may train.
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
    """Gives back what vLLM's start changes for the whole process: random states and torch's thread setting."""
    set_num_threads = torch.set_num_threads
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(states[0])
            np.random.set_state(states[1])
