"""Interface to SGLang.

Tested: 0.5.23. Other modules of this package do not call functions of SGLang, except `launch`, `server` and `reports`,
and `scheduler_process`, `weights` and `sampler`, which run in its scheduler processes.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    AdapterSpec,
    ConfigError,
    Delivery,
    RankContext,
    RlsdkError,
    RolloutSpec,
    WeightShard,
    WorkerReceipt,
)
from rlsdk.kit.model.hf import load_model_config
from rlsdk.kit.ranks.companions import get_companions
from rlsdk.kit.ranks.replica_devices import spans_nodes
from rlsdk.kit.weights import delivery, weight_updates
from rlsdk.kit.weights.staging import batches
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk.kit.weights.weight_updates import Fingerprints
from rlsdk_sglang import low_rank, weights
from rlsdk_sglang.client import ClientThread
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.launch import OwnEngine
from rlsdk_sglang.messages import Answer, Command
from rlsdk_sglang.remote import RemoteServer
from rlsdk_sglang.remote_answers import AnswerServer, RemoteAnswer
from rlsdk_sglang.reports import Progress, progress_of, prompt_fields, sampling_params
from rlsdk_sglang.samples import Sample

STAGING_BYTES = 64 << 20
"""Size of the staging block for weights that are sent to schedulers."""


class ServedModel:
    """The operations of SGLang that the engine uses, with SGLang in this process or on a server."""

    def __init__(self, ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> None:
        self._ctx = ctx
        is_apart = options.url is None and spans_nodes(ctx)
        self._answer_server = AnswerServer(get_companions().address) if is_apart else None
        """Server for answers of schedulers on other nodes; None: all schedulers are on this node."""
        self._client = ClientThread()
        home = OwnEngine if options.url is None else RemoteServer
        try:
            self._home: OwnEngine | RemoteServer = home(self._client, ctx, spec, options)
        except BaseException:
            self._client.stop()
            if self._answer_server is not None:
                self._answer_server.close()
            raise
        self._front = self._home.front
        self._adapters: list[int] = []
        """Numbers of the adapters that are loaded."""
        self.workers: list[dict[str, Any]] = []
        """Description of each scheduler (boxes and location); set by `prepare`."""
        self.vocabulary: int = load_model_config(spec.model).get_text_config().vocab_size

    def call(self, function: Any, *args: Any) -> Any:
        """Runs a function on the engine's thread, which follows samples."""
        return self._client.call(function, *args)

    def create_task(self, coroutine: Any) -> asyncio.Task[Any]:
        """Call it on the engine's thread."""
        return self._client.loop.create_task(coroutine)

    async def follow(self, sample: Sample) -> AsyncGenerator[Progress, None]:
        """Generates a sample and yields its reports. If the caller stops early, SGLang aborts the sample.

        Raises:
            ConfigError: SGLang refuses it.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(
            rid=sample.key,
            input_ids=[*sample.request.prompt_ids, *sample.request.response_ids],
            sampling_params=sampling_params(sample),
            return_logprob=True,
            stream=True,
            lora_path=low_rank.name_of(sample.adapter),
            **({} if (count := sample.request.prompt_log_probs) is None else prompt_fields(count)),
        )
        seen = 0
        try:
            async with aclosing(self._front.generate_request(asked)) as reports:
                async for report in reports:
                    progress = progress_of(report, seen, count if sample.prompt_log_probs is None else None)
                    seen += len(progress.token_ids)
                    yield progress
        except ValueError as error:
            raise ConfigError(f"request {sample.request.request_id!r}: SGLang refuses it: {error}") from error

    def pause(self) -> None:
        """Pauses and drops the KV cache of running samples. When it returns, all their tokens have been reported."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._run(self._front.pause_generation(PauseGenerationReqInput(mode="retract")))
        # SGLang does not answer a pause, but it does answer the next command.
        self._run(self._front.get_internal_state())

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._run(self._front.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False)))

    def drop_caches(self, *, paused: bool = False) -> None:
        """Drops the KV cache, once aborted samples have left; paused samples use none.

        Raises:
            RlsdkError: some of it is still in use.
        """
        found = self._run(self._front.flush_cache(timeout_s=None if paused else self._ctx.timeout_s))
        if not found.success:
            raise RlsdkError(f"SGLang did not free its prefix cache: {getattr(found, 'message', '')}")

    def prepare(self, shapes: Mapping[str, tuple[int, ...]], sources: Sequence[Source] | None) -> list[str]:
        """Prepares the schedulers; returns reasons why this model cannot be served.

        Args:
            shapes: shapes of the canonical tensors.
            sources: the tensors in the model's files, if they differ (`rlsdk.kit.weights.file_tensors`).
        """
        files = None if sources is None else [source.packed() for source in sources]
        with self._session():
            answers = self._command("prepare", shapes=shapes, sources=files)
            found = sorted({fault for faults in answers for fault in faults})
            lacking = weight_updates.find_unserved(shapes, self._command("boxes"))
            self.workers = self._command("describe")
        return [f"no memory of SGLang's model was found for canonical tensor {name!r}" for name in lacking] + found

    def write(self, shards: Iterator[WeightShard]) -> None:
        """Writes weights into the memory that the schedulers compute with."""
        with self._session():
            if self.spans_nodes:
                # SGLang sends a copy to each scheduler.
                for block in batches(shards, STAGING_BYTES // self._home.num_ranks):
                    self._command("write_copy", data=block.values(), entries=block.entries)
            else:
                for block in batches(shards, STAGING_BYTES):
                    self._command("write", block=block.name, entries=block.entries)
            self._command("rebuild")

    @property
    def spans_nodes(self) -> bool:
        """Whether some of its schedulers are on other nodes, which cannot map this node's memory."""
        return self._answer_server is not None

    def receive(self, deliveries: Sequence[Delivery], version: int) -> tuple[WorkerReceipt, ...]:
        """Lets every scheduler receive its part."""
        with self._session():
            found = delivery.worker_receipts(
                self._command("receive", deliveries=delivery.encode_deliveries(deliveries)), version
            )
            self._command("rebuild")
        return found

    def fingerprints(self) -> list[Fingerprints]:
        """Fingerprints by scheduler: `weights.WeightCommands.fingerprints`."""
        with self._session():
            return self._command("fingerprints")

    def put_adapter(
        self, number: int, tensors: Mapping[str, Tensor], spec: AdapterSpec, keep: Sequence[int]
    ) -> list[Fingerprints]:
        """Loads an adapter from memory, and drops all but those of `keep` before; fingerprints by scheduler, see
        `low_rank.held`."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput, UnloadLoRAAdapterReqInput

        front: Any = self._front  # no server, which `low_rank.check_adapter` refuses
        for old in [one for one in self._adapters if one not in keep]:
            self._loaded(front.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=low_rank.name_of(old)), None))
            self._adapters.remove(old)
        name, modules = low_rank.name_of(number), sorted({tensor.rpartition(".lora_")[0] for tensor in tensors})
        named = {f"base_model.model.{tensor}": values for tensor, values in tensors.items()}
        asked = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict=low_rank.peft_config(spec, modules),
            serialized_named_tensors=[pickle.dumps(named)] * self._home.num_ranks,
        )
        self._loaded(front.load_lora_adapter_from_tensors(asked, None))
        self._adapters.append(number)
        said = {"rank": spec.rank, "scale": spec.scale}
        with self._session():
            return self._command(
                "adapter", adapter=name, spec=said, shapes={n: list(values.shape) for n, values in tensors.items()}
            )

    def first_log_prob(self, ids: Sequence[int], adapter: int | None) -> float:
        """Log-prob of the most probable token after these."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        async def read() -> float:
            asked = GenerateReqInput(
                input_ids=list(ids),
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                return_logprob=True,
                lora_path=low_rank.name_of(adapter),
            )
            async with aclosing(self._front.generate_request(asked)) as reports:
                return [float(report["meta_info"]["output_token_logprobs"][0][0]) async for report in reports][-1]

        return float(self._run(read()))

    def _loaded(self, coroutine: Any) -> None:
        """Waits for an answer about an adapter, which is no exception where it failed."""
        answer = self._run(coroutine)
        if not answer.success:
            raise RlsdkError(f"SGLang refused an adapter: {answer.error_message}")

    def serve(self, version: int) -> None:
        """Sets the version of tokens sampled from now on."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        named = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        self._run(self._front.update_weight_version(named))

    def sleep(self, parts: Sequence[str]) -> int:
        """Frees the KV cache, or weights as well. On a GPU weights are kept on the host.

        Returns:
            Freed bytes, if known: on a CPU.
        """
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self.drop_caches()
        self._run(self._front.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(parts))))
        if self._ctx.device == "cpu":
            # SGLang itself frees nothing on a CPU.
            with self._session():
                return sum(self._command("release", parts=list(parts)))
        return 0

    def wake(self, parts: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if self._ctx.device == "cpu":
            with self._session():
                self._command("restore", parts=list(parts))
        self._run(self._front.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(parts))))

    def close(self) -> None:
        """Ends the engine; a server continues to run."""
        try:
            self._home.close()
        finally:
            if self._answer_server is not None:
                self._answer_server.close()
            self._client.stop()

    def check_alive(self) -> None:
        """Raises `RlsdkError` if a scheduler ended."""
        self._home.check_alive()

    def _run(self, coroutine: Any) -> Any:
        try:
            self.check_alive()
        except BaseException:
            coroutine.close()
            raise
        try:
            return self._client.run(coroutine, self._ctx.timeout_s, self.check_alive)
        except TimeoutError:
            self.check_alive()
            raise RlsdkError(f"SGLang did not answer within {self._ctx.timeout_s:.0f} s") from None

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Context in which weights may be changed."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        self._sure(self._front.begin_weight_update(BeginWeightUpdateReqInput(selector="target")))
        try:
            yield
        finally:
            self._sure(self._front.end_weight_update(EndWeightUpdateReqInput()))

    def _command(self, name: str, *, data: bytes = b"", **arguments: Any) -> list[Any]:
        """Sends a command; returns each scheduler's answer, ordered by stage, then by rank: the order of devices."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        # One payload for each rank of a stage: the schedulers with this rank in all stages receive it. Each scheduler
        # answers.
        server = self._answer_server
        expect: Callable[[], Answer | RemoteAnswer] = Answer if server is None else server.expect
        answers = [[expect() for _ in range(self._home.num_stages)] for _ in range(self._home.num_ranks)]
        payloads = [
            _payload(Command(name, arguments, tuple(a.address for a in by_stage), data)) for by_stage in answers
        ]
        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=weights.LOADER,
            flush_cache=False,
            selector="target",
        )
        self._sure(self._front.update_weights_from_tensor(asked))
        values = []
        # With one stage on one node, all schedulers have answered by now.
        wait_s = self._ctx.timeout_s if self._home.num_stages > 1 or self.spans_nodes else 0.0
        for rank, answer in enumerate(answer for of_stage in zip(*answers, strict=True) for answer in of_stage):
            value, error = answer.read(wait_s, self.check_alive)
            if error is not None:
                raise RlsdkError(f"scheduler {rank} of SGLang could not {name!r}: {error}")
            values.append(value)
        return values

    def _sure(self, coroutine: Any) -> None:
        """Waits for an answer (success, message)."""
        success, message = self._run(coroutine)
        if not success:
            raise RlsdkError(f"SGLang refused: {message}")


def _payload(command: Command) -> bytes:
    """A payload in the format of SGLang's schedulers: a list of named tensors with values."""
    data = torch.frombuffer(bytearray(command.encoded()), dtype=torch.uint8)
    return pickle.dumps([("command", data)])
