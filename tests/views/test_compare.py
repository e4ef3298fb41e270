"""Several runs on one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.views.report import write_comparison
from rlsdk.views.report.compare import different_settings, names_of
from rlsdk.views.report.record import read_run


def run(folder: Path, config: str, values: dict[int, float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    lines = [json.dumps({"step": step, "reward/mean": value, "reward/exact": value}) for step, value in values.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def data_in(page: Path) -> dict[str, object]:
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return dict(json.loads(text))


def test_curves_of_all_runs_stand_in_one_chart_over_the_same_steps(tmp_path: Path) -> None:
    first = run(tmp_path / "a", "trainer: {steps: 3}", {1: 0.1, 2: 0.2, 3: 0.3})
    second = run(tmp_path / "b", "trainer: {steps: 3}", {2: 0.5, 4: 0.6})
    data = data_in(write_comparison([first, second], tmp_path / "page.html"))
    assert data["steps"] == [1, 2, 3, 4]
    charts = {chart["title"]: chart["series"] for chart in data["charts"]}  # type: ignore[attr-defined]
    assert [(curve["label"], curve["values"]) for curve in charts["Terms of the reward"]] == [
        ("a", [0.1, 0.2, 0.3, None]),
        ("b", [None, 0.5, None, 0.6]),
    ]
    assert [curve["color"] for curve in charts["Terms of the reward"]] == [0, 1]


def test_settings_that_differ_are_named_and_others_are_not(tmp_path: Path) -> None:
    config = "train: {{optim: {{lr: {}}}}}\ntrainer: {{steps: 3, run_name: {}}}"
    runs = [run(tmp_path / name, config.format(lr, name), {1: 0.0}) for name, lr in (("a", "1.0e-6"), ("b", "2.0e-6"))]
    runs.append(run(tmp_path / "c", "trainer: {steps: 3}\ndata: {train: '<b>x</b>'}", {1: 0.0}))
    rows = different_settings([read_run(folder) for folder in runs])
    assert rows == [["train.optim.lr", "1e-06", "2e-06", "\N{EN DASH}"],
                    ["data.train", "\N{EN DASH}", "\N{EN DASH}", "<b>x</b>"]]  # fmt: skip
    text = write_comparison(runs, tmp_path / "page.html").read_text()
    assert "&lt;b&gt;x&lt;/b&gt;" in text
    assert "<b>x</b>" not in text


def test_a_path_into_a_run_s_own_folder_is_no_difference(tmp_path: Path) -> None:
    """Each quickstart makes its model in its own folder: the page said that the models differ."""
    config = (
        "model: {{path: {0}/{1}/model}}\ndata: {{train: {0}/{1}x/rows.jsonl}}\ntrainer: {{run_dir: {0}, run_name: {1}}}"
    )
    runs = [run(tmp_path / name, config.format("/made/elsewhere", name), {1: 0.0}) for name in ("a", "b")]
    rows = different_settings([read_run(folder) for folder in runs])
    assert rows == [["data.train", "/made/elsewhere/ax/rows.jsonl", "/made/elsewhere/bx/rows.jsonl"]]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [run(tmp_path / name / "run", "", {1: 0.0}) for name in ("a", "b")]
    assert names_of([read_run(folder) for folder in runs]) == ["a/run", "b/run"]
    assert names_of([read_run(runs[0])] * 2) == [f"{runs[0]} ({at})" for at in (1, 2)]


def test_one_run_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 run cannot be compared.*rlsdk report"):
        write_comparison([run(tmp_path / "a", "", {1: 0.0})], tmp_path / "page.html")


def test_runs_with_different_rewards_are_said_not_to_compare(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, f"rewards: [{{name: {name}}}]", {1: 0.0}) for name in ("a", "b")]
    said = "judge answers in different ways (rewards, below)"
    assert said in write_comparison(runs, tmp_path / "page.html").read_text()
    again = run(tmp_path / "c", "rewards: [{name: a}]", {1: 0.0})
    assert said not in write_comparison([runs[0], again], tmp_path / "page.html").read_text()
