"""A journal that was damaged is refused by name, or read to the same records: never to others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.interfaces import (
    CheckpointError,
    Episode,
    FinishReason,
    PromptView,
    SamplingParams,
    Span,
    Trajectory,
    VersionRun,
)
from rlsdk.rollouts import Grade, GroupId, GroupTask, Sample
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.recorded import Recorded, read_journal
from rlsdk.rollouts.journal.records import grade_from, record_of, rows_from, unfinished_from
from rlsdk.rollouts.journal.segments import Segment, body_of, chained, lines, read_segment, segments

MADE_BY = {"rollout.temperature": 1.0}


def task_of(ordinal: int) -> GroupTask:
    prompt = PromptView(prompt_ids=(1, 7), text="", answer=None, row={})
    place = GroupId(source="train", epoch=0, index=ordinal)
    sampling = SamplingParams(max_tokens=6)
    return GroupTask(id=place, ordinal=ordinal, prompt=prompt, num_samples=2, sampling=sampling, seed=(0,))


def sample_of(*tokens: int) -> Sample:
    log_probs = np.array([-0.5 * token for token in tokens], np.float32)
    span = Span(token_ids=np.array(tokens, np.int64), log_probs=log_probs, versions=(VersionRun(0, len(tokens)),))
    trajectory = Trajectory(spans=(Span.given([1, 7]), span), finish_reason=FinishReason.STOP)
    return Sample(episode=Episode.of(trajectory), text="", grade=Grade(score=0.25, terms={"r": 0.25}))


def write(folder: Path, *, made_by: Mapping[str, Any] = MADE_BY, run: str = "a" * 16) -> Path:
    """The journal of two processes, with a checkpoint at step 2; the second process goes on from step 2."""
    journal = Journal(folder, made_by=made_by, keep="all")
    journal.run = run
    for process, steps in enumerate(((1, 2, 3), (3, 4))):
        if process:
            journal = Journal(folder, made_by=made_by, keep="all")
            journal.run = run
            journal.follow(read_journal(folder, after=2), None)
        journal.open(steps[0] - 1)
        for step in steps:
            journal.write("start", step=step, groups=[2 * step])
            for index in range(2):
                journal.sample(task_of(2 * step), "", index, sample_of(step, index + 3))
            journal.write("train", step=step, groups=[2 * step])
            journal.write("update", step=step, groups=[2 * step], rejected=[], figures={"policy/loss": 0.5 * step})
            if step == 2:
                journal.open(2)
        journal.close()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("journal") / "journal")


def content(found: Recorded) -> tuple[Any, ...]:
    return found.samples, found.trained, found.updates, found.unfinished


def all_lines(folder: Path) -> list[Mapping[str, Any]]:
    return list(lines(folder))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_journal(folder, after=0, made_by=MADE_BY, run="a" * 16)
    text = str(error.value)
    assert "--schedule.journal none" in text
    assert "mv " in text
    return text


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_a_flipped_bit_is_refused_by_name_or_is_the_end_of_the_last_line(whole: Path, data: st.DataObject) -> None:
    files = segments(whole)
    file = data.draw(st.sampled_from(files)).path
    raw = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << at % 8
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / "journal"
        shutil.copytree(whole, copy)
        (copy / file.name).write_bytes(raw)
        if file == files[-1].path and at // 8 == len(raw) - 1:  # the end of the newest line
            assert all_lines(copy) == all_lines(whole)[:-1]
            return
        with pytest.raises(CheckpointError, match=str(copy)):
            all_lines(copy)


def test_no_flipped_bit_of_a_whole_segment_is_accepted(whole: Path, tmp_path: Path) -> None:
    """All flips of one whole segment, in which samples are."""
    segment = segments(whole)[-1]
    raw = segment.path.read_bytes()
    copy = Segment.of(tmp_path, segment.order, segment.step)
    accepted = 0
    for at in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        copy.path.write_bytes(changed)
        try:
            num_lines = sum(1 for _ in read_segment(copy))
        except CheckpointError:
            continue
        accepted += 1
        assert (at // 8, num_lines) == (len(raw) - 1, raw.count(b"\n") - 1)
    assert accepted == 8


@given(share=st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_journal_whose_newest_segment_is_torn_anywhere_is_read_up_to_there(whole: Path, share: float) -> None:
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / "journal"
        shutil.copytree(whole, copy)
        last = segments(copy)[-1].path
        last.write_bytes(last.read_bytes()[: int(share * last.stat().st_size)])
        expected = all_lines(whole)
        found = all_lines(copy)
        assert found == expected[: len(found)]
        again = Journal(copy, made_by=MADE_BY, keep="all")
        again.follow(read_journal(copy, after=2), None)
        again.open(2)
        again.close()
        assert all_lines(copy)[: len(found)] == found


def _rename(folder: Path, pairs: Mapping[int, int]) -> None:
    files = segments(folder)
    for at, to in pairs.items():
        files[at].path.rename(folder / f"moved{to}")
    for to in pairs.values():
        (folder / f"moved{to}").rename(files[to].path)


def _edit(at: int, change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = segments(folder)[at].path
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return edit


DAMAGE: Mapping[str, Callable[[Path], None]] = {
    "a line is removed": _edit(0, lambda found: found[:2] + found[3:]),
    "the first line is removed": _edit(1, lambda found: found[1:]),
    "a line is there twice": _edit(0, lambda found: found[:3] + found[2:]),
    "two lines changed places": _edit(0, lambda found: [*found[:2], found[3], found[2], *found[4:]]),
    "a line of another segment": _edit(2, lambda found: [*found, found[2]]),
    "an older segment lacks its last line": _edit(0, lambda found: found[:-1]),
    "an older segment is empty": _edit(0, lambda found: []),
    "the segment of a killed process lacks its last line": _edit(1, lambda found: found[:-1]),
    "a line is cut in the middle": _edit(0, lambda found: [*found[:2], found[2][:40] + b"\n", *found[3:]]),
    "zeros": _edit(0, lambda found: [*found[:2], bytes(len(found[2]) - 1) + b"\n", *found[3:]]),
    "a segment is removed": lambda folder: segments(folder)[1].path.unlink(),
    "two segments changed places": lambda folder: _rename(folder, {0: 1, 1: 0}),
    "a segment is there twice": lambda folder: shutil.copy(
        segments(folder)[1].path, folder / "segment_000003_step_00000002.jsonl"
    ) and None,
    "two segments of one number": lambda folder: shutil.copy(
        segments(folder)[1].path, folder / "segment_000001_step_00000003.jsonl"
    ) and None,
    "a folder": lambda folder: (folder / "segment_000003_step_00000004.jsonl").mkdir(),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_lines_and_segments_that_were_removed_or_moved_are_refused(kind: str, whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "journal"
    shutil.copytree(whole, copy)
    DAMAGE[kind](copy)
    assert str(copy) in refused(copy)


def test_a_segment_of_another_run_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", run="b" * 16)
    copy = tmp_path / "journal"
    shutil.copytree(whole, copy)
    shutil.copy(segments(other)[2].path, segments(copy)[2].path)
    assert f"{segments(copy)[2].path.name} is of another run" in refused(copy)


def test_a_journal_of_another_run_is_passed_over_and_said(whole: Path) -> None:
    found = read_journal(whole, after=0, made_by=MADE_BY, run="c" * 16)
    assert found.is_foreign
    assert content(found) == ({}, {}, {}, {})


def test_a_journal_of_an_older_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "segment_000000_step_00000000.jsonl"
    file.write_text('{"event":"open","at":1.0,"step":0,"format":1,"made_by":"d41d8cd98f00b204"}\n')
    assert "format 1 of another version" in refused(tmp_path)


def test_records_before_a_change_are_of_other_weights_and_not_used(tmp_path: Path) -> None:
    """The setting was changed for one process, and changed back: what the first one made came before that."""
    folder = write(tmp_path / "journal")
    changed = {"rollout.temperature": 0.5}
    found = read_journal(folder, after=2, made_by=changed, run="a" * 16)
    assert found.samples == {}
    assert found.differs == {"rollout.temperature": (1.0, 0.5)}
    journal = Journal(folder, made_by=changed, keep="all")
    journal.run = "a" * 16
    journal.follow(found, None)
    journal.open(2)
    journal.close()
    back = read_journal(folder, after=2, made_by=MADE_BY, run="a" * 16)
    assert back.samples == {}
    assert back.differs == {"rollout.temperature": (0.5, 1.0)}


def sealed(folder: Path, *found: Mapping[str, Any]) -> Path:
    """A segment with these lines, with the right checksums: what no reader can tell from one of rlsdk's."""
    segment = Segment.of(folder, 0, 0)
    header = {"event": "open", "step": 0, "format": 2, "run": "a" * 16, "begins": True, "reached": 0, "follows": None,
              "newest": None, "made_by": MADE_BY}  # fmt: skip
    own, raw = segment.first_sum, b""
    for line in (header, *found):
        piece, own = chained(body_of(line), own)
        raw += piece
    folder.mkdir(exist_ok=True)
    segment.path.write_bytes(raw)
    return folder


