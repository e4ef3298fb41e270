"""Data of the decoder: calls, their requests as jobs, and the table of running rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, PromptLogProbs, VersionRun
from rlsdk.kit.generation.sampling import row_keys

ROW = np.dtype(
    [
        ("job", np.int64),
        ("index", np.int64),  # of the sample
        ("key", np.uint64),  # of its noise
        ("given", np.int64),  # tokens of the prompt, and of the response that there was before
        ("prior", np.int64),  # the latter alone
        ("made", np.int64),  # tokens
        ("limit", np.int64),  # of made
        ("alive", np.bool_),  # a row that is done stays until rows are moved together
        ("text", np.bool_),  # has stop strings
        ("version", np.int64),  # of the weights that sampled the newest token
        ("since", np.int64),  # tokens that were made when that version began
    ]
)
"""Host-side state of a running sample."""


@dataclass(eq=False)
class Call:
    """One `generate` call, which collects its samples."""

    left: int = 0
    """Number of samples that are not finished yet."""
    finished: list[GenerationOutput] = field(default_factory=list)
    error: BaseException | None = None

    def take(self) -> list[GenerationOutput]:
        """Returns samples finished since the last call of `take`; raises the error that ended the call."""
        if self.error is not None:
            raise self.error
        found, self.finished = self.finished, []
        return found


@dataclass(eq=False)
class JobCount:
    """Numbers the jobs of an engine."""

    value: int = 0
    """Jobs so far."""

    def take(self, number: int) -> int:
        """Counts so many jobs; returns the number of the first one."""
        first = self.value
        self.value = first + number
        return first


@dataclass(eq=False)
class Job:
    """One request."""

    call: Call
    request: GenerationRequest
    seed: int
    limit: int
    """Most new tokens of a response."""
    name: int = -1
    """Given by the decoder."""
    started: int = 0
    """Samples that became rows."""
    left: int = 0
    """Samples that are not finished."""
    aborted: bool = False
    prompt_log_probs: PromptLogProbs | None = None
    """Of `text`, once its prompt was run."""
    runs: dict[int, list[VersionRun]] = field(default_factory=dict)
    """By sample index: runs of tokens of versions before the newest."""

    @property
    def given(self) -> int:
        """Number of tokens that every sample starts from."""
        return len(self.request.prompt_ids) + len(self.request.response_ids)

    @property
    def text(self) -> tuple[int, ...]:
        """Tokens that every sample starts from."""
        return (*self.request.prompt_ids, *self.request.response_ids)

    @property
    def pending(self) -> int:
        """Samples that are not rows yet."""
        return self.request.n - self.started

    def finish(
        self,
        index: int,
        token_ids: NDArray[np.int64],
        log_probs: NDArray[np.float32],
        reason: FinishReason,
        newest: VersionRun,
    ) -> None:
        """Puts a sample into the call. `newest` is the last run of its versions."""
        self.left -= 1
        self.call.left -= 1
        self.call.finished.append(
            GenerationOutput(
                request_id=self.request.request_id,
                sample_index=index,
                token_ids=token_ids,
                log_probs=log_probs,
                finish_reason=reason,
                versions=(*self.runs.pop(index, ()), newest),
                prompt_log_probs=self.prompt_log_probs,
            )
        )


def new_rows(jobs: Sequence[Job], counts: Sequence[int], version: int) -> NDArray[np.void]:
    """Table rows for the next `counts` samples of each job."""
    rows = np.array(
        [
            (
                *(job.name, job.request.first_sample + job.started, job.seed % 2**64),
                *(job.given, len(job.request.response_ids), 0, job.limit),
                *(True, bool(job.request.sampling.stop_strings), version, 0),
            )
            for job in jobs
        ],
        ROW,
    )
    rows = np.repeat(rows, counts)
    ends = np.cumsum(counts)
    rows["index"] += np.arange(len(rows)) - np.repeat(ends - counts, counts)
    rows["key"] = row_keys(rows["key"], rows["index"])
    for job, count in zip(jobs, counts, strict=True):
        job.started += count
    return rows


@dataclass
class Prefilled:
    """Prompts that were run, kept until all their samples are rows."""

    jobs: list[Job]
    logits: Tensor
    """`[P, V]` after each prompt."""
    states: Any
    """Of `Rows.prefill`."""

    def counts(self, free: int) -> list[int]:
        """How many samples of each job become rows now."""
        counts = []
        for job in self.jobs:
            counts.append(min(job.pending, free))
            free -= counts[-1]
        return counts
