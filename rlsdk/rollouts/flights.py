"""Requests on their way to replicas: what each still has to bring, and how it is issued again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from rlsdk.interfaces import GenerationOutput, GenerationRequest, RlsdkError, WorkerError


@dataclass(eq=False)
class Flight:
    """A request on its way."""

    request: GenerationRequest
    priority: int
    samples: dict[int, asyncio.Future[GenerationOutput]]
    """By sample index; those that are not finished."""
    replica: int | None = None
    attempts: int = 0
    begun: dict[int, GenerationOutput] = field(default_factory=dict)
    """By sample index: what it had before it was interrupted, which its request repeats as `response_ids`."""

    @property
    def tokens(self) -> int:
        """Upper bound of what it may still cost."""
        request = self.request
        return len(request.prompt_ids) + len(self.samples) * (request.sampling.max_tokens - len(request.response_ids))


def reissued(flight: Flight) -> list[Flight]:
    """New requests, under new names, for each run of neighbouring samples that are still missing."""
    runs: list[list[int]] = []
    for index in sorted(flight.samples):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    name = flight.request.request_id.partition("~")[0]
    return [
        Flight(
            replace(flight.request, request_id=f"{name}~{flight.attempts}.{run[0]}", first_sample=run[0], n=len(run)),
            flight.priority,
            {index: flight.samples[index] for index in run},
            attempts=flight.attempts,
            begun=flight.begun,
        )
        for run in runs
    ]


def fail(flight: Flight, error: BaseException) -> None:
    """What is not one of rlsdk's errors is made one: it must not pass for a fault of the rollouter that waits."""
    shown = error if isinstance(error, RlsdkError) else WorkerError(f"{type(error).__name__}: {error}")
    for future in flight.samples.values():
        if not future.done():
            future.set_exception(shown)
            future.exception()  # seen: of a group that fails, one error is enough
