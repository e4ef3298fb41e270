"""A journal that was damaged is refused by name, or read to the same records: never to others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
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
from rlsdk.rollouts.journal.segments import Segment, body_of, chained, read_body, read_segment, records, segments

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
    """With their arrays as lists, which can be compared."""
    return [{**line, "arrays": [array.tolist() for array in line.get("arrays", ())]} for line in records(folder)]


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_journal(folder, after=0, made_by=MADE_BY, run="a" * 16)
    text = str(error.value)
    assert "--schedule.journal none" in text
    assert "mv " in text
    return text


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_a_flipped_bit_is_refused_by_name(whole: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(segments(whole))).path
    raw = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << at % 8
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / "journal"
        shutil.copytree(whole, copy)
        (copy / file.name).write_bytes(raw)
        with pytest.raises(CheckpointError, match=str(copy)):
            all_lines(copy)


def test_no_flipped_bit_of_a_whole_segment_is_accepted(whole: Path, tmp_path: Path) -> None:
    """All flips of one whole segment, in which samples are."""
    segment = segments(whole)[-1]
    raw = segment.path.read_bytes()
    copy = Segment.of(tmp_path, segment.order, segment.step)
    for at in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        copy.path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="checksum differs"):
            list(read_segment(copy))


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


def records_of(segment: Segment) -> list[bytes]:
    ends = [place.offset for _, place in read_segment(segment)]
    raw = segment.path.read_bytes()
    return [raw[start:end] for start, end in pairwise([0, *ends])]


def _edit(at: int, change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        segment = segments(folder)[at]
        segment.path.write_bytes(b"".join(change(records_of(segment))))

    return edit


DAMAGE: Mapping[str, Callable[[Path], None]] = {
    "a record is removed": _edit(0, lambda found: found[:2] + found[3:]),
    "the first record is removed": _edit(1, lambda found: found[1:]),
    "a record is there twice": _edit(0, lambda found: found[:3] + found[2:]),
    "two records changed places": _edit(0, lambda found: [*found[:2], found[3], found[2], *found[4:]]),
    "a record of another segment": _edit(2, lambda found: [*found, found[2]]),
    "an older segment lacks its last record": _edit(0, lambda found: found[:-1]),
    "an older segment is empty": _edit(0, lambda found: []),
    "the segment of a killed process lacks its last record": _edit(1, lambda found: found[:-1]),
    "a record is cut in the middle": _edit(0, lambda found: [*found[:2], found[2][:40], *found[3:]]),
    "zeros": _edit(0, lambda found: [*found[:2], bytes(len(found[2])), *found[3:]]),
    "the last record of an older segment lacks a byte": _edit(0, lambda found: [*found[:-1], found[-1][:-1]]),
    "a record behind the last one": _edit(2, lambda found: [*found, bytes(11) + b"\1" + bytes(60)]),
    "text behind the last one": _edit(2, lambda found: [*found, b"some text behind it"]),
    "a segment is removed": lambda folder: segments(folder)[1].path.unlink(),
    "two segments changed places": lambda folder: _rename(folder, {0: 1, 1: 0}),
    "a segment is there twice": lambda folder: shutil.copy(
        segments(folder)[1].path, folder / "segment_000003_step_00000002.journal"
    ) and None,
    "two segments of one number": lambda folder: shutil.copy(
        segments(folder)[1].path, folder / "segment_000001_step_00000003.journal"
    ) and None,
    "a folder": lambda folder: (folder / "segment_000003_step_00000004.journal").mkdir(),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_records_and_segments_that_were_removed_or_moved_are_refused(kind: str, whole: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("which", [1, 2])
def test_a_journal_of_an_older_format_is_refused_with_the_way_out(which: int, tmp_path: Path) -> None:
    file = tmp_path / "segment_000000_step_00000000.jsonl"
    file.write_text(f'{{"event":"open","at":1.0,"step":0,"format":{which},"made_by":"d41d8cd98f00b204"}}\n')
    assert "older format of another version, which can finish the run" in refused(tmp_path)
    Journal(tmp_path, made_by={}, keep="resume").clear()  # a new run in its place
    assert not list(tmp_path.iterdir())


def test_a_journal_of_a_later_format_is_refused(tmp_path: Path) -> None:
    assert "format 4" in refused(sealed(tmp_path / "journal", number=4))


def test_zeros_that_a_machine_failure_leaves_behind_the_last_record_are_its_end(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "journal")
    with segments(tmp_path / "journal")[-1].path.open("ab") as file:
        file.write(bytes(200_000))
    assert len(all_lines(tmp_path / "journal")) == len(all_lines(whole))


def test_a_process_that_is_killed_in_the_midst_of_writing_loses_the_unfinished_record(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rlsdk.rollouts.journal.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), made_by={}, keep='all'); journal.open(0); step = 0\n"
        "while True: step += 1; journal.write('start', step=step, groups=[step] * 20_000); print(step, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.kill()
    said = [int(line) for line in process.communicate()[0].split()]
    steps = [line["step"] for line in all_lines(tmp_path)][1:]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= max(said, default=20)


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


def sealed(folder: Path, *found: Mapping[str, Any], number: int = 3) -> Path:
    """A segment with these records, with the right checksums: what no reader can tell from one of rlsdk's."""
    segment = Segment.of(folder, 0, 0)
    header = {"event": "open", "step": 0, "format": number, "run": "a" * 16, "begins": True, "reached": 0,
              "follows": None, "newest": None, "made_by": MADE_BY}  # fmt: skip
    own, raw = segment.first_sum, b""
    for line in (header, *found):
        piece, own = chained(body_of(line), own)
        raw += b"".join(piece)
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
        {**SAMPLE, "spans": [{"ids": 0, "versions": [[1]]}]},
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
def test_a_record_that_is_not_what_the_journal_writes_is_refused(line: Mapping[str, Any], tmp_path: Path) -> None:
    assert "record 2, cannot be read" in refused(sealed(tmp_path / "journal", line))


