"""Replicas that really answer: tokens are a function of the request, as a seeded engine's are."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, RewardSample, VersionRun
from rlsdk.rollouts import Collected, Grade, PackedOutputs
from rlsdk.rollouts.groups.rollouter import Tokens
from rlsdk.rollouts.journal.segments import body_of, read_body


def read_back(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record of the journal as it is read from the file."""
    text, arrays = body_of({"event": "sample", **record})
    return read_body(text, memoryview(b"".join(array.tobytes() for array in arrays)))


def tokens_of(request: GenerationRequest, index: int) -> list[int]:
    """Between 0 and `max_tokens` tokens that depend on seed, sample and prompt alone."""
    key = f"{request.sampling.seed}/{index}/{request.prompt_ids}".encode()
    digest = hashlib.blake2b(key, digest_size=32).digest()
    return [int(byte) for byte in digest[: digest[0] % (request.sampling.max_tokens + 1)]]


def output_of(request: GenerationRequest, index: int, version: int = 0) -> GenerationOutput:
    tokens = tokens_of(request, index)
    return GenerationOutput(
        request_id=request.request_id,
        sample_index=index,
        token_ids=np.array(tokens, np.int64),
        log_probs=-np.array(tokens, np.float32),
        finish_reason=FinishReason.LENGTH if len(tokens) == request.sampling.max_tokens else FinishReason.STOP,
        versions=(VersionRun(version, len(tokens)),),
    )


class FakeReplica:
    """Finishes its samples one at a time, each after `delay` turns of the loop; may die after some."""

    def __init__(self, name: str = "replica", *, max_running: int = 4, delay: int = 1, dies_after: int | None = None):
        self.name = name
        self.max_running = max_running
        self.delay = delay
        self.dies_after = dies_after
        self.requests: list[GenerationRequest] = []
        self.messages = 0
        self.waiting: list[tuple[GenerationRequest, int]] = []
        self.done = 0
        self.most = 0
        self.aborted: list[str] = []

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.messages += 1
        for request in requests:
            self.requests.append(request)
            self.waiting += [(request, request.first_sample + at) for at in range(request.n)]
        self.most = max(self.most, len(self.waiting))

    async def collect(self, wait_s: float) -> Collected:
        for _ in range(self.delay):
            await asyncio.sleep(0)
        if self.dies_after is not None and self.done >= self.dies_after:
            raise RuntimeError(f"{self.name} is gone")
        finished = self.waiting[:1]
        del self.waiting[:1]
        self.done += len(finished)
        return Collected(
            outputs=PackedOutputs.pack([output_of(request, index) for request, index in finished]),
            num_decoded=self.done,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids


class SilentReplica(FakeReplica):
    """Takes requests and never says a word."""

    async def collect(self, wait_s: float) -> Collected:
        await asyncio.sleep(min(wait_s, 0.01))
        return Collected(outputs=PackedOutputs.pack([]), num_decoded=0)


class LetterCodec:
    """One character a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Tokens) -> str:
        return "".join(map(chr, token_ids))

    def decode_all(self, token_ids: Sequence[Tokens]) -> list[str]:
        return [self.decode(ids) for ids in token_ids]


class LengthGrader:
    """The score is the length of the response; remembers how samples came."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def submit(self, samples: Sequence[RewardSample]) -> Future[Sequence[Grade]]:
        self.calls.append(len(samples))
        future: Future[Sequence[Grade]] = Future()
        future.set_result([Grade(score=float(len(s.response)), terms={"length": len(s.response)}) for s in samples])
        return future
