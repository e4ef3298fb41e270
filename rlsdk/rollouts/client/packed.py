"""Wire format of finished samples: one array per field, for any number of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import FinishReason, GenerationOutput, PromptLogProbs, VersionRun

_REASONS = tuple(FinishReason)


@dataclass(frozen=True, kw_only=True)
class PackedOutputs:
    """`S` samples of any requests; sample k has tokens `[ends[k] - lengths[k], ends[k])`."""

    request_ids: tuple[str, ...]
    """Request id of each sample."""
    sample_index: NDArray[np.int64]
    """`[S]`."""
    lengths: NDArray[np.int64]
    """`[S]`: number of new response tokens."""
    token_ids: NDArray[np.int64]
    """Flat, sample after sample."""
    log_probs: NDArray[np.float32]
    """Flat."""
    reasons: NDArray[np.int8]
    """`[S]`: position of the finish reason in `FinishReason`."""
    runs: NDArray[np.int64]
    """`[S]`: number of version runs of each sample."""
    run_versions: NDArray[np.int64]
    """Flat, run after run."""
    run_lengths: NDArray[np.int64]
    """Flat: number of tokens of each run."""
    prompts: tuple[PromptLogProbs | None, ...] = ()
    """Of each sample, what it says of the tokens that it started from; empty: nothing of any."""

    @classmethod
    def pack(cls, outputs: Sequence[GenerationOutput]) -> PackedOutputs:
        runs = [run for output in outputs for run in output.versions]
        prompts = tuple(output.prompt_log_probs for output in outputs)
        return cls(
            request_ids=tuple(output.request_id for output in outputs),
            sample_index=np.array([output.sample_index for output in outputs], np.int64),
            lengths=np.array([len(output.token_ids) for output in outputs], np.int64),
            token_ids=np.concatenate([np.empty(0, np.int64), *(output.token_ids for output in outputs)]),
            log_probs=np.concatenate([np.empty(0, np.float32), *(output.log_probs for output in outputs)]),
            reasons=np.array([_REASONS.index(output.finish_reason) for output in outputs], np.int8),
            runs=np.array([len(output.versions) for output in outputs], np.int64),
            run_versions=np.array([run.version for run in runs], np.int64),
            run_lengths=np.array([run.num_tokens for run in runs], np.int64),
            prompts=prompts if any(prompt is not None for prompt in prompts) else (),
        )

    def __len__(self) -> int:
        return len(self.request_ids)

    def unpack(self) -> Iterator[GenerationOutput]:
        """Yields each sample; its arrays are views of these."""
        token_ends = [0, *np.cumsum(self.lengths).tolist()]
        run_ends = [0, *np.cumsum(self.runs).tolist()]
        runs = [
            VersionRun(version=version, num_tokens=count)
            for version, count in zip(self.run_versions.tolist(), self.run_lengths.tolist(), strict=True)
        ]
        rows = zip(
            self.request_ids,
            self.sample_index.tolist(),
            pairwise(token_ends),
            pairwise(run_ends),
            self.reasons.tolist(),
            self.prompts or (None,) * len(self),
            strict=True,
        )
        for request_id, index, (start, end), (first_run, last_run), reason, prompt in rows:
            yield GenerationOutput(
                request_id=request_id,
                sample_index=index,
                token_ids=self.token_ids[start:end],
                log_probs=self.log_probs[start:end],
                finish_reason=_REASONS[reason],
                versions=tuple(runs[first_run:last_run]),
                prompt_log_probs=prompt,
            )
