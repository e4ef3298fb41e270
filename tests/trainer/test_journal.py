"""The journal: a run that is killed anywhere goes on with what it had, and ends where the undisturbed one ends."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "rollouts"))
from fakes import FakeReplica, LengthGrader, LetterCodec, output_of, read_back

from rlsdk.config import ScheduleConfig
from rlsdk.data import Prompt
from rlsdk.interfaces import (
    CheckpointError,
    Episode,
    FinishReason,
    Generate,
    PromptView,
    SamplingParams,
    Span,
    ToolUse,
    Trajectory,
    VersionRun,
    joined_ids,
)
from rlsdk.kit.files.write_errors import OutputError
from rlsdk.rollouts import (
    Collected,
    Failure,
    Grade,
    Group,
    GroupId,
    GroupTask,
    PackedOutputs,
    RolloutStream,
    Sample,
    StreamOptions,
    single_turn,
)
from rlsdk.rollouts.groups.begun import Begun, ToolResults
from rlsdk.rollouts.journal.inspection import inspect_journal
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.recorded import account, read_journal
from rlsdk.rollouts.journal.records import begun_from, grade_from, record_of, rows_from
from rlsdk.rollouts.journal.segments import records, segments
from rlsdk.trainer.generation.group_source import GroupSource
from rlsdk.trainer.generation.history import History
from rlsdk.trainer.generation.publishing import Done
from rlsdk.trainer.generation.sampler import Draw

GROUPS, SAMPLES, STEPS = 2, 3, 6


class Replica(FakeReplica):
    """Tokens also depend on the weights: a sample that was begun under others shows."""

    version = 0
    made: list[tuple[int, int]]

    async def collect(self, wait_s: float) -> Collected:
        found = await super().collect(wait_s)
        outputs = []
        for output in found.outputs.unpack():
            request = next(r for r in self.requests if r.request_id == output.request_id)
            seed = (request.sampling.seed or 0) * 1000 + self.version
            from dataclasses import replace

            other = replace(request, sampling=replace(request.sampling, seed=seed))
            outputs.append(output_of(other, output.sample_index, self.version))
        return Collected(outputs=PackedOutputs.pack(outputs), num_decoded=found.num_decoded)


@dataclass
class Weights:
    """A publisher whose weights are the number of updates."""

    replicas: Sequence[Replica]
    trained: int = 0
    kept: int | None = None
    seconds: float = 0.0
    last_report: None = None
    published: list[int] = field(default_factory=list)

    def snapshot(self) -> None:
        self.kept = self.trained

    def publish(self, done: Done) -> None:
        version = self.trained if self.kept is None else self.kept
        for replica in self.replicas:
            replica.version = version
        self.published.append(version)
        done(None)


class Numbers:
    """Stands where a `PromptStream` does: five prompts, over and over."""

    taken = 0

    @property
    def epoch(self) -> int:
        return (self.taken - 1) // 5

    def take(self, count: int) -> list[Prompt]:
        self.taken += count
        at = (self.taken - 1) % 5
        return [Prompt(index=at, text=f"p{at}", prompt_ids=(at + 1, 7), answer=None, row={}, source=f"p:{at}")]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]


@dataclass
class HeldUp(Weights):
    """The first copy is made when a sample of the third step was asked for."""

    begun: threading.Event = field(default_factory=threading.Event)
    others_began: bool = False

    def snapshot(self) -> None:
        if not self.begun.is_set():
            self.begun.set()
            end = time.monotonic() + 5.0
            while not self.others_began and time.monotonic() < end:
                asked = sum(request.n for replica in self.replicas for request in list(replica.requests))
                self.others_began = asked > 2 * GROUPS * SAMPLES
                time.sleep(0.001)
        super().snapshot()


class Waiting(Replica):
    """Gives nothing of the second step before a copy of weights was begun."""

    begun: threading.Event

    async def collect(self, wait_s: float) -> Collected:
        while sum(request.n for request in self.requests) > GROUPS * SAMPLES and not self.begun.is_set():
            await asyncio.sleep(0.001)
        return await super().collect(wait_s)


@dataclass
class Life:
    """One process of a run."""

    folder: Path
    config: ScheduleConfig
    trained: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    checkpoints: list[tuple[int, Mapping[str, Any], int]] = field(default_factory=list)
    """Step, state, and bytes of the journal at that moment."""
    requested: int = 0
    rollout: Any = single_turn
    newest: list[weakref.ref[Group]] = field(default_factory=list)
    """The groups of the last step."""

    def run(
        self,
        checkpoint: tuple[int, Mapping[str, Any]] | None = None,
        replicas: Sequence[Replica] = (),
        weights: Weights | None = None,
    ) -> Life:
        replicas = replicas or [Replica("one", max_running=2, delay=1), Replica("two", max_running=2, delay=2)]
        stream = RolloutStream(
            replicas, LetterCodec(), StreamOptions(rollout=self.rollout, max_model_tokens=40), grader=LengthGrader()
        )
        weights = weights or Weights(replicas)
        source = GroupSource(
            stream,
            Numbers(),  # type: ignore[arg-type]
            Draw(source="train", num_samples=SAMPLES, sampling=SamplingParams(max_tokens=6)),
            groups_per_step=GROUPS,
            steps=STEPS,
            seed=1,
            publisher=weights,
            schedule=self.config,
            history=History(self.folder, keep=self.config.keeps),
        )
        step = 0
        if checkpoint is not None:
            step, state = checkpoint
            source.load_state_dict(state, step=step, version=step)
            weights.trained = step
        source.begin(step)
        try:
            while step < STEPS:
                groups = source.next()
                step += 1
                self.trained.append((step, tuple(fingerprint(group) for group in groups)))
                self.newest = [weakref.ref(group) for group in groups]
                del groups
                weights.trained = step
                source.updated({"step": float(step)})
                source.settle()
                self.checkpoints.append((step, source.state_dict(), size(self.folder)))
        finally:
            source.close()
        self.requested = sum(request.n for replica in replicas for request in replica.requests)
        return self


def test_the_groups_of_a_step_are_gone_while_the_next_ones_are_made(tmp_path: Path) -> None:
    replicas, alive = [Replica("one", max_running=2)], []

    class Watching(Weights):
        def publish(self, done: Done) -> None:
            alive.append(sum(group() is not None for group in life.newest))
            super().publish(done)

    life = Life(tmp_path, ScheduleConfig())
    life.run(replicas=replicas, weights=Watching(replicas))
    assert alive == [0] * STEPS


def fingerprint(group: Group) -> tuple[Any, ...]:
    """Which prompt, and all that is trained on."""
    return (
        str(group.task.id),
        group.task.ordinal,
        tuple(
            (
                tuple(tuple(row.response_ids.tolist()) for row in sample.rows),
                tuple(row.versions for row in sample.rows),
                sample.grade.score,
            )
            for sample in group.samples
            if sample.rows
        ),
    )


def size(folder: Path) -> int:
    return sum(segment.path.stat().st_size for segment in segments(folder))


def cut(folder: Path, num_bytes: int) -> None:
    """What a kill leaves: the first so many bytes, the last line torn."""
    for segment in segments(folder):
        have = segment.path.stat().st_size
        with segment.path.open("r+b") as file:
            file.truncate(min(have, num_bytes))
        num_bytes -= min(have, num_bytes)


SCHEDULES = [
    ScheduleConfig(journal="all"),
    ScheduleConfig(max_staleness=1, journal="all"),
    ScheduleConfig(max_staleness=3, journal="all"),
]


@pytest.mark.parametrize("config", SCHEDULES, ids=["0", "1", "3"])
@given(kills=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3))
@example(kills=[0.79, 0.18, 0.93])
@settings(max_examples=12, deadline=None)
def test_a_run_that_is_killed_anywhere_ends_where_the_undisturbed_one_ends(
    config: ScheduleConfig, kills: list[float]
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        whole = Life(folder / "whole", config).run()
        expected = [trained for _, trained in whole.trained]
        assert len(expected) == STEPS
        life = Life(folder / "killed", config).run()
        history = list(life.trained)
        for kill in kills:
            left = int(size(life.folder) * kill)
            cut(life.folder, left)
            found = [(step, state) for step, state, written in life.checkpoints if written <= left]
            step, state = found[-1] if found else (0, None)
            known = read_journal(life.folder, after=step)
            again = Life(life.folder, config, checkpoints=[c for c in life.checkpoints if c[2] <= left])
            again.run(None if state is None else (step, state))
            if state is not None:  # Without a checkpoint a run begins anew, and its journal with it.
                had = sum(len(group) for group in known.samples.values())
                assert again.requested == (STEPS - step) * GROUPS * SAMPLES - had
            history = [*history[:step], *again.trained]
            life = again
        assert [trained for _, trained in history] == expected
        ordinals = [group[1] for trained in expected for group in trained]
        assert sorted(ordinals) == list(range(STEPS * GROUPS))
        fates = account(life.folder)
        assert {f for g, f in fates.items() if g < STEPS * GROUPS} == {f"trained in step {s + 1}" for s in range(STEPS)}


def test_calls_of_tools_of_an_unfinished_sample_are_kept_until_it_is_finished(tmp_path: Path) -> None:
    use = ToolUse(turn=0, name="look", arguments={"at": [1, None, "é"]}, result="x\ny", failed=True, seconds=0.25)
    journal = Journal(tmp_path, made_by={}, keep="all")
    journal.open(0)
    task = task_of(3)
    for index in (0, 1):
        journal.tool(task, "", index, 2, use)
    journal.sample(task, "", 0, Sample(episode=None, text="", grade=Grade(valid=False)))
    journal.close()
    found = read_journal(tmp_path, after=0)
    begun = begun_from({}, found.tools[3])
    assert begun == {("", 1): Begun(tools={2: use})}
    assert ToolResults(begun=begun["", 1].tools).known(2, "look", use.arguments) == use
    assert ToolResults(begun=begun["", 1].tools).known(2, "look", {"at": 1}) is None


TURNS = 3


async def with_a_tool(prompt: PromptView, generate: Generate) -> Trajectory:
    """Three turns, with the answer of a tool between them."""
    spans = [Span.given(prompt.prompt_ids)]
    for turn in range(TURNS):
        made = await generate(joined_ids(spans))
        spans += [made.span, *([Span.given(generate.encode(f"{turn}"))] if turn < TURNS - 1 else [])]
    return Trajectory(spans=tuple(spans), finish_reason=made.finish_reason)


@given(kill=st.floats(0.0, 1.0))
@settings(max_examples=15, deadline=None)
def test_no_turn_of_an_episode_is_sampled_again_after_a_kill(kill: float) -> None:
    config = ScheduleConfig(max_staleness=1, journal="all")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        life = Life(folder / "killed", config, rollout=with_a_tool).run()
        left = int(size(life.folder) * kill)
        found = [(step, state) for step, state, written in life.checkpoints if written <= left]
        if not found:
            return
        step, state = found[0]
        cut(life.folder, left)
        known = read_journal(life.folder, after=step)
        had = TURNS * sum(len(group) for group in known.samples.values())
        had += sum(len(turns) for group in known.turns.values() for turns in group.values())
        again = Life(life.folder, config, rollout=with_a_tool).run((step, state))
        assert again.requested == (STEPS - step) * GROUPS * SAMPLES * TURNS - had
        assert [*life.trained[:step], *again.trained] == life.trained
        assert inspect_journal(life.folder).is_sound


@given(kill=st.floats(0.05, 0.95))
@settings(max_examples=15, deadline=None)
def test_who_finished_first_is_trained_again_in_the_same_step(kill: float) -> None:
    """Which groups a step takes depends on the time, in this order: the journal says which it were."""
    config = ScheduleConfig(max_staleness=2, order="finish", on_new_weights="recompute", journal="all")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        life = Life(folder, config).run()
        left = int(size(folder) * kill)
        cut(folder, left)
        found = [(step, state) for step, state, written in life.checkpoints if written <= left]
        if not found:
            return
        step, state = found[0]  # The oldest: the journal knows of steps behind it.
        planned = read_journal(folder, after=step).trained
        again = Life(folder, config).run((step, state))
        first = dict(life.trained)
        for number, groups in again.trained:
            if number in planned and number < max(planned, default=0):
                assert groups == first[number]
        ordinals = [group[1] for number, groups in life.trained if number <= step for group in groups]
        ordinals += [group[1] for _, groups in again.trained for group in groups]
        assert sorted(ordinals) == list(range(STEPS * GROUPS))


def test_a_copy_of_weights_that_is_held_up_holds_up_no_group(tmp_path: Path) -> None:
    """As where weights are on their way to a replica that was lost: what others may begin, they begin."""
    config = ScheduleConfig(max_staleness=2, journal="all")
    replica = Waiting("one", max_running=GROUPS * SAMPLES, delay=1)
    weights = HeldUp([replica])
    replica.begun = weights.begun
    found = Life(tmp_path / "held up", config).run(replicas=[replica], weights=weights)
    assert weights.others_began
    assert weights.published == list(range(STEPS - 2))
    plain = Life(tmp_path / "plain", config).run(replicas=[Replica("one", max_running=GROUPS * SAMPLES, delay=1)])
    assert found.trained == plain.trained


def test_segments_that_no_checkpoint_needs_are_let_go(tmp_path: Path) -> None:
    life = Life(tmp_path, ScheduleConfig(max_staleness=1, journal="resume"))

    journal = Journal(life.folder, made_by={}, keep="resume")
    for step in range(0, 10, 2):
        journal.open(step)
        journal.forget(max(step - 4, 0) - 2)
    assert [segment.step for segment in segments(tmp_path)] == [2, 4, 6, 8]
    journal.close()


def task_of(ordinal: int) -> GroupTask:
    prompt = PromptView(prompt_ids=(1, 7), text="", answer=None, row={})
    place = GroupId(source="train", epoch=0, index=0)
    return GroupTask(
        id=place, ordinal=ordinal, prompt=prompt, num_samples=2, sampling=SamplingParams(max_tokens=6), seed=(0,)
    )


def test_lines_of_samples_go_before_the_line_that_is_written_next(tmp_path: Path) -> None:
    task = task_of(4)
    journal = Journal(tmp_path, made_by={}, keep="resume")
    journal.open(0)
    for index in range(2):
        journal.sample(task, "", index, Sample(episode=None, text="", grade=Grade()))
    assert [line["event"] for line in records(tmp_path)] == ["open"]
    journal.write("train", step=1, groups=[4])
    journal.sample(task, "", 2, Sample(episode=None, text="", grade=Grade()))
    journal.flush()
    assert [line["event"] for line in records(tmp_path)] == ["open", "sample", "sample", "train", "sample"]
    journal.close()


def test_a_record_that_is_damaged_inside_is_told(tmp_path: Path) -> None:
    Life(tmp_path, ScheduleConfig(journal="all")).run()
    path = segments(tmp_path)[0].path
    path.write_bytes(path.read_bytes().replace(b'{"event":"train"', b'{"event":"brain"', 1))
    with pytest.raises(CheckpointError, match=r"record \d+, cannot be read"):
        list(records(tmp_path))


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    score=st.floats(allow_nan=False),
    info=st.dictionaries(st.text(max_size=5), finite, max_size=2),
    data=st.data(),
)
def test_a_sample_comes_back_to_the_bit(
    tokens: list[int], score: float, info: dict[str, float], data: st.DataObject
) -> None:
    log_probs = np.array(data.draw(st.lists(finite, min_size=len(tokens), max_size=len(tokens))), np.float32)
    sampled = Span(token_ids=np.array(tokens, np.int64), log_probs=log_probs, versions=(VersionRun(4, len(tokens)),))
    trajectory = Trajectory(
        spans=(Span.given([5, 6]), sampled, Span.given([9])), finish_reason=FinishReason.STOP, info=info
    )
    failure = Failure(kind="timeout", source="r", message="late")
    grade = Grade(score=score, valid=False, terms={"r": 0.5}, failures=(failure,))
    record = read_back(record_of(Sample(episode=Episode(rows=(trajectory,)), text="", grade=grade), (5, 6)))
    assert grade_from(record) == grade
    (found,) = rows_from(record, (5, 6))
    assert found is not None
    assert found.finish_reason is FinishReason.STOP
    assert found.info == info
    for mine, theirs in zip(found.spans, trajectory.spans, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.versions == theirs.versions
        assert (mine.log_probs is None) == (theirs.log_probs is None)
        if mine.log_probs is not None and theirs.log_probs is not None:
            assert mine.log_probs.tobytes() == theirs.log_probs.tobytes()


def test_a_record_that_is_no_sample_is_told() -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        rows_from({"spans": [None, {"ids": 0, "log_probs": 1, "versions": []}], "reason": "stop"}, (1,))
    with pytest.raises(CheckpointError, match="cannot be read"):
        grade_from({"grade": {"score": 0.0, "token_scores": 0}})


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_full_disk_while_samples_are_journaled_is_the_error_of_the_step(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    life = Life(tmp_path, ScheduleConfig(max_staleness=staleness))
    opened = Journal.open

    def open_and_fill(self: Journal, step: int) -> None:
        opened(self, step)
        monkeypatch.setattr(os, "write", full)

    monkeypatch.setattr(Journal, "open", open_and_fill)
    with pytest.raises(OutputError, match=r"No space left on device. Make room"):
        life.run()
