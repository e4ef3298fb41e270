"""A run as an object, over the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlsdk
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.views.figures import named

EVIL = "<img src=x onerror=alert(1)>\x1b[31m"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "one"
    store = CheckpointStore(run / "checkpoints", keep=3)
    for step in (2, 4):
        with store.write(step, {}) as draft:
            (draft / "model").mkdir()
            (draft / "model" / "config.json").write_text("{}")
    lines = [{"step": 0, "eval/accuracy_greedy": 0.25}]
    lines += [{"step": step, "reward/mean": step / 10} for step in range(1, 5)]
    lines += [{"step": 4, "eval/accuracy_greedy": 0.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": EVIL, "score": 1.0}) + "\n")
    (run / "config.yaml").write_text("rewards: [{name: gsm8k}]\ntrainer: {steps: 4}\n")
    return run


def test_a_run_that_is_there_is_read(folder: Path) -> None:
    run = rlsdk.Run(folder)
    assert run.steps == 4
    assert run.metrics.column("reward/mean") == [0.1, 0.2, 0.3, 0.4]
    assert run.metrics.last("eval/accuracy_greedy") == 0.5
    assert (run.before, run.after) == ({"eval/accuracy_greedy": 0.25}, {"eval/accuracy_greedy": 0.5})
    assert [path.name for path in run.checkpoints] == ["step_00000002", "step_00000004"]
    assert run.model == folder / "checkpoints" / "step_00000004" / "model"
    assert run.config["trainer"] == {"steps": 4}
    assert run.report() == folder / "report.html"
    assert not run.stopped
    assert repr(run) == (
        f"Run({str(folder)!r}, after 4 steps, accuracy, greedy 25.0% -> 50.0%, reward, in training 0.1 -> 0.4)"
    )
    assert run._repr_html_().count("eval/") == run.plot().svg.count("eval/")
    assert "<tr><th>accuracy, greedy</th><td>25.0%</td><td>50.0%</td></tr>" in run._repr_html_()
    assert "<tr><th>reward, in training</th><td>0.1</td><td>0.4</td></tr>" in run._repr_html_()


def test_a_reward_is_shown_twice_if_it_differs_from_the_accuracy_once() -> None:
    equal = {"eval/accuracy_greedy": 0.0, "eval/reward_greedy": 0.0}
    other = {"eval/accuracy_greedy": 0.0, "eval/reward_greedy": 0.5}
    assert named(equal, other) == {"accuracy, greedy": "0.0%", "reward, greedy": "0.000"}
    assert named(other, equal) == {"accuracy, greedy": "0.0%", "reward, greedy": "0.500"}
    assert named(equal, equal) == {"accuracy, greedy": "0.0%"}


def test_figures_of_training_are_first_and_last_where_a_warm_start_has_more_steps(folder: Path) -> None:
    lines = [{"step": step, "sft/loss": 5.0 - step} for step in range(1, 4)]
    lines += [{"step": step, "reward/mean": step / 4} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = rlsdk.Run(folder)
    page = run._repr_html_()
    assert "<tr><th>reward, in training</th><td>0.25</td><td>0.5</td></tr>" in page
    assert "<tr><th>loss, in training</th><td>4</td><td>2</td></tr>" in page
    run.note("after the warm start")
    assert run.notes[0].step == 2


def test_its_tables_are_lists_and_data_frames(folder: Path) -> None:
    metrics = rlsdk.Run(folder).metrics
    assert isinstance(metrics, list)
    frame = metrics.to_pandas()
    assert list(frame["step"]) == [0, 1, 2, 3, 4]
    assert frame["eval/accuracy_greedy"].isna().sum() == 3
    with pytest.raises(KeyError, match="did you mean 'reward/mean'"):
        metrics.column("reward/maen")


def test_its_charts_can_be_saved_and_name_what_there_is(folder: Path, tmp_path: Path) -> None:
    run = rlsdk.Run(folder)
    chart = run.plot("reward/mean")
    assert chart.save(tmp_path / "a.svg").read_text().startswith("<svg")
    assert "eval/accuracy_greedy" in run.plot().svg
    with pytest.raises(rlsdk.RlsdkError, match=r"'reward/maen': .*did you mean 'reward/mean'"):
        run.plot("reward/maen")


def test_what_a_model_wrote_is_text_in_a_notebook(folder: Path) -> None:
    shown = rlsdk.Run(folder).samples._repr_html_()
    assert "<img" not in shown
    assert "\x1b" not in shown
    assert "&lt;img" in shown


def test_a_table_is_printed_in_lines_that_fit(folder: Path) -> None:
    lines = repr(rlsdk.Run(folder).metrics).splitlines()
    assert lines[0].split()[:2] == ["step", "reward/mean"]  # an evaluation is in few rows only
    assert lines[-1].startswith("[5 rows, ")
    assert max(map(len, lines)) <= 100
    long = rlsdk.Table([{"n": n, "text": "x" * 90 + "\x1b\n"} for n in range(50)])
    lines = repr(long).splitlines()
    assert len(lines) == 1 + 10 + 1 + 10 + 1
    assert [line.split()[0] for line in lines[-12:-9]] == ["...", "40", "41"]
    assert "\x1b" not in repr(long)
    assert repr(rlsdk.Table()) == "[0 rows, 0 columns]"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rlsdk.RlsdkError, match=r"holds no run: there is no config.yaml"):
        rlsdk.Run(tmp_path)


def test_code_of_a_run_that_was_opened_is_run_only_when_it_is_agreed_to(folder: Path) -> None:
    (folder / "config.yaml").write_text(f"rewards: [{{name: '{folder / 'evil.py'}:fn'}}]\n")
    with CheckpointStore(folder / "checkpoints", keep=3).write(6, {}) as draft:
        (draft / "model").mkdir()
        (draft / "model" / "config.json").write_text("{}")
        (draft / "config.yaml").write_text((folder / "config.yaml").read_text())
    for call in (rlsdk.Run(folder).evaluate, rlsdk.Run(folder).resume):
        with pytest.raises(rlsdk.RlsdkError, match=r"add trust_run=True; or"):
            call()
    assert not (folder / "ran").exists()


def test_the_api_says_what_is_installed_and_what_is_wrong() -> None:
    rows = {(row["kind"], row["name"]): row for row in rlsdk.plugins()}
    assert rows["train", "torch"]["state"] == "usable" or rows["train", "torch"]["state"]
    assert {"check", "state", "found", "fix"} == set(rlsdk.doctor()[0])


def test_all_names_of_the_package_are_there() -> None:
    for name in rlsdk.__all__:
        assert getattr(rlsdk, name) is not None
    assert set(rlsdk.__all__) <= set(dir(rlsdk))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        rlsdk.trian  # noqa: B018