def test_a_record_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    segment = Segment.of(tmp_path, 0, 0)
    piece, _ = chained((b'{"event":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ()), segment.first_sum)
    segment.path.write_bytes(b"".join(piece))
    assert "RecursionError" in refused(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "data"),
    [
        (["i2"], bytes(4)), (["i2"], bytes(12)), ([], bytes(4)), (["i-1"], b""), (["O1"], bytes(8)), (["i"], bytes(4)),
        ([["<i4", 1]], bytes(4)), ([1], bytes(4)), (7, b""), ("i1", bytes(4)), (["i1" + "0" * 5000], bytes(4)),
    ],
)  # fmt: skip
def test_arrays_that_are_not_what_their_record_says_are_refused(shapes: Any, data: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_body(json.dumps({"event": "sample", "arrays": shapes}).encode(), memoryview(data))


def span_of(**changed: Any) -> dict[str, Any]:
    record = record_of(sample_of(4, 5), (1, 7))
    return {**record, "spans": [None, {**record["spans"][1], **changed}]}


def arrays_of(ids: Any, log_probs: Any, **changed: Any) -> dict[str, Any]:
    return {**span_of(**changed), "arrays": [np.array(ids, "<i4"), np.array(log_probs, "<f4")]}


@pytest.mark.parametrize(
    "record",
    [
        {},
        span_of(ids=None),
        span_of(ids=2),
        span_of(ids=-1),
        span_of(ids=True),
        span_of(ids=1),
        span_of(log_probs=0),
        span_of(versions=[[0, 5], [1, -3]]),
        span_of(versions=[[0, 2, 1]]),
        {**span_of(), "reason": "tired"},
        {**span_of(), "info": [1]},
        {**span_of(), "info": {"turns": "x"}},
        {**span_of(), "arrays": []},
        {**span_of(), "arrays": 3},
        arrays_of([4, 5], [0, np.nan]),
        arrays_of([4, 5], [-np.inf, 0]),
        arrays_of([4, -1], [0, 0]),
        arrays_of([4, 5], [0]),
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
        unfinished_from({"sample": 0, "span": record["spans"][1], "arrays": record["arrays"]}, 12)


@pytest.mark.parametrize(
    "grade", [None, [], {"score": None}, {"score": "1"}, {"score": True}, {"score": float("nan")}, {"scores": 1.0},
              {"score": 1.0, "valid": 1}, {"score": 1.0, "terms": [1.0]}, {"score": 1.0, "terms": {"r": "x"}},
              {"score": 1.0, "failures": [{"kind": "x"}]}, {"score": 1.0, "token_scores": [1.0]},
              {"score": 1.0, "token_scores": 0}],
)  # fmt: skip
def test_a_grade_that_rlsdk_does_not_write_is_refused(grade: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        grade_from({"grade": grade})
