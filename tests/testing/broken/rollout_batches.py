"""Rollout engines whose samples depend on, or are mixed up with, others in the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from broken.defect import defect
from broken.rollout_base import Drawing, Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest
from rlsdk.kit.generation.sampling import RowSampling
from rlsdk.reference.running import Running


@defect({"samples": "came 2 times"})
class OneSampleTwice(Rewritten):
    """For a request of five samples, the first is returned twice and the last is missing."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, sample_index=0) if request.n == 5 and output.sample_index == 4 else output


@defect({"batch_invariance.kinds": "left out by the filters"})
class TopKOfBatch(Drawing):
    """Every row gets the largest top-k of its batch."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return super().weights(logits, replace(sampling, top_k=sampling.top_k.amax().expand(len(logits))))


@defect({"batch_invariance.minority": "most are greedy"})
class MajorityIsGreedy(Patched):
    """If most rows of a step are greedy, all of them take the most probable token."""

    class RunningPart(Running):
        def _sampling_of(self, rows):
            found = super()._sampling_of(rows)
            most = 2 * found.num_greedy > len(rows) > 1
            return replace(found, greedy=torch.ones_like(found.greedy)) if most else found


@defect({"batch_invariance.kinds": "int16"})
class NarrowIds(Rewritten):
    """Token ids are 16-bit integers."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, token_ids=output.token_ids.astype(np.int16))