SAMPLE = {"event": "sample", "group": 3, "name": "", "sample": 0, **record_of(sample_of(4, 5), (1, 7))}


@pytest.mark.parametrize(
    "line",
    [
        {"event": 3},
        {"step": 1},
        {"event": "sample", "name": "", "sample": 0, "spans": None},
        {**SAMPLE, "group": None},
        {**SAMPLE, "group": [1]},
        {**SAMPLE, "spans": 4},
        {**SAMPLE, "spans": [3]},
        {**SAMPLE, "spans": [{"ids": "", "versions": [[1]]}]},
        {"event": "train", "groups": [1]},
        {"event": "train", "step": "x", "groups": [1]},
        {"event": "train", "step": 1, "groups": 7},
        {"event": "update", "step": 1, "figures": [1]},
        {"event": "update", "step": 1, "figures": {"a": "b"}},
        {"event": "unfinished", "seed": 1, "sample": 0},
        {"event": "unfinished", "seed": 1e400, "sample": 0, "span": {}},
    ],
    ids=str,
)
def test_a_line_that_is_not_what_the_journal_writes_is_refused(line: Mapping[str, Any], tmp_path: Path) -> None:
    assert "line 2, cannot be read" in refused(sealed(tmp_path / "journal", line))


def test_a_line_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    segment = Segment.of(tmp_path, 0, 0)
    piece, _ = chained(b'{"event":"x","a":' + b"[" * 100_000 + b"]" * 100_000, segment.first_sum)
    segment.path.write_bytes(piece)
    assert "RecursionError" in refused(tmp_path)


