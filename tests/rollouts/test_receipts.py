"""Every trained token was sampled by an engine, once; what was not trained has a reason; the sums are checked."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeReplica, LetterCodec
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stream import run, task, two_turns

from rlsdk.interfaces import BatchError, Episode, FinishReason, Generate, PromptView, Receipt, Span, VersionRun
from rlsdk.interfaces import Trajectory as Row
from rlsdk.rollouts import Grade, Group, RolloutStream, Sample, StreamOptions, make_batch
from rlsdk.rollouts.groups.receipts import ReceiptError, TurnAccount, check_receipts, step_account, token_account
from rlsdk.rollouts.journal.inspection import inspect_journal, recorded_sample
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.playing import DivergedError, ReplayedGenerate, difference, recorded_episodes
from rlsdk.rollouts.journal.segments import segments
from rlsdk.trainer.generation.history import History
from rlsdk.views.inspection import one_episode, one_step, whole_run


def sampled(draw: np.random.Generator, length: int) -> Span:
    cut = int(draw.integers(0, length + 1))
    return Span(
        token_ids=draw.integers(0, 3, length),  # few, so that spans are equal
        log_probs=-draw.integers(0, 2, length).astype(np.float32),
        versions=(VersionRun(1, cut), VersionRun(2, length - cut)),
    )


def part_of(span: Span, start: int, end: int) -> Span:
    versions = np.repeat([run.version for run in span.versions], [run.num_tokens for run in span.versions])[start:end]
    assert span.log_probs is not None
    return Span(
        token_ids=span.token_ids[start:end].copy(),
        log_probs=span.log_probs[start:end].copy(),
        versions=tuple(VersionRun(int(version), 1) for version in versions),
    )


def row(*spans: Span) -> Row:
    return Row(spans=(Span.given([1]), *spans), finish_reason=FinishReason.STOP)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_whatever_a_rollouter_keeps_the_sums_hold(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    account, turns = TurnAccount(), [sampled(draw, length) for length in lengths]
    for turn in turns:
        account.add(turn)
    cuts = [sorted(draw.integers(0, len(turn) + 1, 2).tolist()) for turn in turns]
    rows = tuple(row(part_of(turn, *cut)) for turn, cut in zip(turns, cuts, strict=True))
    episode = account.checked(Episode(rows=rows))
    trained, total = sum(one.num_sampled for one in rows), sum(lengths)
    assert token_account([Sample(episode=episode, text="", grade=Grade())]) == {
        "sampled": total, "trained": trained, **({"dropped": total - trained} if total > trained else {}),
    }  # fmt: skip
    if trained < total:
        assert episode.receipt is not None
        assert episode.receipt.digests == tuple(one.digest for one in rows)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_no_token_is_trained_twice(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    account, turns = TurnAccount(), [sampled(draw, length) for length in lengths]
    for turn in turns:
        account.add(turn)
    assert account.checked(Episode(rows=(row(*turns),))).receipt is None
    for turn in turns:
        start = int(draw.integers(0, len(turn)))
        with pytest.raises(ReceiptError, match="or were in a row before"):
            account.checked(Episode(rows=(row(part_of(turn, start, start + 1)),)))


@pytest.mark.parametrize(
    "change",
    [
        lambda span: replace(span, token_ids=span.token_ids + 1),
        lambda span: replace(span, log_probs=np.nextafter(span.log_probs, np.float32(1))),
        lambda span: replace(span, versions=(VersionRun(9, len(span)),)),
    ],
)
def test_ids_log_probs_and_versions_are_those_of_the_engine(change: Any) -> None:
    async def careless(prompt: PromptView, generate: Generate) -> Row:
        made = await two_turns(prompt, generate)
        return replace(made, spans=(*made.spans[:-1], change(made.spans[-1])))

    (group,) = run([task(0, 4)], careless)
    refused = [sample for sample in group.samples if not sample.rows]
    assert refused, "some have tokens in their last turn"
    for sample in refused:
        (failure,) = sample.grade.failures
        assert failure.kind == "receipt"
        assert "unchanged" in failure.message
    lost = sum(sample.lost_tokens for sample in group.samples)
    counts = token_account(group.samples)
    assert counts["failed"] == lost == counts["sampled"] - counts["trained"]


def test_a_turn_that_nobody_waited_for_is_counted() -> None:
    async def given_up(prompt: PromptView, generate: Generate) -> Episode:
        made = await two_turns(prompt, generate)
        await generate([*prompt.prompt_ids, 5])
        return Episode(rows=(made,), receipt=Receipt(sampled=made.num_sampled, trained=made.num_sampled))

    (group,) = run([task(0, 3)], given_up)
    counts = token_account(group.samples)
    assert counts["sampled"] == counts["trained"] + counts["unanswered"]
    assert counts["unanswered"] > 0


def test_a_step_refuses_rows_that_are_not_those_of_their_receipts() -> None:
    groups = run([task(0, 3), task(1, 2)], two_turns)
    batch = make_batch(groups, temperature=1.0)
    check_receipts(groups, batch)
    first = groups[0].samples[1]
    assert first.episode is not None
    digests = tuple(one.digest for one in first.rows)
    receipt = Receipt(sampled=first.num_sampled, trained=first.num_sampled, digests=digests)
    other = replace(first.rows[0], spans=(Span.given([3, 3]), *first.rows[0].spans[1:]))

    def with_rows(*rows: Row) -> list[Group]:
        assert first.episode is not None
        sample = replace(first, episode=replace(first.episode, rows=rows, receipt=receipt))
        return [replace(groups[0], samples=[groups[0].samples[0], sample, groups[0].samples[2]]), groups[1]]

    check_receipts(with_rows(*first.rows), batch)
    with pytest.raises(BatchError, match=r"sample 1 of group 0 is not trained on: rows \[1\] are not those"):
        check_receipts(with_rows(other), batch)
    with pytest.raises(BatchError, match="sampled tokens, of which 0 have no known version"):
        check_receipts(groups[:1], batch)
    mask = batch["response_mask"]
    for name, value in (("token_versions", -1), ("rollout_log_probs", float("nan"))):
        spoilt = batch.with_tokens(**{name: batch[name].clone().masked_fill_(mask, value)})
        with pytest.raises(BatchError, match=f"of which {int(mask.sum())} have no known version"):
            check_receipts(groups, spoilt)


def journal_of(folder: Path, groups: list[Group], steps: list[list[int]], *, tokens: Any = None) -> None:
    """A journal of these samples, of which each step trained on some groups; `tokens`: what its line says instead."""
    history = History(folder, keep="all")
    history.begin(0)
    by_number = {group.task.ordinal: group for group in groups}
    journal = history.record
    assert isinstance(journal, Journal)
    for group in groups:
        for index, sample in enumerate(group.samples):
            journal.sample(group.task, "", index, sample)
    for step, trained in enumerate(steps, 1):
        if tokens is None:
            history.updated(step, [by_number[at] for at in trained], [], {})
        else:
            journal.write("update", step=step, groups=trained, rejected=[], tokens=tokens, figures={})
    history.close()


@pytest.mark.parametrize("keeps_receipt", [False, True])
def test_turns_of_a_killed_process_that_are_not_asked_for_again_are_counted(keeps_receipt: bool) -> None:
    (group,) = run([task(0, 1)], two_turns)
    (row,) = group.samples[0].rows
    account, count = TurnAccount(num_unasked=4), row.num_sampled
    for span in row.spans:
        if span.sampled:
            account.add(span)
    own = Receipt(sampled=count, trained=count) if keeps_receipt else None
    found = account.checked(replace(Episode.of(row), receipt=own)).receipt
    assert found is not None
    assert (found.sampled, found.trained, found.not_trained) == (count + 4, count, {"diverged": 4})


async def asks(prompt: PromptView, generate: Generate, *, word: str = "ok", turns: int = 2) -> Row:
    """Turns, with a word of a tool between them."""
    spans = [Span.given(prompt.prompt_ids)]
    for at in range(turns):
        spans += [Span.given(generate.encode(word))] if at else []
        turn = await generate([int(token) for span in spans for token in span.token_ids], max_tokens=3)
        spans.append(turn.span)
    return Row(spans=tuple(spans), finish_reason=turn.finish_reason)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"word": "on"}, r"turn 2: expected 'k', came 'n', after \d equal tokens"),
        ({"turns": 1}, r"expected turns of \d more tokens, came the end of the episode"),
        ({"turns": 3}, r"turn 3: expected the end of the episode, came '.*'"),
    ],
)
def test_an_episode_that_is_played_again_names_where_it_departs(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    history = History(tmp_path, keep="all")
    history.begin(0)
    one = task(0, 2)
    stream = RolloutStream([FakeReplica()], LetterCodec(), StreamOptions(rollout=asks, max_model_tokens=40))
    stream.start([one], record=history.record)
    group = stream.take(10)
    stream.close()
    history.close()
    recorded = recorded_episodes(tmp_path)
    assert [(each.group, each.index) for each in recorded] == [(0, 0), (0, 1)]
    for each, sample in zip(recorded, group.samples, strict=True):
        assert [row.digest for row in each.sample(one.prompt.prompt_ids).rows] == [row.digest for row in sample.rows]
        generate = ReplayedGenerate(one, LetterCodec(), 40, each, sample)
        try:
            found = difference(sample, Episode.of(asyncio.run(asks(one.prompt, generate, **changed))), generate)
        except DivergedError as error:
            found = str(error)
        assert re.fullmatch(problem, found), found


def test_a_journal_is_verified_and_shown(tmp_path: Path) -> None:
    groups = run([task(at, 3) for at in range(3)], two_turns)
    journal_of(tmp_path, groups, [[0], [1]])
    found = inspect_journal(tmp_path)
    assert found.is_sound
    assert [dict(step.tokens) for step in found.steps] == [dict(step_account([group], [])) for group in groups[:2]]
    assert found.num_waiting == sum(sample.num_sampled for sample in groups[2].samples)
    text = "\n".join(whole_run(found))
    assert f"{found.num_waiting} more were sampled" in text
    assert "verified: every trained token" in text
    assert "1/2" in "\n".join(one_step(found.steps[1]))
    sample = recorded_sample(tmp_path, 1, 2)
    shown = "\n".join(one_episode(sample, lambda ids: " ".join(map(str, ids))))
    for span in groups[1].samples[2].rows[0].spans[1:]:
        assert f"    {' '.join(map(str, span.token_ids.tolist()))}" in shown


@pytest.mark.parametrize(
    ("steps", "tokens", "problem"),
    [
        ([[0], [0]], None, r"group 0 was trained in steps \[1, 2\]"),
        ([[0]], {"sampled": 1, "trained": 1}, "step 1: trained on .*'trained': 1"),
        ([[0, 5]], {}, r"trained on groups \[5\], of which the journal has no sample"),
    ],
)
def test_what_does_not_add_up_is_named(tmp_path: Path, steps: list[list[int]], tokens: Any, problem: str) -> None:
    journal_of(tmp_path, run([task(0, 2)], two_turns), steps, tokens=tokens)
    found = inspect_journal(tmp_path)
    assert not found.is_sound
    assert re.search(problem, "\n".join(whole_run(found)))


def test_steps_whose_samples_were_removed_are_left_out(tmp_path: Path) -> None:
    groups = run([task(at, 2) for at in range(3)], two_turns)
    history = History(tmp_path, keep="all")
    history.begin(0)
    journal = history.record
    assert isinstance(journal, Journal)
    for step, group in enumerate(groups, 1):
        for index, sample in enumerate(group.samples):
            journal.sample(group.task, "", index, sample)
        history.started(step, [group.task.ordinal])
        if step > 1:  # the step before is trained when samples of this one are there
            history.updated(step - 1, [groups[step - 2]], [], {})
            history.saving(step - 1)
    history.close()
    assert [step.step for step in inspect_journal(tmp_path).steps] == [1, 2]
    segments(tmp_path)[0].path.unlink()
    found = inspect_journal(tmp_path)
    assert (found.is_sound, [step.step for step in found.steps]) == (True, [])
