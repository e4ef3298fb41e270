"""What a run prints of its syncs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from rlsdk.cli import main
from rlsdk.config import RunConfig
from rlsdk.interfaces import RlsdkError, SyncReport
from rlsdk.views.console import ConsoleView
from rlsdk.views.figures import gains
from rlsdk.views.terminal import SafeConsole

MOVED = SyncReport(
    version=3,
    num_tensors=9,
    num_bytes=500_000_000,
    moved_bytes=400_000_000,
    lower_bound_bytes=400_000_000,
    changed_tensors=9,
    seconds=0.25,
    transports=("ring",),
)


def said(*reports: SyncReport) -> list[str]:
    text = io.StringIO()
    view = ConsoleView(Console(file=text, width=120))
    for report in reports:
        view.synced(report)
    return text.getvalue().splitlines()


def test_each_sync_is_one_line_with_bytes_time_rate_and_what_moved_over_the_bound() -> None:
    wasteful = replace(MOVED, version=4, moved_bytes=500_000_000, transports=("ring", "object_store"))
    assert said(MOVED, wasteful) == [
        "sync v3: 500.0 MB by ring, 250 ms, 2.00 GB/s, 1.00 x bound",
        "sync v4: 500.0 MB by ring, object_store, 250 ms, 2.00 GB/s, 1.25 x bound",
    ]


def test_of_syncs_that_move_nothing_the_first_has_a_line() -> None:
    still = replace(MOVED, moved_bytes=0, lower_bound_bytes=0, transports=())
    assert said(still, still, still) == ["sync v3: 500.0 MB, 250 ms, 2.00 GB/s, in place"]


def test_of_syncs_that_do_the_same_the_first_has_a_line() -> None:
    assert len(said(MOVED, replace(MOVED, version=4, seconds=0.3), replace(MOVED, version=5))) == 1
    other = replace(MOVED, version=6, transports=("object_store",))
    assert [line.split(":")[0] for line in said(MOVED, other, replace(other, version=7))] == ["sync v3", "sync v6"]


def test_control_sequences_in_notices_paths_and_tables_are_shown_and_not_obeyed() -> None:
    text = io.StringIO()
    view = ConsoleView(Console(file=text, width=120, force_terminal=True, highlight=False))
    view.notice("reward failed: \x1b]0;owned\x07\x1b[2J\x9b8m")
    view.saved(1, Path("runs/\x1b[31m"))
    assert "\x1b" not in text.getvalue()
    assert "\x9b" not in text.getvalue()
    assert r"reward failed: \x1b]0;owned\x07\x1b[2J\x9b8m" in text.getvalue()
    safe = io.StringIO()
    console = SafeConsole(file=safe, width=120, force_terminal=True, color_system="standard", highlight=False)
    table = Table("model")
    table.add_row("evil\x1b]52;c;x\x07")
    console.print(table)
    console.print("[red]red[/] \x1b[2J")
    assert r"evil\x1b]52" in safe.getvalue(), "rich counts control characters as nothing, so cells may be cut short"
    assert "\x1b]" not in safe.getvalue()
    assert "\x1b[31mred" in safe.getvalue(), "its own colors are as usual"
    assert "\x1b[2J" not in safe.getvalue()


def test_an_error_s_text_is_shown_and_not_obeyed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run_dir: Path) -> None:
        raise RlsdkError("a grader said \x1b[2J")

    monkeypatch.setattr("rlsdk.views.report.write_report", fail)
    for arguments in (["report", "x"], ["report", "x", "--traceback"]):
        with pytest.raises(SystemExit):
            main(arguments)
        said = capsys.readouterr().err
        assert r"a grader said \x1b[2J" in said
        assert "\x1b" not in said


def test_a_step_is_one_line_of_at_most_80_columns() -> None:
    text = io.StringIO()
    view = ConsoleView(Console(file=text, width=200))
    metrics = {"reward/mean": -10.125, "reward/accuracy": 1.0, "response/tokens_mean": 1024.5,
               "policy/approx_kl": 0.1234, "parity/log_prob_diff_mean": 1.5e-07, "policy/grad_norm": 123.45,
               "time/step_s": 123.45, "throughput/tokens_per_s": 123456.0}  # fmt: skip
    view.step(9999, 9999, metrics)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["reward", "acc", "tokens", "KL", "|dlogp|", "grad", "step", "tok/s"]
    assert lines[1].split()[0] == "9999/9999"


def test_what_a_start_waits_for_is_one_line_in_a_file_and_vanishes_from_a_terminal() -> None:
    file, terminal = io.StringIO(), io.StringIO()
    with ConsoleView(Console(file=file, width=80)) as view, view.waiting("starting Ray"):
        view.notice("train data: 9 rows")
    assert file.getvalue().splitlines() == ["starting Ray ...", "train data: 9 rows"]
    console = Console(file=terminal, width=80, force_terminal=True, highlight=False)
    with ConsoleView(console) as view, view.waiting("actor: starting fsdp"), view.waiting("rollout: starting vllm"):
        view.notice("train data: 9 rows")
        view._progress.refresh()
        shown = terminal.getvalue()
    assert "actor: starting fsdp" in shown
    assert "rollout: starting vllm" in shown
    assert "0:00:0" in shown, "a clock"
    assert "starting" not in terminal.getvalue().rpartition("train data")[2].rpartition("\x1b[2K")[2]


def test_what_only_waits_shows_its_name_and_a_clock() -> None:
    text = io.StringIO()
    with ConsoleView(Console(file=text, width=80, force_terminal=True, color_system=None)) as view:
        with view.waiting("starting Ray"):
            view._progress.refresh()
        with view.phase("rollout", total=4):
            view._progress.refresh()
    assert "starting Ray 0:00:00" in " ".join(text.getvalue().split())
    assert "0/?" not in text.getvalue()
    assert "0/4" in text.getvalue()


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_was_measured_once_has_no_before_and_after(again: bool) -> None:
    config = RunConfig.model_validate({"eval": {"every_steps": 2}})
    first = {"eval/accuracy_greedy": 0.5, "eval/accuracy_sampled": 0.5, "time/eval_s": 1.25}
    last = {**first, "time/eval_s": 1.5} if again else first
    found = list(gains(config, first, last))
    assert bool(found) == again
