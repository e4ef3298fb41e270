"""What the pools did when: noted as a run goes, and drawn from what was noted."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from test_loop import config_of, model, registry, run

from rlsdk.registry import Registry
from rlsdk.trainer.tracking.pool_times import FILE, Moment, PoolTimes, read_times
from rlsdk.views.pool_chart import pools_chart, spans
from rlsdk.views.report.pictures import pools
from rlsdk.views.report.record import RunRecord
from rlsdk.views.staleness_chart import staleness_bars

__all__ = ["model", "registry"]

APART = ["--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_notes_when_its_pools_work(staleness: int, model: str, registry: Registry, tmp_path: Path) -> None:
    extra = [*APART, "--schedule.max_staleness", str(staleness)]
    run(config_of(model, registry, 4, *extra), registry, tmp_path)
    moments = read_times(tmp_path / FILE, last_steps=99)
    trained = list(spans(moments, "train", "trained"))
    assert [step for _, _, step in trained] == [1, 2, 3, 4]
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(trained))
    begun = {moment.step: moment.at for moment in moments if moment.kind == "start"}
    made = {step: [m.count for m in moments if (m.kind, m.step) == ("made", step)] for step in begun}
    assert {step: sum(counts) for step, counts in made.items()} == dict.fromkeys(range(1, 5), 4)
    published = {step: (begin, end) for begin, end, step in spans(moments, "publish", "served")}
    for begin, end, step in trained:
        served = max(published[max(step - 1 - staleness, 0)])
        assert served <= begun[step] <= begin < end
    held = [step for _, _, step in spans(moments, "hold", "held")]
    if staleness:
        assert begun[2] < trained[0][1], "the next step's groups begin while a step trains"
        assert held == [1, 2]
    else:
        assert not held
        assert begun[2] >= trained[0][1]
    ElementTree.fromstring(pools_chart(moments))


def test_the_picture_shows_each_step_where_it_was() -> None:
    moments = [Moment(float(at), kind, step, count) for at, kind, step, count in (  # type: ignore[arg-type]
        (100, "publish", 0, 1), (101, "served", 0, 1), (101, "start", 1, 4), (103, "made", 1, 4), (103, "train", 1, 1),
        (103, "start", 2, 4), (105, "made", 2, 3), (107, "trained", 1, 1), (108, "made", 2, 1), (110, "train", 2, 1),
        (120, "trained", 2, 1),
    )]  # fmt: skip
    picture = ElementTree.fromstring(pools_chart(moments))
    titles = {str(title.text): node for node in picture.iter() for title in node if title.tag.endswith("title")}
    first, second = titles["step 1: 4.00 s of training"], titles["step 2: 10.00 s of training"]
    assert float(second.get("width", 0)) / float(first.get("width", 0)) == pytest.approx(2.5, rel=0.01)
    assert first.get("fill") == titles["groups for step 1"].get("fill") != second.get("fill")
    text = " ".join(node.text or "" for node in picture.iter())
    assert "training works 70% of the time, groups are under way 35%, weights 5%" in text


def test_a_resumed_run_shows_what_it_did_again(tmp_path: Path) -> None:
    times = PoolTimes(tmp_path / FILE)
    for step in (1, 2, 3, 2, 3):
        times.note("train", step)
        times.note("trained", step)
        times.write(step)
    assert [step for _, _, step in spans(read_times(tmp_path / FILE, last_steps=9), "train", "trained")] == [1, 2, 3]
    assert [m.step for m in read_times(tmp_path / FILE, last_steps=1)] == [3, 3]
    again = PoolTimes(tmp_path / FILE)
    again.begin(3, resumed=True)
    assert (tmp_path / FILE).exists()
    again.begin(0, resumed=False)
    assert not (tmp_path / FILE).exists()


def test_the_time_between_a_kill_and_the_resume_is_in_no_picture(tmp_path: Path) -> None:
    """Nor are groups that the killed process had under way, and that no one finishes."""
    lines = [
        {"step": 1, "moments": [[100, "start", 1, 4], [101, "made", 1, 4], [101, "train", 1, 1], [101, "start", 2, 4],
                                [103, "trained", 1, 1]]},
        {"step": 2, "moments": [[9000, "begin", 1, 1], [9001, "start", 2, 4], [9002, "made", 2, 4],
                                [9002, "train", 2, 1], [9004, "trained", 2, 1]]},
    ]  # fmt: skip
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    moments = read_times(tmp_path / FILE, last_steps=9)
    assert (moments[0].at, moments[-1].at) == (9001, 9004)
    assert "training works 67% of the time, groups are under way 33%" in pools_chart(moments)
    times = PoolTimes(tmp_path / FILE)
    times.begin(2, resumed=True)
    times.note("train", 3)
    times.write(3)
    assert [(moment.kind, moment.step) for moment in read_times(tmp_path / FILE, last_steps=9)] == [("train", 3)]


def test_many_groups_make_a_short_line(tmp_path: Path) -> None:
    times = PoolTimes(tmp_path / FILE)
    times._step_s = 1000.0
    for _ in range(500):
        times.note("made", 1)
    times.write(1)
    assert read_times(tmp_path / FILE, last_steps=1)[0].count == 500


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "moments": [[1e400, "train", 1, 1]]}',
        '{"step": 1, "moments": [[NaN, "train", 1, 1], [2, "trained", 1, 1]]}',
        '{"step": 1, "moments": [["now", {}, [], 1]]}',
        '{"step": 1, "moments": [[1, "train", 1, 1e300], [3, "trained", 1, 1]]}',
        '{"step": "one", "moments": 7}',
        '{"moments": [[1, "train"]]}',
    ],
)
def test_what_anybody_may_have_written_there_ends_no_report(line: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(line + "\n" + json.dumps({"step": 2, "moments": []}) + "\n" + line[:9])
    assert pools(RunRecord(folder=tmp_path, metrics=())) is None


def test_bars_say_how_old_tokens_were() -> None:
    share = "schedule/staleness_share_"
    bars = staleness_bars(
        [{f"{share}0": 1.0, f"{share}1": 0.0}, {f"{share}0": 0.25, f"{share}1": 0.75}, {"other": 1.0}]
    )
    ElementTree.fromstring(bars)
    assert "1 behind: 75%" in bars
    assert staleness_bars([{f"{share}0": 1.0}]) == ""
    assert staleness_bars([{f"{share}x": 1.0, f"{share}1": 1.0}, {}]) == ""


def test_without_a_record_there_is_no_section(tmp_path: Path) -> None:
    assert pools(RunRecord(folder=tmp_path, metrics=())) is None
