"""SGLang on this process's side: how it is configured, started, asked, and ended.

Tested: 0.5.23. Nothing else in this package names a function of SGLang, except for `inside` and `sampler`, which run in
its schedulers' processes.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import multiprocessing
import os
import pickle
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rlsdk.interfaces import ConfigError, FinishReason, RankContext, RlsdkError, RolloutSpec, WeightShard, nearest
from rlsdk.kit.hf import load_model_config
from rlsdk.kit.kv_cache import bytes_per_token
from rlsdk.kit.staging import batches
from rlsdk_sglang import inside
from rlsdk_sglang.client import ClientThread
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.messages import Answer, Command, block_as_json
from rlsdk_sglang.samples import Sample

OWNED = {"model_path", "load_format", "tp_size", "custom_weight_loader", "sampling_backend", "skip_tokenizer_init"}
"""Arguments without which nothing here works."""
STAGING_BYTES = 64 << 20
"""Most weights on their way to the schedulers."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
RESERVED_TOKENS = 16
"""More than what SGLang keeps back from a context for itself."""
MAX_SHARE = 0.25
"""Of a machine's free memory that keys and values take unasked, on a CPU."""
START_S = 600.0
"""Deadline of a start."""
END_S = 20.0
"""Deadline of processes that were told to end."""


