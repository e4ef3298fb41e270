"""Samples that run, and the calls of `generate` that wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlsdk.interfaces import FinishReason, GenerationOutput
from rlsdk.kit.serving import RunningSample

SEED_ARGUMENT = "rlsdk_seed"
"""Under this name a sample's seed goes with it to the sampler."""
PRIOR_ARGUMENT = "rlsdk_prior"
"""And the tokens that its response has already: to vLLM they are part of the prompt."""


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


@dataclass(kw_only=True)
class Sample(RunningSample):
    """One sample of one request."""

    call: Call

    def finish(self, reason: FinishReason, version: int) -> None:
        """Gives it to its call. `version` counts for a sample without any token."""
        self.call.left -= 1
        self.call.finished.append(self.output(reason, version))


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
