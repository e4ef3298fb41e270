"""A real run of an environment: every token is accounted for, and it is repeated without calling a tool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import kill_when, rlsdk
from episodes import arguments, write_task

from rlsdk.cli.training.replay import run_episodes
from rlsdk.rollouts.journal.inspection import inspect_journal
from rlsdk.rollouts.journal.segments import records
from rlsdk.trainer.tracking.trackers import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("episodes")
    write_task(made)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of three steps, undisturbed."""
    rlsdk(*arguments(folder, "whole"), cwd=folder)
    return folder / "runs" / "whole"


def test_every_token_that_was_sampled_is_accounted_for(whole: Path) -> None:
    found = inspect_journal(whole / "journal")
    assert found.is_sound
    assert [step.step for step in found.steps] == [1, 2, 3]
    recorded = [line["tokens"] for line in records(whole / "journal") if line["event"] == "update"]
    assert recorded == [dict(step.tokens) for step in found.steps]
    metrics = [line for line in read_metrics(whole) if "response/tokens_mean" in line]
    for step, line in zip(found.steps, metrics, strict=True):
        assert line["response/tokens_mean"] * len(step.samples) == pytest.approx(step.tokens["trained"], rel=1e-5)
        assert {version for one in step.samples for version in one.versions or ()} == {step.step - 1}
    said = rlsdk("inspect", str(whole), cwd=whole)
    assert "verified: every trained token was sampled once" in said
    group = found.steps[1].groups[0]
    episode = rlsdk("inspect", str(whole), "--episode", f"{group}/2", cwd=whole)
    assert "sampled, " in episode
    assert "    [" in episode, "the answer of the tool, as text"
    page = (whole / "report.html").read_text()
    assert '<div class="who">policy, version 2: ' in page
    assert "<td>say</td>" in page


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """The same run, ended by signal 9 in the middle of an episode of its second step, and resumed."""
    run = folder / "runs" / "killed"
    words = arguments(folder, "killed", "--trainer.save_every_steps", "1", trace="killed", slow_s=0.2)

    def is_amid() -> bool:
        if not (run / "checkpoints" / "step_00000001").is_dir():
            return False
        events = [line["event"] for line in records(run / "journal")]
        return "update" in events and "turn" in events[events.index("update") :]

    kill_when(is_amid, "a turn of the second step", words, folder)
    rlsdk(*words, "--trainer.resume", "auto", cwd=folder)
    return run


def test_a_run_killed_in_an_episode_samples_none_of_its_turns_again(whole: Path, killed: Path) -> None:
    one, other = (
        [
            {name: value for name, value in line.items() if name.startswith(("reward/", "response/", "policy/"))}
            for line in read_metrics(run)
        ]
        for run in (whole, killed)
    )
    assert len(one) == 3
    assert one == [{name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in line.items()} for line in other]
    assert inspect_journal(killed / "journal").is_sound
    keys = [
        (line["group"], line["sample"], line["key"]) for line in records(killed / "journal") if line["event"] == "turn"
    ]
    assert len(set(keys)) == len(keys), "a turn was sampled twice"


def test_episodes_played_again_name_the_first_turn_that_departs(
    whole: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_episodes(whole, ["--trust-run"])
    assert "again: all as in the journal" in capsys.readouterr().out
    rows = folder / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text.lower())  # of a module, this process would keep what it has loaded
    try:
        with pytest.raises(SystemExit):
            run_episodes(whole, ["--trust-run"])
    finally:
        rows.write_text(text)
    said = capsys.readouterr().out
    assert re.search(r"group 0, sample 0, turn 1: expected '[^']+', came '[^']+', after \d+ equal tokens", said), said
    assert "again: 18 depart from the journal" in said


def test_no_tool_without_state_is_run_again_after_a_kill(folder: Path) -> None:
    run = folder / "runs" / "echo"
    words = arguments(folder, "echo", "--trainer.save_every_steps", "1", trace="echo", slow_s=0.2, environment="Echo")

    def calls() -> list[tuple[int, int, int]]:
        lines = records(run / "journal")
        return [(line["group"], line["sample"], line["call"]) for line in lines if line["event"] == "tool"]

    def is_amid() -> bool:
        if not (run / "checkpoints" / "step_00000001").is_dir():
            return False
        events = [line["event"] for line in records(run / "journal")]
        return "update" in events and "tool" in events[events.index("update") :]

    kill_when(is_amid, "a call of a tool in the second step", words, folder)
    before, first = len(calls()), {*(folder / "echo.txt").read_text().split()}
    rlsdk(*words, "--trainer.resume", "auto", cwd=folder)
    assert len({*calls()}) == len(calls()), "a tool that had run to its end was run again"
    later = [line for line in (folder / "echo.txt").read_text().split() if line.isdecimal() and line not in first]
    assert len(later) == len(calls()) - before > 0
    assert inspect_journal(run / "journal").is_sound


def test_replay_repeats_the_updates_and_calls_no_tool(folder: Path, killed: Path) -> None:
    trace = (folder / "killed.txt").read_bytes()
    assert trace.count(b"say") > 20
    assert "the same updates" in rlsdk("replay", str(killed), "--trust-run", cwd=folder)
    assert (folder / "killed.txt").read_bytes() == trace
