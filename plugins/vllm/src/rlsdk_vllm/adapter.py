"""All that depends on vLLM's version: how it is configured, started, asked, stepped and ended.

Tested window: 0.31 and 0.32 (their CPU builds). Nothing else in this package names a function of vLLM, except for
`asynchronous` (the engine in a process of its own), `loader` (model loaders) and `sampler` (log-probs).
"""

from __future__ import annotations

import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from rlsdk.interfaces import (
    ConfigError,
    DeadlineError,
    Delivery,
    FinishReason,
    RankContext,
    RolloutSpec,
    WeightShard,
    WorkerReceipt,
    nearest,
)
from rlsdk.kit import delivery, intake
from rlsdk.kit.hf import load_model_config
from rlsdk.kit.intake import Fingerprints
from rlsdk.kit.kv_cache import head_size
from rlsdk.kit.replica_devices import check_devices, set_environment, spans_nodes, visible_devices
from rlsdk.kit.staging import batches
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.memory import kv_cache_bytes
from rlsdk_vllm.orphans import started_within
from rlsdk_vllm.process_groups import WORLD
from rlsdk_vllm.replacing import replaced
from rlsdk_vllm.samples import PRIOR_ARGUMENT, SEED_ARGUMENT, Sample

OWNED = {"load_format", "model_loader_extra_config", "logprobs_mode", "model", "worker_extension_cls"}
"""Arguments without which nothing here works."""
CPU_BLOCK_TOKENS = 32
"""Tokens whose keys and values are kept and shared together, on a CPU."""
RAY_WORKER_GPUS = "0.25"
"""Share of its GPU that a worker asks Ray for, where a replica spans nodes: two replicas (a policy and a judge) fit
beside the run's own workers, which take 0.125 each."""
STAGING_BYTES = 64 << 20
"""Most weights on their way to workers in other processes."""
LEAST_TEMPERATURE = 0.01
"""Above 0, that vLLM samples at."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class Progress(NamedTuple):
    """What was added to a sample."""

    key: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    """Of the weights that each token was sampled from."""
    finished: FinishReason | None


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
    if ctx.device == "cpu" or spec.num_devices == 1:
        return {}
    if spans_nodes(ctx):
        # vLLM's Ray workers, one in each bundle of this pool's placement group, beside the trainer's worker there.
        bundles = ",".join(map(str, ctx.bundles))
        return {"VLLM_RAY_BUNDLE_INDICES": bundles, "VLLM_RAY_PER_WORKER_GPUS": RAY_WORKER_GPUS}
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


def check_split(ctx: RankContext, spec: RolloutSpec, options: VllmOptions) -> None:
    """Raises: ConfigError: vLLM cannot split a replica like that."""
    check_devices(ctx, spec)
    if ctx.device == "cpu" and spec.pp_size > 1:
        raise ConfigError(
            f"rollout.pp_size {spec.pp_size}: vLLM on a CPU serves one stage (0.32 with two loses requests); give "
            "rollout.tp_size, or --rollout-backend sglang"
        )
    if ctx.device == "cpu" and spec.ep_size > 1:
        raise ConfigError(
            f"rollout.ep_size {spec.ep_size}: vLLM on a CPU (0.32) ends in a segmentation fault when experts are dealt "
            "out; give 1, which cuts every expert"
        )
    stage = spec.tp_size * spec.dp_size
    if spec.ep_size not in (1, stage):
        raise ConfigError(
            f"rollout.ep_size {spec.ep_size}: vLLM deals experts out to all devices of a stage or to none; give "
            f"{stage} (rollout.tp_size {spec.tp_size} x rollout.dp_size {spec.dp_size}), or 1"
        )
    if spec.dp_size > 1 and not options.asynchronous:
        raise ConfigError(
            f"rollout.dp_size {spec.dp_size}: copies of attention are processes of their own in vLLM; give "
            "--rollout.vllm.asynchronous true"
        )
    if spec.dp_size > 1 and spans_nodes(ctx):
        raise ConfigError(
            f"rollout.dp_size {spec.dp_size} on {len(set(ctx.device_nodes))} nodes: vLLM would take devices that this "
            "run did not reserve. Across nodes give rollout.tp_size and rollout.pp_size, with rollout.ep_size "
            "for experts"
        )


class VllmEngine(ABC):
    """What `VllmRolloutEngine` asks of an engine of vLLM's, in whichever process that computes. It samples whatever it
    was given until it is paused; `paused` says what was asked for last."""

    vocabulary: int
    turn_s: float
    """How long callers leave between two steps."""
    is_spread: bool
    """Its workers are processes of their own."""

    def __init__(self, ctx: RankContext) -> None:
        self.paused = False
        self._far = spans_nodes(ctx)
        """Some of its workers are on other nodes, where no memory of this one can be mapped."""

    @abstractmethod
    def add(self, sample: Sample) -> None:
        """Takes a sample in; it runs with the next steps.

        Raises:
            ConfigError: vLLM refuses it.
        """

    @abstractmethod
    def step(self) -> list[Progress]:
        """What there is now that was not there the last time. Paused, no sample gets any more tokens."""

    def kv_used(self) -> float | None:
        """Share of the blocks for keys and values that samples hold; None: the scheduler is in another process."""
        return None

    @abstractmethod
    def abort(self, keys: Sequence[str]) -> None:
        """Forgets samples."""

    def pause(self) -> None:
        """Samples no more from the next pass on."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    @abstractmethod
    def drop_caches(self) -> None:
        """Forgets all keys and values; samples that run are computed anew from their tokens.

        Raises:
            RuntimeError: something still holds on to them.
        """

    @abstractmethod
    def sleep(self, level: int) -> None: ...

    @abstractmethod
    def wake(self, parts: Sequence[str]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of `WorkerExtension` in every worker."""

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Readies the workers; returns what speaks against serving this model, of canonical tensors of these shapes."""
        found = sorted({fault for faults in self.call_workers("rlsdk_prepare") for fault in faults})
        cut = intake.unserved(shapes, self.call_workers("rlsdk_boxes"))
        return found + [f"vLLM's model has no place for all of canonical tensor {name!r}" for name in cut]

    def write(self, shards: Iterator[WeightShard]) -> None:
        """Brings weights to where the workers compute from."""
        if not self.is_spread:
            self.call_workers("rlsdk_write", shards)
        for block in batches(shards, STAGING_BYTES) if self.is_spread else ():
            if self._far:
                self.call_workers("rlsdk_take_copy", block.values(), block.entries)
            else:
                self.call_workers("rlsdk_take", block.name, block.entries)
        self.call_workers("rlsdk_rebuild")

    @property
    def takes_at_workers(self) -> bool:
        """Its workers are processes of this node, and take their own parts of an update themselves."""
        return self.is_spread and not self._far

    def describe_workers(self) -> list[dict[str, Any]]:
        """Of each worker, what it holds and where it is."""
        return list(self.call_workers("rlsdk_describe"))

    def receive(self, deliveries: Sequence[Delivery], version: int) -> tuple[WorkerReceipt, ...]:
        """Has every worker take its part."""
        answers = self.call_workers("rlsdk_receive", delivery.packed(deliveries))
        found = delivery.receipts(answers, version)
        self.call_workers("rlsdk_rebuild")
        return found

    def fingerprints(self) -> list[Fingerprints]:
        """By worker."""
        return list(self.call_workers("rlsdk_fingerprints"))

    def serve(self, version: int) -> None:
        """Tokens that are sampled from now on are of this version."""
        self.call_workers("rlsdk_serve", version)

    def clear_caches(self) -> None:
        """Overwrites all keys and values with zeros."""
        self.call_workers("rlsdk_clear_caches")

    def park(self, parts: Sequence[str]) -> None:
        self.call_workers("rlsdk_park", list(parts))

    def restore(self, parts: Sequence[str]) -> None:
        self.call_workers("rlsdk_restore", list(parts))


class InProcessEngine(VllmEngine):
    """vLLM's synchronous engine in this process; the model as well, unless it is split over several workers."""

    turn_s = 0.0

    def __init__(
        self, ctx: RankContext, spec: RolloutSpec, options: VllmOptions, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__(ctx)
        check_split(ctx, spec, options)
        prepare_environment(ctx, spec, options)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlsdk_vllm import nameless

        nameless.install()
        arguments = engine_args(EngineArgs, ctx, spec, options, shapes)
        self._timeout_s = ctx.timeout_s
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
            self._engine.add_request(sample.key, prompt_of(sample), sampling_params(sample))

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
            raise RuntimeError("vLLM did not give its prefix cache up")

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        with self._answered(method):
            return list(self._engine.collective_rpc(method, timeout=self._timeout_s, args=args))

    @contextmanager
    def _answered(self, doing: str) -> Iterator[None]:
        """Raises: DeadlineError: workers in other processes did not answer in time."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineError(
                f"vLLM's workers gave no answer ({doing}) within {self._timeout_s:g} s: one hangs, or the machine is "
                "too slow for trainer.timeout_s. Give more time, or look for the cause with rollout.vllm.log_level INFO"
            ) from error

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake(self, parts: Sequence[str]) -> None:
        self._engine.wake_up(list(parts))

    def close(self) -> None:
        """Ends the engine and its process groups, and no others."""
        from vllm.v1.engine import core

        # vLLM would end every process group of the process, a train engine's among them.
        with WORLD.entered(), replaced("cleanup_dist_env_and_memory", lambda: None, core):
            self._engine.engine_core.shutdown()
        WORLD.users -= 1
        if not WORLD.users:
            self._end_process_groups()
        del self._engine

    def _end_process_groups(self) -> None:
        """Those that vLLM made, unless a train engine has ended all of the process by now."""
        from vllm.distributed import parallel_state

        for name, group in list(vars(parallel_state).items()):
            if isinstance(group, parallel_state.GroupCoordinator):
                if WORLD.alive:
                    group.destroy()
                setattr(parallel_state, name, None)
        WORLD.destroy()


def check_cpu_attention(spec: RolloutSpec) -> None:
    """Raises: ConfigError: vLLM's attention on CPUs takes no heads of this size. It would say so in the first pass."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = head_size(load_model_config(spec.model)), CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ConfigError(
            f"model.path {spec.model.path!r}: its attention heads have {size} dimensions; vLLM on a CPU takes {sizes}. "
            "Use another model, a GPU, or --rollout-backend transformers"
        )


def engine_args(
    kind: Any, ctx: RankContext, spec: RolloutSpec, options: VllmOptions, shapes: Mapping[str, tuple[int, ...]]
) -> Any:
    """Arguments of a run, of vLLM's class `kind`; `spec.engine_kwargs` has the last word.

    Raises:
        ConfigError: vLLM knows no such argument, or could not serve the model.
    """
    from rlsdk_vllm.loader import LOAD_FORMAT

    on_cpu = ctx.device == "cpu"
    if on_cpu:
        check_cpu_attention(spec)
    arguments: dict[str, Any] = {
        "model": spec.model.path,
        "revision": spec.model.revision,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.model.dtype,
        "skip_tokenizer_init": True,
        # Nothing but the request says how a sample is drawn and where it ends.
        "generation_config": "vllm",
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": {"shapes": dict(shapes), "load": spec.load_weights},
        "logprobs_mode": "raw_logprobs",
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": spec.max_running,
        "tensor_parallel_size": spec.tp_size,
        "pipeline_parallel_size": spec.pp_size,
        "data_parallel_size": spec.dp_size,
        "enable_expert_parallel": spec.ep_size > 1,
        "distributed_executor_backend": executor(ctx, spec),
        "worker_extension_cls": "rlsdk_vllm.worker.WorkerExtension",
        "seed": ctx.seed + ctx.rank,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_bytes(ctx, spec, options),
        "enable_sleep_mode": not on_cpu,
        # Its own choice where the engine has a process of its own; in this one every step is waited for.
        "async_scheduling": None if options.asynchronous and not on_cpu else False,
        "disable_log_stats": True,
    }
    if on_cpu:
        # Samples share their prompt by whole blocks: the least that its attention is quick with, in place of 128.
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if options.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batched_tokens
    owned = sorted(OWNED & set(spec.engine_kwargs))
    if owned:
        raise ConfigError(f"rollout.engine_kwargs: {owned} belong to the plugin itself; leave them out")
    known = kind.__dataclass_fields__
    for name in spec.engine_kwargs:
        if name not in known:
            raise ConfigError(
                f"rollout.engine_kwargs.{name}: vLLM's EngineArgs has no such field{nearest(name, known)}"
            )
    return kind(**{**arguments, **spec.engine_kwargs})


def executor(ctx: RankContext, spec: RolloutSpec) -> str | None:
    """Who starts vLLM's workers. Left to itself vLLM counts the devices that this process sees, one, and refuses; or
    takes Ray, wherever its process is a Ray actor: its workers would then look for devices by themselves."""
    if spec.num_devices == 1:
        return None
    return "ray" if ctx.device != "cpu" and spans_nodes(ctx) else "mp"


def sampling_params(sample: Sample) -> Any:
    """How vLLM draws one sample. Stop strings are looked for by the caller: the engine has no tokenizer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = sample.request.sampling
    if 0 < asked.temperature < LEAST_TEMPERATURE:
        # vLLM would take the least in its place, and say so in a log.
        raise ValueError(f"temperature {asked.temperature}: expected 0, or {LEAST_TEMPERATURE} or more")
    return SamplingParams(
        n=1,
        max_tokens=sample.limit,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        extra_args={SEED_ARGUMENT: sample.seed, PRIOR_ARGUMENT: len(sample.request.response_ids)},
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def prompt_of(sample: Sample) -> dict[str, Any]:
    """What a sample starts from, as vLLM takes it."""
    return {"type": "token", "prompt_token_ids": [*sample.request.prompt_ids, *sample.request.response_ids]}


def progress_of(key: str, output: Any) -> Progress:
    """What a `vllm.RequestOutput` adds to a sample."""
    made = output.outputs[0]
    finished = None if made.finish_reason is None else REASONS.get(made.finish_reason)
    if made.finish_reason is not None and finished is None:
        raise RuntimeError(f"vLLM ended request {key!r} with {made.finish_reason!r}")
    if made.logprobs is None:
        return Progress(key, made.token_ids, (), (), finished)
    # The sampler puts versions where vLLM has ranks.
    return Progress(key, made.token_ids, made.logprobs.logprobs, made.logprobs.ranks, finished)


@contextmanager
def explained_start(spec: RolloutSpec) -> Iterator[None]:
    """Raises: ConfigError: vLLM refused the model or its arguments."""
    try:
        yield
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"model.path {spec.model.path!r}: vLLM could not start: {error}. Give a model and rollout.engine_kwargs "
            "that it takes, or another rollout backend"
        ) from error


@contextmanager
def explained_refusal(sample: Sample) -> Iterator[None]:
    """Raises: ConfigError: vLLM refused a request."""
    try:
        yield
    except Exception as error:
        # The class of a refusal is another in each version.
        raise ConfigError(f"request {sample.request.request_id!r}: vLLM refuses it: {error}") from error


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
