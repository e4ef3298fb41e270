"""The stream: groups in, groups out; samples are graded as they come, and a rollouter's fault costs its own sample."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeReplica, LengthGrader, LetterCodec, output_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.data import Prompt
from rlsdk.interfaces import (
    BatchError,
    Ended,
    Episode,
    FinishReason,
    Generate,
    GenerationRequest,
    PromptView,
    Receipt,
    SamplingParams,
    Span,
    ToolUse,
    Trajectory,
    Turn,
    UnsupportedCapabilityError,
    WorkerError,
)
from rlsdk.rollouts import (
    Collected,
    Group,
    GroupId,
    GroupTask,
    PackedOutputs,
    RolloutStream,
    Sample,
    StreamOptions,
    make_batch,
    request_seed,
    single_turn,
)
from rlsdk.trainer.generation.sampler import Draw, sample_all
from rlsdk.trainer.tracking.stopping import EvaluationStoppedError

SAMPLING = SamplingParams(max_tokens=6)


def task(at: int, n: int = 3) -> GroupTask:
    return GroupTask(
        id=GroupId(source="train", epoch=0, index=at),
        ordinal=at,
        prompt=PromptView(prompt_ids=(at + 1, 7), text=f"prompt {at}", answer=None, row={}),
        num_samples=n,
        sampling=SAMPLING,
        seed=(0, "train", 0, at),
    )


def run(tasks: Sequence[GroupTask], rollout: Any = single_turn, **more: Any) -> list[Group]:
    """Groups by ordinal."""
    replicas = more.pop("replicas", None) or [FakeReplica(), FakeReplica(delay=3)]
    stream = RolloutStream(
        replicas, LetterCodec(), StreamOptions(rollout=rollout, max_model_tokens=40), grader=more.pop("grader", None)
    )
    try:
        stream.start(tasks)
        return sorted((stream.take(10) for _ in tasks), key=lambda group: group.task.ordinal)
    finally:
        stream.close()


@settings(max_examples=20)
@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_a_batch_holds_every_sample_in_order_with_its_own_prompt(counts: list[int]) -> None:
    groups = run([task(at, n) for at, n in enumerate(counts)], grader=LengthGrader())
    batch = make_batch(groups, temperature=0.5).validate()
    assert batch["uid"].tolist() == [at for at, n in enumerate(counts) for _ in range(n)]
    assert batch.temperature == 0.5
    row = 0
    for at, n in enumerate(counts):
        request = GenerationRequest(
            request_id="", prompt_ids=(at + 1, 7),
            sampling=SamplingParams(max_tokens=6, seed=request_seed(0, "train", 0, at)),
        )  # fmt: skip
        for index in range(n):
            response = tokens_of(request, index)
            one = batch.select([row])
            assert one["input_ids"].tolist() == [at + 1, 7, *response]
            assert one["response_mask"].tolist() == [False] * 2 + [True] * len(response)
            assert one["rollout_log_probs"].tolist() == [0.0] * 2 + [-float(t) for t in response]
            assert one["token_versions"].tolist() == [-1] * 2 + [0] * len(response)
            assert one["truncated"].item() == (len(response) == 6)
            assert one["scores"].item() == len(response)
            row += 1


def test_the_samples_of_a_group_are_one_request() -> None:
    replica = FakeReplica()
    run([task(0, 8), task(1, 5)], replicas=[replica])
    assert [(r.n, r.first_sample) for r in replica.requests] == [(8, 0), (5, 0)]


def test_samples_are_graded_as_they_come_and_not_after_the_last() -> None:
    grader = LengthGrader()
    run([task(at) for at in range(5)], replicas=[FakeReplica()], grader=grader)
    assert sum(grader.calls) == 15
    assert max(grader.calls) == 1  # the replica finishes one at a time


class Full:
    """A record on a full disk."""

    def __init__(self) -> None:
        self.noted = 0

    def sample(self, task: GroupTask, name: str, index: int, sample: Sample) -> None:
        self.noted += 1

    def turn(self, task: GroupTask, name: str, index: int, key: str, turn: Turn) -> None:
        pass

    def tool(self, task: GroupTask, name: str, index: int, call: int, use: ToolUse) -> None:
        pass

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_record_on_a_full_disk_ends_the_rollout() -> None:
    record = Full()
    stream = RolloutStream([FakeReplica()], LetterCodec(), StreamOptions(rollout=single_turn, max_model_tokens=40))
    stream.start([task(0, 5)], record=record)
    try:
        with pytest.raises(OSError, match="No space left"):
            stream.take(10)
    finally:
        stream.close()
    assert record.noted >= 1


async def two_turns(prompt: PromptView, generate: Generate) -> Trajectory:
    """Answers, hears a word, answers again: as a tool would be used."""
    first = await generate(prompt.prompt_ids)
    spans = [Span.given(prompt.prompt_ids), first.span, Span.given(generate.encode("ok"))]
    ids = [int(token) for span in spans for token in span.token_ids]
    second = await generate(ids, max_tokens=3)
    return Trajectory(spans=(*spans, second.span), finish_reason=second.finish_reason, info={"turns": 2.0})


def test_tool_tokens_are_in_the_batch_and_off_the_mask_with_exact_ids_from_turn_to_turn() -> None:
    replica = FakeReplica()
    groups = run([task(0, 4)], two_turns, replicas=[replica])
    batch = make_batch(groups, temperature=1.0).validate()
    by_sample = {r.first_sample: r for r in replica.requests if len(r.prompt_ids) > 2}
    for row, sample in enumerate(groups[0].samples):
        (trajectory,) = sample.rows
        prompt, first, tool, second = trajectory.spans
        one = batch.select([row])
        expected = np.concatenate([prompt.token_ids, first.token_ids, tool.token_ids, second.token_ids])
        assert one["input_ids"].tolist() == expected.tolist()
        mask = [False] * 2 + [True] * len(first) + [False] * 2 + [True] * len(second)
        assert one["response_mask"].tolist() == mask
        assert one["rollout_log_probs"][~one["response_mask"]].tolist() == [0.0] * 4
        # What the engine saw in the second turn are the very ids of the first.
        assert by_sample[row].prompt_ids == tuple(expected[: len(expected) - len(second)].tolist())
        assert by_sample[row].sampling.max_tokens == 3
    assert len({r.sampling.seed for r in replica.requests}) == 2  # one for each turn; samples differ by their index


async def fails_on_odd(prompt: PromptView, generate: Generate) -> Trajectory:
    if prompt.prompt_ids[0] % 2:
        raise ValueError("odd")
    return await single_turn(prompt, generate)


def test_a_rollouter_that_raises_costs_its_own_samples() -> None:
    groups = run([task(0), task(1)], fails_on_odd, grader=LengthGrader())
    assert [not sample.rows for group in groups for sample in group.samples] == [True] * 3 + [False] * 3
    failure = groups[0].samples[0].grade.failures[0]
    assert (failure.kind, failure.source, failure.message) == ("exception", "rollout", "ValueError: odd")
    assert not groups[0].samples[0].grade.valid
    assert make_batch(groups, temperature=1.0).num_rows == 3


class Endless(FakeReplica):
    """Decodes until it is told to stop."""

    async def collect(self, wait_s: float) -> Collected:
        await asyncio.sleep(0.01)
        self.done += 1
        told = [(request, at) for request, at in self.waiting if request.request_id in self.aborted]
        self.waiting = [(request, at) for request, at in self.waiting if request.request_id not in self.aborted]
        ended = [replace(output_of(request, at), finish_reason=FinishReason.ABORT) for request, at in told]
        return Collected(outputs=PackedOutputs.pack(ended), num_decoded=self.done)


async def by_notes(prompt: PromptView, generate: Generate) -> Episode:
    """Two rows: the second one does not see the first turn. It brings a score, and one for each turn."""
    rows = []
    for turn in range(2):
        given = Span.given([*prompt.prompt_ids, turn])
        made = await generate(given.token_ids.tolist())
        rows.append(Trajectory(spans=(given, made.span), finish_reason=made.finish_reason))
    tokens = np.concatenate([np.full(len(row.response_ids), at + 1.0) for at, row in enumerate(rows)])
    return Episode(rows=tuple(rows), ended=Ended.TURNS, reward=0.5, token_rewards=tokens, info={"notes": 2.0})


@pytest.mark.parametrize("grader", [None, LengthGrader()])
def test_an_episode_of_two_rows_is_one_sample_with_its_own_score(grader: LengthGrader | None) -> None:
    groups = run([task(0)], by_notes, grader=grader)
    batch = make_batch(groups, temperature=1.0).validate()
    assert batch["sample"].tolist() == [0, 0, 1, 1, 2, 2]
    samples = groups[0].samples
    own = [0.5 if grader is None else 0.5 + len(sample.text) for sample in samples]
    assert batch["scores"].tolist() == [score for score in own for _ in range(2)]
    assert all(sample.grade.terms["environment"] == 0.5 and sample.truncated for sample in samples)
    assert [sample.info for sample in samples] == [{"notes": 2.0}] * 3
    given = torch.tensor([1.0, 2.0] * 3)[batch.row_of_token]
    assert torch.equal(batch["token_scores"].float(), torch.where(batch["response_mask"], given, 0.0))


async def nothing(prompt: PromptView, generate: Generate) -> Any:
    return {"rows": []}


def test_what_is_no_episode_costs_its_sample_and_names_what_is_expected() -> None:
    (group,) = run([task(0, 1)], nothing)
    assert group.samples[0].grade.failures[0].message == (
        "TypeError: the rollouter returned dict; expected a Trajectory or an Episode"
    )


row = Trajectory(spans=(Span.given([1]), Span.given([2])), finish_reason=FinishReason.STOP)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": ()}, "an episode without rows"),
        ({"chains": (0, 1)}, "2 chains for 1 rows"),
        ({"scales": (0.0,)}, r"scales \[0.0\]; expected finite numbers above 0"),
        ({"chains": (-1,)}, "expected numbers from 0"),
        ({"reward": float("nan")}, "reward nan; expected a finite number"),
        ({"chain_rewards": {1: 0.5}}, r"chain_rewards of chain 1; its rows have the chains \[0\]"),
        ({"chain_rewards": {0: float("inf")}}, r"chain_rewards\[0\] is inf; expected a finite number"),
        ({"token_rewards": np.zeros(3)}, "3 token_rewards for 1 tokens"),
        ({"receipt": Receipt(sampled=4, trained=4)}, "receipt has 4 trained tokens, its rows 0"),
    ],
)
def test_an_episode_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Episode(**{"rows": (row,), **wrong})


def test_a_receipt_accounts_for_every_sampled_token() -> None:
    with pytest.raises(BatchError, match="7 sampled tokens accounts for 6: 4 trained"):
        Receipt(sampled=7, trained=4, not_trained={"abandoned": 2})


async def by_turns(prompt: PromptView, generate: Generate, **options: Any) -> Trajectory:
    """As `single_turn`, as a coroutine of its own for each sample."""
    return await single_turn(prompt, generate)


@pytest.mark.parametrize("rollout", [single_turn, by_turns])
def test_groups_of_one_source_are_given_up_and_the_others_go_on(rollout: Any) -> None:
    """With a place for four samples, most of what is given up is still in the queue."""
    replica = Endless()
    asked = [replace(task(at), id=GroupId(source="eval/x", epoch=0, index=at)) for at in range(9)]
    more = replace(task(9), id=GroupId(source="eval/xy", epoch=0, index=0))
    stream = RolloutStream([replica, Endless()], LetterCodec(), StreamOptions(rollout=rollout, max_model_tokens=40))
    try:
        stream.start([*asked, more])
        while not replica.waiting:
            time.sleep(0.01)
        assert stream.cancel("eval/x", 60.0), "none of them would ever end"
        assert {request.request_id.partition("/0/")[0] for request, _ in replica.waiting} <= {"eval/xy"}
        assert replica.aborted
        assert stream.poll(0.1) is None
        assert stream.cancel("eval/xy", 60.0)
        stream.start([task(1)])
        while not any(one.request_id.startswith("train") for one in replica.requests):
            time.sleep(0.01)  # a place is free again
    finally:
        stream.close()


class Deaf(FakeReplica):
    """Cannot end a sample early: after a second of decoding it has them all."""

    began: float | None = None

    async def abort(self, request_ids: Sequence[str]) -> None:
        raise UnsupportedCapabilityError("abort is not claimed")

    async def collect(self, wait_s: float) -> Collected:
        await asyncio.sleep(0.01)
        self.done += 1
        if self.waiting and self.began is None:
            self.began = time.monotonic()
        if self.began is None or time.monotonic() - self.began < 1.0:
            return Collected(outputs=PackedOutputs.pack([]), num_decoded=self.done)
        return await super().collect(wait_s)


def test_an_evaluation_that_is_stopped_ends_when_no_replica_works_on_it_any_more() -> None:
    """A colocated replica that still decoded could not make room for saving the step."""
    replica = Deaf()
    stream = RolloutStream([replica], LetterCodec(), StreamOptions(rollout=single_turn, max_model_tokens=40))
    draw = Draw(source="eval/x", num_samples=1, sampling=SamplingParams(max_tokens=4))
    prompts = [Prompt(index=at, prompt_ids=(97, 98), text="ab", answer="", row={}, source="x") for at in range(2)]
    looks = iter([False, False])
    try:
        with pytest.raises(EvaluationStoppedError, match="0 of 2 prompts"):
            sample_all(stream, prompts, draw, seed=(), stop=lambda: next(looks, True))
        assert replica.began is not None
        assert time.monotonic() - replica.began >= 1.0
        assert not replica.waiting
    finally:
        stream.close()


def test_a_trajectory_begins_with_its_prompt() -> None:
    with pytest.raises(BatchError, match="begins with a span that was given"):
        Trajectory(spans=(), finish_reason=None)  # type: ignore[arg-type]


def test_a_dead_cluster_is_an_error_of_take_and_close_ends_what_is_under_way() -> None:
    stream = RolloutStream(
        [FakeReplica(dies_after=0)], LetterCodec(), StreamOptions(rollout=single_turn, max_model_tokens=40)
    )
    stream.start([task(0)])
    with pytest.raises(WorkerError, match="is gone"):
        stream.take(10)
    stream.close()
    slow = FakeReplica(delay=10**6)
    stream = RolloutStream([slow], LetterCodec(), StreamOptions(rollout=single_turn, max_model_tokens=40))
    stream.start([task(0)])
    while not slow.requests:
        pass
    stream.close()
    assert slow.aborted
