"""The report is one page that needs nothing else, and says what the run's files say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rlsdk.interfaces import ConfigError, TrackerContext
from rlsdk.trainer.charts import Line, line_chart, sheet, stacked_bars
from rlsdk.trainer.report import write_report
from rlsdk.trainer.report_samples import sample_groups
from rlsdk.trainer.trackers import JsonlTracker, TensorBoardTracker, read_metrics


def context(folder: Path) -> TrackerContext:
    return TrackerContext(run_dir=str(folder), run_name="run", config={})


def test_charts_are_well_formed_and_leave_out_what_is_not_finite() -> None:
    chart = line_chart("a < b", [Line(name="x & y", points=[(1, 0.5), (2, float("nan")), (3, 1e9)])], unit="%")
    ElementTree.fromstring(chart)
    assert "nan" not in chart
    assert line_chart("empty", [Line(name="x", points=[])]) == ""
    ElementTree.fromstring(stacked_bars("time", [{"a": 1.0, "b": 2.0}, {"a": 3.0}], unit="s"))
    assert stacked_bars("time", []) == ""
    ElementTree.fromstring(sheet([chart, "", chart]))


def test_a_constant_curve_has_a_range_to_be_drawn_in() -> None:
    ElementTree.fromstring(line_chart("flat", [Line(name="x", points=[(1, 2.0), (2, 2.0)])]))


def test_the_page_shows_curves_samples_and_configuration(tmp_path: Path) -> None:
    tracker = JsonlTracker(context(tmp_path))
    for step in range(1, 6):
        tracker.log(step, {"reward/accuracy": step / 10, "time/rollout_s": 1.0, "time/step_s": 1.5})
    tracker.log_samples(5, [{"prompt": "<b>1+1</b>", "response": "2", "answer": "2", "score": 1.0}])
    tracker.close()
    (tmp_path / "config.yaml").write_text("trainer: {steps: 5}")
    page, plot = write_report(tmp_path)
    text = page.read_text()
    assert "&lt;b&gt;1+1&lt;/b&gt;" in text
    assert "30.0% ±7.1% (mean of 5 steps)" in text
    assert "trainer: {steps: 5}" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    ElementTree.parse(plot)


def test_a_folder_without_metrics_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl.*runs/NAME"):
        write_report(tmp_path)


def test_a_torn_last_line_and_a_repeated_step_are_mended(tmp_path: Path) -> None:
    first = JsonlTracker(context(tmp_path))
    first.log(1, {"reward/mean": 0.1})
    first.log(2, {"reward/mean": 0.2})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    second = JsonlTracker(context(tmp_path))
    second.log(2, {"reward/mean": 0.25})
    second.log(2, {"eval/accuracy_greedy": 0.5})
    second.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.25, "eval/accuracy_greedy": 0.5},
    ]


def test_tensorboard_reads_what_its_tracker_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(context(tmp_path))
    tracker.log(3, {"reward/mean": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [scalar] = events.Scalars("reward/mean")
    assert (scalar.step, scalar.value) == (3, 0.5)


def test_metrics_lines_are_plain_json(tmp_path: Path) -> None:
    tracker = JsonlTracker(context(tmp_path))
    tracker.log(1, {"a": 1.0})
    tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 1.0}


HOSTILE_LINES = (
    "not JSON", "[]", "3", '"text"', "null", "{}", '{"step": null}', '{"step": "2"}', '{"step": [1]}', "[" * 100_000,
    '{"step": 3, "reward/accuracy": "<script>", "time/step_s": null, "time/<b>_s": 1.0, "time/rollout_s": {"a": 1}}',
    '{"step": 4, "eval/accuracy_greedy": [1], "reward/mean": 1e400, "time/step_s": 1.0, "time/\\u001b_s": 2.0}',
    '{"step": 5, "reward/mean": %s}' % ("9" * 400), '{"step": %s, "reward/mean": 1}' % ("9" * 400),
)  # fmt: skip
HOSTILE_SAMPLES = (
    {"step": "<script>alert(1)</script>", "prompt": "p"},
    {"step": 1, "score": "<img src=x onerror=alert(2)>", "response": "<script>alert(3)</script>"},
    {"step": 2, "prompt": ["<script>alert(4)</script>"], "answer": {"<script>": "alert(5)"}},
    {"step": 2, "response": "\ud800\x1b[2J"},
    {"step": True}, {},
)  # fmt: skip


def test_what_strangers_wrote_into_a_run_is_shown_as_text_or_left_out(tmp_path: Path) -> None:
    name = "<script>alert(6)<"
    run = tmp_path / name
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/accuracy": 0.5}\n' + "\n".join(HOSTILE_LINES) + "\n")
    (run / "samples.jsonl").write_text("\n".join([*HOSTILE_LINES, *map(json.dumps, HOSTILE_SAMPLES)]))
    (run / "config.yaml").write_bytes(b"</pre><script>alert(7)</script>\xff")
    page, plot = write_report(run)
    text = page.read_text()
    assert "<script" not in text.lower()
    assert "<img" not in text.lower()
    assert "&lt;script&gt;alert(3)" in text
    assert "\x1b" not in text
    ElementTree.parse(plot)


def test_a_step_is_escaped_even_where_a_reader_lets_it_through() -> None:
    table = sample_groups([{"step": "<script>alert(1)</script>", "score": "<b>"}, {}])
    assert "<script" not in table
    assert "<b>" not in table


def test_the_headline_is_no_single_step_and_says_how_sure_it_is(tmp_path: Path) -> None:
    tracker = JsonlTracker(context(tmp_path))
    tracker.log(0, {"eval/accuracy_greedy": 0.25, "eval/accuracy_greedy_se": 0.02})
    for step in range(1, 41):
        noisy = 0.2 if step <= 20 else 0.6
        tracker.log(step, {"reward/mean": noisy + 0.1 * (step % 2), "reward/accuracy": noisy, "reward/format": 1.0})
    tracker.log(40, {"eval/accuracy_greedy": 0.5, "eval/accuracy_greedy_se": 0.03})
    tracker.close()
    page, plot = write_report(tmp_path)
    text = page.read_text()
    assert "score of training samples" in text  # it is not the accuracy, and was trained on
    assert "(means of the first and the last 5 steps)" in text
    assert "20.0% ±0.0% → 60.0% ±0.0%" in text
    assert "25.0% ±2.0% → 50.0% ±3.0%" in text
    assert "Terms of the reward" in plot.read_text()


def test_the_page_says_what_was_trained_and_which_settings_are_not_the_defaults(tmp_path: Path) -> None:
    tracker = JsonlTracker(context(tmp_path))
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    lines = ["model: {path: /models/qwen-0.5b}", "data: {train: 'openai/gsm8k:main'}", "algorithm: {recipe: dapo}",
             "trainer: {steps: 7, seed: 0, run_name: own}"]  # fmt: skip
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    text = write_report(tmp_path)[0].read_text()
    assert "qwen-0.5b · openai/gsm8k:main · dapo" in text
    assert "<th>trainer.steps</th><td>7</td>" in text
    assert "<th>trainer.seed</th>" not in text  # the default
    assert "<th>trainer.run_name</th>" not in text


def test_the_first_and_the_last_response_to_a_prompt_stand_side_by_side() -> None:
    samples = [{"step": step, "prompt": "1+1=", "response": f"<i>{step}</i>", "score": step / 10} for step in (1, 5, 9)]
    shown = sample_groups([*samples, {"step": 9, "prompt": "other", "response": "x", "reward/format": 0.5}])
    assert "prompt (3 times)" in shown
    assert shown.index("step 1<") < shown.index("step 9<") < shown.index("other")
    assert "step 5" not in shown
    assert "<i>" not in shown
    assert "format 0.5" in shown


def test_the_page_allows_no_script_whatever_is_in_it(tmp_path: Path) -> None:
    tracker = JsonlTracker(context(tmp_path))
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    head = write_report(tmp_path)[0].read_text().partition("<body>")[0]
    assert "Content-Security-Policy" in head
    assert "default-src 'none'" in head
    assert "script-src" not in head


def test_waiting_beside_the_phases_of_a_step_is_no_phase() -> None:
    from rlsdk.trainer.metrics import phase_names

    others = ["time/wait_prev_gen_s", "time/publish_s", "time/publish_lag_s", "time/train_idle_share", "reward/mean"]
    line = ["time/step_s", "time/rollout_s", "time/update_s", *others]
    assert phase_names(line) == ["time/rollout_s", "time/update_s"]