def span_of(**changed: Any) -> dict[str, Any]:
    record = record_of(sample_of(4, 5), (1, 7))
    return {**record, "spans": [None, {**record["spans"][1], **changed}]}


@pytest.mark.parametrize(
    "record",
    [
        {},
        span_of(ids=None),
        span_of(ids="////"),
        span_of(ids=np.array([4, 12], "<i4").tobytes().hex()),
        span_of(versions=[[0, 5], [1, -3]]),
        span_of(versions=[[0, 2, 1]]),
        {**span_of(), "reason": "tired"},
        {**span_of(), "info": [1]},
        {**span_of(), "info": {"turns": "x"}},
        {**span_of(), "spans": [None, {"ids": "AAAAAAAAAAA=", "log_probs": "AADAfwAAAAA=", "versions": [[0, 2]]}]},
        {**span_of(), "spans": [None, {"ids": "AAAAAAAAAAA=", "log_probs": "AACA/wAAAAA=", "versions": [[0, 2]]}]},
        {**span_of(), "spans": [None, {"ids": "/////wAAAAA="}]},
        {**span_of(), "spans": []},
    ],
)
def test_a_sample_that_rlsdk_does_not_write_is_refused(record: Mapping[str, Any]) -> None:
    """Among them: log-probs that are not finite, negative ids, versions that do not fit."""
    with pytest.raises(CheckpointError, match=r"cannot be read .*--schedule\.journal none"):
        rows_from(record, (1, 7))


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    record = record_of(sample_of(4, 12), (1, 7))
    assert len(rows_from(record, (1, 7), 13)) == 1
    with pytest.raises(CheckpointError, match=r"token ids from 4 to 12; the model knows 0 to 11"):
        rows_from(record, (1, 7), 12)
    with pytest.raises(CheckpointError, match="the model knows 0 to 11"):
        unfinished_from({"sample": 0, "span": record["spans"][1]}, 12)


@pytest.mark.parametrize(
    "grade", [None, [], {"score": None}, {"score": "1"}, {"score": True}, {"score": float("nan")}, {"scores": 1.0},
              {"score": 1.0, "valid": 1}, {"score": 1.0, "terms": [1.0]}, {"score": 1.0, "terms": {"r": "x"}},
              {"score": 1.0, "failures": [{"kind": "x"}]}, {"score": 1.0, "token_scores": [1.0]}],
)  # fmt: skip
def test_a_grade_that_rlsdk_does_not_write_is_refused(grade: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        grade_from({"grade": grade})
