"""All that depends on vLLM's version: how it is configured, started, asked, stepped and ended.

Tested window: 0.31 and 0.32 (their CPU builds). Nothing else in this package names a function of vLLM, except for
`loader` (model loaders) and `sampler` (log-probs).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from rlsdk.interfaces import ConfigError, FinishReason, RankContext, RolloutSpec, WeightShard, nearest
from rlsdk.kit.hf import load_model_config
from rlsdk.kit.kv_cache import head_size
from rlsdk.kit.staging import batches
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.memory import kv_cache_bytes
from rlsdk_vllm.process_groups import WORLD
from rlsdk_vllm.replacing import replaced
from rlsdk_vllm.samples import SEED_ARGUMENT, Sample

OWNED = {"load_format", "model_loader_extra_config", "logprobs_mode", "model", "worker_extension_cls"}
"""Arguments without which nothing here works."""
STAGING_BYTES = 64 << 20
"""Most weights on their way to workers in other processes."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class Progress(NamedTuple):
    """What one step added to a sample."""

    key: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finished: FinishReason | None


def prepare_environment(options: VllmOptions) -> None:
    """Settings that vLLM reads from the environment, before it is imported. What the user set stays."""
    settings = {
        "VLLM_LOGGING_LEVEL": options.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        # Threads are the host's to bind: several replicas would all take the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The runner whose sampler and weights this plugin knows.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # Not the user's to choose: with it, the engine would be in a process that this one cannot see into.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class InProcessEngine:
    """vLLM's synchronous engine in this process; the model as well, unless it is split over several workers."""

    def __init__(
        self, ctx: RankContext, spec: RolloutSpec, options: VllmOptions, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        prepare_environment(options)
        from vllm.v1.engine.llm_engine import LLMEngine

        if ctx.device == "cpu":
            check_cpu_attention(spec)
        arguments = engine_args(ctx, spec, options, shapes)
        with WORLD.entered(), undisturbed_process():
            try:
                self._engine = LLMEngine.from_engine_args(arguments)
            except (ValueError, NotImplementedError, AssertionError) as error:
                raise ConfigError(
                    f"model.path {spec.model.path!r}: vLLM could not start: {error}. Give a model and "
                    "rollout.engine_kwargs that it takes, or another rollout backend"
                ) from error
        WORLD.users += 1
        self.is_spread = spec.tp_size > 1
        """Its workers are processes of their own."""
        self.vocabulary: int = self._engine.model_config.get_vocab_size()

    def add(self, sample: Sample) -> None:
        """Takes a sample in; it runs with the next steps.

        Raises:
            ConfigError: vLLM refuses it.
        """
        prompt = {"type": "token", "prompt_token_ids": list(sample.request.prompt_ids)}
        try:
            self._engine.add_request(sample.key, prompt, sampling_params(sample))
        except Exception as error:
            # The class of a refusal is another in each version.
            raise ConfigError(f"request {sample.request.request_id!r}: vLLM refuses it: {error}") from error

    def step(self) -> list[Progress]:
        """One pass of the model: what it added to each sample."""
        found = []
        for output in self._engine.step():
            made = output.outputs[0]
            finished = None if made.finish_reason is None else REASONS.get(made.finish_reason)
            if made.finish_reason is not None and finished is None:
                raise RuntimeError(f"vLLM ended request {output.request_id!r} with {made.finish_reason!r}")
            log_probs = () if made.logprobs is None else made.logprobs.logprobs
            found.append(Progress(output.request_id, made.token_ids, log_probs, finished))
        return found

    def abort(self, keys: Sequence[str]) -> None:
        """Forgets samples."""
        self._engine.abort_request(list(keys))

    def drop_caches(self) -> None:
        """Forgets all keys and values; samples that run are computed anew from their tokens.

        Raises:
            RuntimeError: something still holds on to them.
        """
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not give its prefix cache up")

    def prepare(self) -> list[str]:
        """Readies the workers; returns what speaks against serving this model."""
        return sorted({fault for faults in self._engine.collective_rpc("rlsdk_prepare") for fault in faults})

    def write(self, shards: Iterator[WeightShard]) -> None:
        """Brings weights to where the workers compute from."""
        if not self.is_spread:
            self._engine.collective_rpc("rlsdk_write", args=(shards,))
            return
        for block in batches(shards, STAGING_BYTES):
            self._engine.collective_rpc("rlsdk_take", args=(block.name, block.entries))

    def fingerprints(self) -> list[Any]:
        """By worker: `WorkerExtension.rlsdk_fingerprints`."""
        return list(self._engine.collective_rpc("rlsdk_fingerprints"))

    def park(self, parts: Sequence[str]) -> None:
        self._engine.collective_rpc("rlsdk_park", args=(tuple(parts),))

    def restore(self, parts: Sequence[str]) -> None:
        self._engine.collective_rpc("rlsdk_restore", args=(tuple(parts),))

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
    ctx: RankContext, spec: RolloutSpec, options: VllmOptions, shapes: Mapping[str, tuple[int, ...]]
) -> Any:
    """`vllm.EngineArgs` of a run; `spec.engine_kwargs` has the last word.

    Raises:
        ConfigError: vLLM knows no such argument, or refuses its value.
    """
    from vllm.engine.arg_utils import EngineArgs

    from rlsdk_vllm.loader import LOAD_FORMAT

    on_cpu = ctx.device == "cpu"
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
        "worker_extension_cls": "rlsdk_vllm.worker.WorkerExtension",
        "seed": ctx.seed + ctx.rank,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_bytes(ctx, spec, options),
        "enable_sleep_mode": not on_cpu,
        "async_scheduling": False,
        "disable_log_stats": True,
    }
    if options.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batched_tokens
    owned = sorted(OWNED & set(spec.engine_kwargs))
    if owned:
        raise ConfigError(f"rollout.engine_kwargs: {owned} belong to the plugin itself; leave them out")
    known = EngineArgs.__dataclass_fields__
    for name in spec.engine_kwargs:
        if name not in known:
            raise ConfigError(
                f"rollout.engine_kwargs.{name}: vLLM's EngineArgs has no such field{nearest(name, known)}"
            )
    return EngineArgs(**{**arguments, **spec.engine_kwargs})


def sampling_params(sample: Sample) -> Any:
    """How vLLM draws one sample. Stop strings are looked for by the caller: the engine has no tokenizer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = sample.request.sampling
    return SamplingParams(
        n=1,
        max_tokens=sample.limit,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        extra_args={SEED_ARGUMENT: sample.seed},
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


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