@dataclass(frozen=True)
class Progress:
    """What one report adds to a sample."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finished: FinishReason | None
    versions: tuple[int, int] | None
    """Of a finished sample: those that its first and its last token were sampled under."""


class ServedModel:
    """SGLang's engine: its front in this process, on a thread of its own, its schedulers in others."""

    def __init__(self, ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> None:
        self._ctx, self._num_ranks = ctx, spec.tp_size
        arguments = engine_arguments(ctx, spec, options)
        self._client = ClientThread()
        try:
            self._engine = self._client.call(_start, arguments, _environment(ctx, spec))
        except BaseException:
            self._client.stop()
            raise
        self._front = self._engine.tokenizer_manager
        self._processes = [psutil.Process(pid) for pid in self._engine.get_all_child_pids()]
        self.vocabulary: int = self._front.model_config.vocab_size

    def call(self, function: Any, *args: Any) -> Any:
        """Runs a function on the engine's thread, where samples are followed."""
        return self._client.call(function, *args)

    def create_task(self, coroutine: Any) -> asyncio.Task[Any]:
        """To be called on the engine's thread."""
        return self._client.loop.create_task(coroutine)

    async def follow(self, sample: Sample) -> AsyncGenerator[Progress, None]:
        """Has a sample made. Whoever leaves early ends it.

        Raises:
            ConfigError: SGLang refuses it.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(
            rid=sample.key,
            input_ids=list(sample.request.prompt_ids),
            sampling_params=sampling_params(sample),
            return_logprob=True,
            stream=True,
        )
        seen = 0
        try:
            async with aclosing(self._front.generate_request(asked)) as reports:
                async for report in reports:
                    progress = _progress(report, seen)
                    seen += len(progress.token_ids)
                    yield progress
        except ValueError as error:
            raise ConfigError(f"request {sample.request.request_id!r}: SGLang refuses it: {error}") from error

    def pause(self) -> None:
        """Gives running samples' keys and values up; what they have so far was reported when this returns."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._run(self._front.pause_generation(PauseGenerationReqInput(mode="retract")))
        # A pause is not answered; what comes after it is.
        self._run(self._front.get_internal_state())

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._run(self._front.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False)))

    def drop_caches(self, *, paused: bool = False) -> None:
        """Forgets all keys and values, once what was aborted has left; what is paused holds none.

        Raises:
            RlsdkError: something still holds on to them.
        """
        found = self._run(self._front.flush_cache(timeout_s=None if paused else self._ctx.timeout_s))
        if not found.success:
            raise RlsdkError(f"SGLang did not give its prefix cache up: {getattr(found, 'message', '')}")

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Readies the schedulers; returns what speaks against serving this model."""
        with self._session():
            return sorted({fault for faults in self._command("prepare", shapes=shapes) for fault in faults})

    def write(self, shards: Iterator[WeightShard]) -> None:
        """Brings weights to where the schedulers compute from."""
        with self._session():
            for block in batches(shards, STAGING_BYTES):
                self._command("write", **block_as_json(block))

    def fingerprints(self) -> list[dict[str, Any]]:
        """By scheduler: `inside.Hand.fingerprints`."""
        with self._session():
            return self._command("fingerprints")

    def name_version(self, version: int) -> None:
        """Tokens from now on are of this version."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        named = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        self._run(self._front.update_weight_version(named))

    def sleep(self, parts: Sequence[str]) -> int:
        """Frees keys and values, or weights as well. On a GPU weights are kept on the host.

        Returns:
            Bytes that were given back, where that is known: on a CPU.
        """
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self.drop_caches()
        self._run(self._front.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(parts))))
        if self._ctx.device == "cpu":
            # SGLang itself frees nothing there.
            with self._session():
                return sum(self._command("park", parts=list(parts)))
        return 0

    def wake(self, parts: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if self._ctx.device == "cpu":
            with self._session():
                self._command("restore", parts=list(parts))
        self._run(self._front.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(parts))))

    def close(self) -> None:
        """Ends the engine and its processes, and no others: SGLang's own end kills every child of this process."""
        engine, front = self._engine, self._front
        atexit.unregister(engine.shutdown)
        for process in self._processes:
            _kill(process)
        self._client.call(_close_sockets, engine, front)
        self._client.stop()
        for name in vars(engine.port_args).values():
            if isinstance(name, str) and name.startswith("ipc://"):
                Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
        del self._engine, self._front

    def check_alive(self) -> None:
        """Raises: RlsdkError: a scheduler ended."""
        for process in self._processes:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise RlsdkError(
                    f"a scheduler of SGLang (process {process.pid}) ended; its last words are in this worker's log. "
                    "Start the run again, or give rollout.sglang.log_level 'info' to see more"
                )

    def _run(self, coroutine: Any) -> Any:
        self.check_alive()
        try:
            return self._client.run(coroutine, self._ctx.timeout_s)
        except TimeoutError:
            self.check_alive()
            raise RlsdkError(f"SGLang did not answer within {self._ctx.timeout_s:.0f} s") from None

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Inside, weights may be touched."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        self._sure(self._front.begin_weight_update(BeginWeightUpdateReqInput(selector="target")))
        try:
            yield
        finally:
            self._sure(self._front.end_weight_update(EndWeightUpdateReqInput()))

    def _command(self, name: str, **arguments: Any) -> list[Any]:
        """What each scheduler answered."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        answers = [Answer() for _ in range(self._num_ranks)]
        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[_payload(Command(name, arguments, answer.address)) for answer in answers],
            load_format=inside.LOADER,
            flush_cache=False,
            selector="target",
        )
        self._sure(self._front.update_weights_from_tensor(asked))
        values = []
        for rank, answer in enumerate(answers):
            value, error = answer.read()
            if error is not None:
                raise RlsdkError(f"scheduler {rank} of SGLang could not {name!r}: {error}")
            values.append(value)
        return values

    def _sure(self, coroutine: Any) -> None:
        """Waits for an answer of the kind (whether it went well, what was said)."""
        success, message = self._run(coroutine)
        if not success:
            raise RlsdkError(f"SGLang refused: {message}")


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
        known = _known_arguments(_environment(ctx, spec))
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


def sampling_params(sample: Sample) -> dict[str, Any]:
    """How SGLang draws one sample. Stop strings are looked for by the caller: the engine has no tokenizer."""
    asked = sample.request.sampling
    return {
        "max_new_tokens": sample.limit,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "min_p": asked.min_p,
        "stop_token_ids": list(asked.stop_token_ids),
        "sampling_seed": sample.seed,
    }


def _progress(report: Mapping[str, Any], seen: int) -> Progress:
    """What a report of all so far adds to what was seen."""
    about = report["meta_info"]
    ended = about["finish_reason"]
    log_probs = [entry[0] for entry in about["output_token_logprobs"][seen:]]
    tokens = list(report["output_ids"][seen:])
    if ended is not None and ended["type"] == "abort" and ended.get("status_code") is not None:
        raise ValueError(ended.get("message"))
    spans = about.get("weight_versions") if ended is not None else None
    return Progress(
        token_ids=tokens,
        log_probs=log_probs[: len(tokens)],
        finished=None if ended is None else REASONS[ended["type"]],
        versions=(int(spans[0]["version"]), int(spans[-1]["version"])) if spans else None,
    )


def _payload(command: Command) -> bytes:
    """As SGLang's schedulers unpack it: a list of named tensors, values and all."""
    data = torch.frombuffer(bytearray(command.encoded()), dtype=torch.uint8)
    return pickle.dumps([("command", data)])


def _environment(ctx: RankContext, spec: RolloutSpec) -> dict[str, str]:
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


def _close_sockets(engine: Any, front: Any) -> None:
    for socket in (engine.send_to_rpc, front.recv_from_detokenizer, front.send_to_scheduler):
        close = getattr(socket, "close", None)
        if close is not None:
            close(linger=0)
