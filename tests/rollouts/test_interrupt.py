"""Samples that new weights interrupt: nothing is lost, whether an engine keeps them or has to be asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, SamplingParams, VersionRun
from rlsdk.rollouts import Collected, GenerationClient, PackedOutputs
from rlsdk.rollouts.client.partial import joined

LENGTH = 12


class TokenByToken:
    """One token for every sample at each `collect`: its place in the response; may keep what it is asked to stop."""

    name, max_running = "tokens", 64

    def __init__(self, *, keeps_unfinished: bool) -> None:
        self.keeps_unfinished = keeps_unfinished
        self.version = 0
        self.paused = False
        self.samples: dict[tuple[str, int], tuple[GenerationRequest, list[int]]] = {}
        self.ended: list[GenerationOutput] = []
        self.num_decoded = 0
        self.mixed: dict[tuple[str, int], list[int]] = {}

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            for index in range(request.first_sample, request.first_sample + request.n):
                self.samples[request.request_id, index] = (request, [])
                self.mixed[request.request_id, index] = []

    async def collect(self, wait_s: float) -> Collected:
        await asyncio.sleep(0)
        if not self.paused:
            for key, (request, tokens) in list(self.samples.items()):
                tokens.append(len(request.response_ids) + len(tokens))
                self.mixed[key].append(self.version)
                self.num_decoded += 1
                if len(request.response_ids) + len(tokens) == request.sampling.max_tokens:
                    self.end(key, FinishReason.LENGTH)
        found, self.ended = self.ended, []
        return Collected(outputs=PackedOutputs.pack(found), num_decoded=self.num_decoded)

    def end(self, key: tuple[str, int], reason: FinishReason) -> None:
        _, tokens = self.samples.pop(key)
        runs: list[VersionRun] = []
        for version in self.mixed.pop(key) or [self.version]:
            if runs and runs[-1].version == version:
                runs[-1] = VersionRun(version, runs[-1].num_tokens + 1)
            else:
                runs.append(VersionRun(version, 1 if tokens else 0))
        self.ended.append(
            GenerationOutput(
                request_id=key[0],
                sample_index=key[1],
                token_ids=np.array(tokens, np.int64),
                log_probs=-np.array(tokens, np.float32),
                finish_reason=reason,
                versions=tuple(runs),
            )
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        for key in [key for key in self.samples if key[0] in request_ids]:
            self.end(key, FinishReason.ABORT)

    async def pause(self) -> None:
        self.paused = True

    async def resume(self, keep_cache: bool) -> None:
        self.paused = False


async def interrupted(replica: TokenByToken, after: Sequence[int]) -> list[GenerationOutput]:
    """Three samples of each of two requests, stopped after so many turns of the loop, each time for new weights."""
    client = GenerationClient([replica], progress_s=60.0)
    running = asyncio.create_task(client.run())
    sampling = SamplingParams(max_tokens=LENGTH, seed=1)
    futures = [
        future
        for at in range(2)
        for future in client.generate(
            GenerationRequest(request_id=f"r{at}", prompt_ids=(1,), n=3, sampling=sampling), priority=at
        ).values()
    ]
    for turns in after:
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.interrupt()
        before = replica.num_decoded
        await asyncio.sleep(0.01)
        assert replica.num_decoded == before
        replica.version += 1
        await client.resume(keep_cache=False)
    outputs = await asyncio.gather(*futures)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return list(outputs)


@pytest.mark.parametrize("keeps_unfinished", [True, False])
@settings(max_examples=20, deadline=None)
@given(after=st.lists(st.integers(0, 25), max_size=4))
def test_every_token_is_there_once_with_its_version(keeps_unfinished: bool, after: list[int]) -> None:
    outputs = asyncio.run(interrupted(TokenByToken(keeps_unfinished=keeps_unfinished), after))
    assert len(outputs) == 6
    for output in outputs:
        assert output.token_ids.tolist() == list(range(LENGTH))
        assert output.finish_reason is FinishReason.LENGTH
        assert sum(run.num_tokens for run in output.versions) == LENGTH
        versions = [run.version for run in output.versions]
        assert versions == sorted(set(versions))


def output(tokens: int, *runs: tuple[int, int]) -> GenerationOutput:
    return GenerationOutput(
        request_id="r", sample_index=0, token_ids=np.arange(tokens), log_probs=np.zeros(tokens, np.float32),
        finish_reason=FinishReason.STOP, versions=tuple(VersionRun(*run) for run in runs),
    )  # fmt: skip


def test_runs_are_joined_where_versions_are_the_same_and_none_is_empty() -> None:
    assert joined(output(2, (1, 2)), output(3, (1, 1), (2, 2))).versions == (VersionRun(1, 3), VersionRun(2, 2))
    assert joined(output(0, (1, 0)), output(1, (3, 1))).versions == (VersionRun(3, 1),)
    assert joined(output(2, (1, 2)), output(0, (4, 0))).versions == (VersionRun(1, 2),)
    assert joined(output(0, (1, 0)), output(0, (2, 0))).versions == (VersionRun(1, 0),)
