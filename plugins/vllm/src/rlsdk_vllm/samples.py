"""Running samples, and the calls of `generate` that wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlsdk.interfaces import FinishReason, GenerationOutput
from rlsdk.kit.generation.serving import RunningSample

SEED_ARGUMENT = "rlsdk_seed"
"""Name of the extra argument with a sample's seed for the sampler."""
MIN_P_ARGUMENT = "rlsdk_min_p"
"""Name of the extra argument with `min_p`: vLLM itself would apply it before top-k and top-p."""
PRIOR_ARGUMENT = "rlsdk_prior"
"""Name of the extra argument with the number of given response tokens, which are part of the prompt for vLLM."""


@dataclass
class Call:
    """One call of `generate`."""

    number: int = 0
    """Number of the call, counting from 1."""
    left: int = 0
    """Number of samples that are still running."""
    finished: list[GenerationOutput] = field(default_factory=list)
    error: BaseException | None = None

    def take(self) -> list[GenerationOutput]:
        """Samples that finished since the last call.

        Raises:
            Exception: the error that ended the engine.
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
        """Passes the finished sample to its call. `version` is used for a sample without tokens."""
        self.call.left -= 1
        self.call.finished.append(self.output(reason, version))


@dataclass(frozen=True)
class Abort:
    """One call of `abort`."""

    request_ids: frozenset[str] | None
    """None: all."""
    last_call: int
    """Number of the newest call of `generate` when `abort` was called; later calls are not affected."""

    def means(self, sample: Sample) -> bool:
        """Whether this abort ends the sample."""
        named = self.request_ids is None or sample.request.request_id in self.request_ids
        return named and sample.call.number <= self.last_call
