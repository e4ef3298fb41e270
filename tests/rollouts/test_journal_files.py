"""The files of a journal: what is read of them, what is removed, and what a full disk leaves."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsdk.interfaces import Episode, FinishReason, PromptView, SamplingParams, Span, Trajectory, VersionRun
from rlsdk.kit.files.write_errors import OutputError
from rlsdk.rollouts import Grade, GroupId, GroupTask, Sample
from rlsdk.rollouts.journal import segments as journal_files
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.recorded import read_journal
from rlsdk.rollouts.journal.segments import Place, Segment, records, segments
from rlsdk.trainer.generation.history import History


def big_journal(folder: Path, *, steps: int, tokens: int) -> int:
    """The journal of a run that was stopped after its last step, with a checkpoint of it; its size in bytes."""
    prompt = PromptView(prompt_ids=(1, 7), text="", answer=None, row={})
    span = Span(
        token_ids=np.arange(tokens) % 1000, log_probs=np.zeros(tokens, np.float32), versions=(VersionRun(0, tokens),)
    )
    row = Trajectory(spans=(Span.given([1, 7]), span), finish_reason=FinishReason.STOP)
    made = Sample(episode=Episode.of(row), text="", grade=Grade())
    journal = Journal(folder, made_by={}, keep="all")
    journal.run = "a" * 16
    for step in range(steps):
        if step % 10 == 0:
            journal.open(step)
        place = GroupId(source="train", epoch=0, index=step)
        task = GroupTask(
            id=place, ordinal=step, prompt=prompt, num_samples=1, sampling=SamplingParams(max_tokens=6), seed=(0,)
        )
        journal.sample(task, "", 0, made)
        journal.write("start", step=step + 1, groups=[step])
        journal.write("train", step=step + 1, groups=[step])
    journal.open(steps)
    journal.close()
    return sum(segment.path.stat().st_size for segment in segments(folder))


def test_a_resume_reads_only_the_segments_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = big_journal(tmp_path, steps=100, tokens=20_000)
    read = [0]
    raw_records = journal_files._raw_records

    def counted(segment: Segment, since: Place | None = None) -> Any:
        offset = 0
        for text, data, place in raw_records(segment, since):
            read[0] += place.offset - offset
            offset = place.offset
            yield text, data, place

    monkeypatch.setattr(journal_files, "_raw_records", counted)
    history = History(tmp_path, keep="all")
    history.resume(100, run="a" * 16, needed=lambda group: group >= 100)
    assert written > 15 << 20
    assert read[0] < 1 << 13, "the first record of each segment"
    found = read_journal(tmp_path, after=95, run="a" * 16, made_by={}, since=95, needed=lambda group: group >= 95)
    assert sorted(found.samples) == [95, 96, 97, 98, 99]
    assert read[0] < written / 9


def test_a_killed_process_leaves_what_the_next_checkpoint_needs_too(tmp_path: Path) -> None:
    """It had samples for step 11, which an older policy made; the next one goes on from its checkpoint of step 5, saves
    at 10 and keeps no other."""
    journal = Journal(tmp_path, made_by={}, keep="resume")
    journal.run = "a" * 16
    journal.open(5)
    for step in range(6, 12):
        journal.write("start", step=step, groups=[step])
    journal.close()
    again = Journal(tmp_path, made_by={}, keep="resume")
    again.run = "a" * 16
    again.follow(read_journal(tmp_path, after=5, run="a" * 16), None)
    again.open(5)
    again.open(10)
    again.forget(10)
    assert [segment.order for segment in segments(tmp_path)] == [0, 1, 2]
    again.open(20)
    again.forget(20)
    assert [segment.order for segment in segments(tmp_path)] == [3]
    again.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
def test_a_journal_that_cannot_be_written_ends_the_run_with_the_way_out(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a record reaches the disk, and is taken back: the next process reads all that came before."""
    journal = Journal(tmp_path, made_by={}, keep="all")
    journal.open(0)
    journal.write("start", step=1, groups=[0])
    before, write = list(records(tmp_path)), os.write

    def full(file: int, data: Any) -> int:
        if len(data) > 10:
            return write(file, bytes(data)[:10])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        OutputError, match=r"samples and events of the run cannot be written .* run the same command"
    ) as e:
        journal.write("train", step=1, groups=[0])
    monkeypatch.undo()
    assert os.strerror(number) in str(e.value)
    with pytest.raises(OutputError, match=re.escape(os.strerror(number))):
        journal.write("train", step=1, groups=[0])
    journal.close()
    assert list(records(tmp_path)) == before
