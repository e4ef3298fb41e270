"""Helpers for the samples that a call returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlsdk.interfaces import (
    GenerationOutput,
    GenerationRequest,
)

if TYPE_CHECKING:
    pass


def sample_indices(request: GenerationRequest) -> range:
    """Indices of the samples that a request asks for."""
    return range(request.first_sample, request.first_sample + request.n)


def tokens_of(outputs: Sequence[GenerationOutput]) -> dict[tuple[str, int], list[int]]:
    """Request and sample index -> tokens."""
    return {(o.request_id, o.sample_index): o.token_ids.tolist() for o in outputs}


def wrong_identities(requests: Sequence[GenerationRequest], outputs: Sequence[GenerationOutput]) -> list[str]:
    """Samples that are missing, repeated, or were not requested."""
    wanted = [(request.request_id, index) for request in requests for index in sample_indices(request)]
    came = [(output.request_id, output.sample_index) for output in outputs]
    faults = [f"{key} is missing" for key in wanted if key not in came]
    faults += [f"{key} came {came.count(key)} times" for key in dict.fromkeys(came) if came.count(key) > 1]
    return faults + [f"{key} was not asked for" for key in dict.fromkeys(came) if key not in wanted]
