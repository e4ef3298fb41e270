"""The engine: every prompt is one request to the server, answers come as they are finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rlsdk.interfaces import (
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    UnsupportedCapabilityError,
    VersionRun,
    WeightLayout,
    WeightShard,
    WorkerError,
)
from rlsdk.kit.generation.requests import check_requests, response_limit
from rlsdk.kit.generation.sampling import mixed_seed
from rlsdk.kit.generation.serving import check_rollout_spec
from rlsdk.kit.model.hf import load_model_config
from rlsdk_openai.client import Client
from rlsdk_openai.config import OpenAiOptions

NO_WEIGHTS = (
    "backend 'openai' cannot take weights: the protocol has no way to send them, nor to prove what is served. Use it "
    "with `rlsdk eval` and `rlsdk generate`; to train, choose a rollout backend of `rlsdk plugins list`"
)


class OpenAiRolloutEngine(RolloutEngine):
    """Tokens in, tokens out: prompts are sent as ids, and the server must give ids back (`return_token_ids`, as vLLM's
    does). One that gives text only is refused at its first answer: the ids cannot be found again from a text."""

    pool: ThreadPoolExecutor | None = None

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        if not spec.load_weights:
            raise ConfigError(NO_WEIGHTS)
        check_rollout_spec(spec, OpenAiOptions)
        if spec.num_devices != 1 or spec.engine_kwargs:
            raise ConfigError("rollout.engine_kwargs and the server's devices are for the server's own command line")
        self.spec = spec
        self.options = spec.options if isinstance(spec.options, OpenAiOptions) else OpenAiOptions()
        self.client = Client(self.options)
        names = self.client.models()
        self.model = self.options.model or names[0]
        if self.model not in names:
            raise ConfigError(f"rollout.openai.model {self.model!r}: the server has {', '.join(map(repr, names))}")
        self.vocabulary = int(load_model_config(spec.model).vocab_size)
        self.pool = ThreadPoolExecutor(self.options.max_requests, thread_name_prefix="rlsdk-openai")

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        if self.pool is None:
            raise WorkerError("backend 'openai' is closed, or was never initialized: it has no line to a server")
        check_requests(requests, max_model_tokens=self.spec.max_model_tokens, vocabulary=self.vocabulary)
        for request in requests:
            _check_sampling(request)
        loop = asyncio.get_running_loop()
        asked = [loop.run_in_executor(self.pool, self._complete, request) for request in requests]
        try:
            for done in asyncio.as_completed(asked):
                for output in await done:
                    yield output
        finally:
            for one in asked:
                one.cancel()  # What has not been sent yet is not sent any more.

    def layout(self) -> Sequence[WeightLayout]:
        raise UnsupportedCapabilityError(NO_WEIGHTS)

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        raise UnsupportedCapabilityError(NO_WEIGHTS)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None

    def _complete(self, request: GenerationRequest) -> list[GenerationOutput]:
        """All samples of one request."""
        sampling = request.sampling
        room = response_limit(request, self.spec.max_model_tokens)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": [*request.prompt_ids, *request.response_ids],
            "n": request.n,
            "max_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 1,
            "return_token_ids": True,
            "stop_token_ids": list(sampling.stop_token_ids),
            # The end-of-sequence token is among `stop_token_ids` where it is to stop; nothing else does.
            "ignore_eos": True,
            "include_stop_str_in_output": True,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.seed is not None:
            # A server seeds a request as a whole: parts of a group that are requested alone must not be alike.
            place = request.first_sample, len(request.response_ids)
            body["seed"] = (mixed_seed(sampling.seed, *place) if any(place) else sampling.seed) % 2**31
        choices = self.client.complete(body)["choices"]
        if len(choices) != request.n:
            raise WorkerError(
                f"request {request.request_id!r}: {request.n} samples were asked for, {len(choices)} came"
            )
        return [_output(request, choice, room) for choice in choices]


def _output(request: GenerationRequest, choice: dict[str, Any], room: int) -> GenerationOutput:
    """One choice of the server's answer, checked: what does not fit together is an error, and not a sample."""
    ids, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None or log_probs is None:
        lacking = "token_ids" if ids is None else "logprobs"
        raise WorkerError(
            f"the server's answer has no {lacking!r}: token ids and log-probs are needed, since text cannot be turned "
            "back into the ids it came from; use a server that knows `return_token_ids` (vLLM 0.10.2 and later do)"
        )
    if not 0 < len(ids) == len(log_probs) <= room:
        raise WorkerError(
            f"request {request.request_id!r}: {len(ids)} tokens and {len(log_probs)} log-probs came; expected as many "
            f"of both, from 1 to {room}"
        )
    stopped = choice.get("finish_reason") == "stop"
    if stopped and ids[-1] not in request.sampling.stop_token_ids:
        raise WorkerError(
            f"request {request.request_id!r}: the answer ends by 'stop' without one of the stop tokens "
            f"{list(request.sampling.stop_token_ids)}: the server stops at tokens of its own, or leaves them out"
        )
    return GenerationOutput(
        request_id=request.request_id,
        sample_index=request.first_sample + int(choice["index"]),
        token_ids=np.array(ids, np.int64),
        log_probs=np.array(log_probs, np.float32),
        finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        versions=(VersionRun(0, len(ids)),),
    )


def _check_sampling(request: GenerationRequest) -> None:
    for name in ("min_p", "stop_strings"):
        if value := getattr(request.sampling, name):
            raise ConfigError(f"request {request.request_id!r}: {name} {value!r}: backend 'openai' does not support it")
