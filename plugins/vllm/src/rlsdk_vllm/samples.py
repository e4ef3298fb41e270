"""Samples that run, and the calls of `generate` that wait for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest

SEED_ARGUMENT = "rlsdk_seed"
"""Under this name a sample's seed goes with it to the sampler."""


@dataclass
class Call:
    """One call of `generate`."""

    number: int = 0
    """How many calls there were, with this one."""
    left: int = 0
    """Samples that still run."""
    finished: list[GenerationOutput] = field(default_factory=list)
    error: BaseException | None = None

    def take(self) -> list[GenerationOutput]:
        """What finished since the last look.

        Raises:
            what ended the engine under it.
        """
        if self.error is not None:
            raise self.error
        taken, self.finished = self.finished, []
        return taken


@dataclass
class Sample:
    """One sample of one request."""

    key: str
    """The engine's name for it."""
    call: Call
    request: GenerationRequest
    index: int
    seed: int
    limit: int
    """Most response tokens."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    first_version: int | None = None
    last_version: int | None = None

    def add(self, token_id: int, log_prob: float, version: int) -> None:
        """One more token, and the version of the weights that it was sampled from."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.first_version = version if self.first_version is None else self.first_version
        self.last_version = version

    def finish(self, reason: FinishReason, version: int) -> None:
        """Gives it to its call. `version` counts for a sample without any token."""
        self.call.left -= 1
        self.call.finished.append(
            GenerationOutput(
                request_id=self.request.request_id,
                sample_index=self.index,
                token_ids=np.array(self.token_ids, np.int64),
                log_probs=np.array(self.log_probs, np.float32),
                finish_reason=reason,
                policy_version=version if self.first_version is None else self.first_version,
                last_policy_version=version if self.last_version is None else self.last_version,
            )
        )


@dataclass(frozen=True)
class Abort:
    """One call of `abort`."""

    request_ids: frozenset[str] | None
    """None: all."""
    last_call: int
    """Number of the newest call of `generate` at that time; later ones are not meant."""

    def means(self, sample: Sample) -> bool:
        """Whether it ends this sample."""
        named = self.request_ids is None or sample.request.request_id in self.request_ids
        return named and sample.call.number <= self.last_call


def mixed_seed(*parts: int) -> int:
    """63 bits that depend on every part and on their order; the same on every machine."""
    digest = hashlib.blake2b(b"|".join(b"%d" % part for part in parts), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1
