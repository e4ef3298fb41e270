"""Whichever replicas die, and when: every sample is made once and is its own; an error comes only when all replicas are
gone, or when one request was lost as often as it may be."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import FUZZ
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "rollouts"))
from fakes import FakeReplica, tokens_of

from rlsdk.interfaces import GenerationOutput, GenerationRequest, SamplingParams, WorkerError
from rlsdk.rollouts import GenerationClient

REPLICA = st.tuples(st.integers(1, 6), st.integers(1, 5), st.none() | st.integers(0, 25))
"""(slots, turns per sample, samples after which it dies)."""
MAX_ATTEMPTS = 3


async def make(
    replicas: list[FakeReplica], requests: list[GenerationRequest]
) -> dict[tuple[str, int], GenerationOutput]:
    client = GenerationClient(replicas, progress_s=30.0, max_attempts=MAX_ATTEMPTS)
    running = asyncio.create_task(client.run())
    try:
        futures = {r.request_id: client.generate(r, priority=int(r.request_id)) for r in requests}
        return {(name, index): await future for name, found in futures.items() for index, future in found.items()}
    finally:
        running.cancel()


@FUZZ
@given(kinds=st.lists(REPLICA, min_size=1, max_size=6), counts=st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_replicas_that_die_in_any_order(
    tried: Callable[[str], None], kinds: list[tuple[int, int, int | None]], counts: list[int]
) -> None:
    tried("runs of requests with replicas that die")
    replicas = [
        FakeReplica(str(at), max_running=slots, delay=delay, dies_after=dies)
        for at, (slots, delay, dies) in enumerate(kinds)
    ]
    requests = [
        GenerationRequest(request_id=str(at), prompt_ids=(at + 1,), sampling=SamplingParams(max_tokens=8, seed=at), n=n)
        for at, n in enumerate(counts)
    ]
    num_mortal = sum(dies is not None for _, _, dies in kinds)
    try:
        found = asyncio.run(asyncio.wait_for(make(replicas, requests), 60))
    except WorkerError:
        assert num_mortal >= min(MAX_ATTEMPTS, len(replicas))
        return
    assert {key: output.token_ids.tolist() for key, output in found.items()} == {
        (str(at), index): tokens_of(requests[at], index) for at, n in enumerate(counts) for index in range(n)
    }
