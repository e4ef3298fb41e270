"""The report is one page that needs nothing else, and says what the run's files say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from made_run import write_run

from rlsdk.algorithms import signal
from rlsdk.interfaces import ConfigError, TrackerContext
from rlsdk.trainer.checkpoints.run_environment import surroundings
from rlsdk.trainer.tracking.trackers import JsonlTracker, TensorBoardTracker, read_metrics
from rlsdk.views.charts import Line, line_chart, sheet, stacked_bars
from rlsdk.views.report import write_report
from rlsdk.views.report.curves import charts_of, data_of, others_of
from rlsdk.views.report.facts import fact_rows, readable, title_of
from rlsdk.views.report.markup import json_block, table
from rlsdk.views.report.record import read_run
from rlsdk.views.report.samples import NEGLIGIBLE, ROUNDING, sample_section
from rlsdk.views.report.statistics import student


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
    assert "95% interval 10.4% to 49.6%; mean of 5 steps" in text  # 30% +- 2.776 * 7.07%
    assert "trainer: {steps: 5}" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert re.findall("https://[^ ]+", text) == ["https://github.com/leeoniya/uPlot"]  # a comment: the library's name
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
    assert len(re.findall("<script", text, re.IGNORECASE)) == 3  # the data and the page's own two
    assert "<img" not in text.lower()
    assert "&lt;script&gt;alert(3)" in text
    assert "\x1b" not in text
    ElementTree.parse(plot)


def test_a_step_is_escaped_even_where_a_reader_lets_it_through() -> None:
    table = sample_section([{"step": "<script>alert(1)</script>", "score": "<b>"}, {}])
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
    assert "Score of training samples" in text  # it is not the accuracy, and was trained on
    assert "mean of the last 5 steps" in text
    assert "20.0% → 60.0%" in text
    assert "25.0% → 50.0%" in text
    assert "95% interval 44.1% to 55.9%" in text
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
    assert "<th>trainer.<wbr>steps</th><td>7</td>" in text
    assert "<th>trainer.<wbr>seed</th>" not in text  # the default
    assert "<th>trainer.<wbr>run_name</th>" not in text


def test_the_first_and_the_last_response_to_a_prompt_stand_side_by_side() -> None:
    samples = [{"step": step, "prompt": "1+1=", "response": f"<i>{step}</i>", "score": step / 10} for step in (1, 5, 9)]
    shown = sample_section([*samples, {"step": 9, "prompt": "other", "response": "x", "reward/format": 0.5}])
    assert "sampled at 3 steps; the first and the last" in shown
    assert shown.index("step 1<") < shown.index("step 9<") < shown.index("other")
    assert "step 5" not in shown
    assert "<i>" not in shown
    assert "format</span> 0.5" in shown


def test_tokens_are_coloured_by_the_difference_of_the_engines_and_by_chance() -> None:
    sample = {"step": 1, "prompt": "p", "response": "ab<c>d", "tokens": ["a", "b", "<c>", "d"],
              "log_probs": [-0.1, -0.1, None, -5.0], "train_log_probs": [-0.1, -0.4, None, -4.4]}  # fmt: skip
    shown = sample_section([sample])
    assert '<div class="text">a<span' in shown  # nothing about it stands out
    assert '<span class="t d2"' in shown
    assert "difference -0.3000" in shown
    assert '<span class="t given" title="given, not sampled">&lt;c&gt;</span>' in shown
    assert '<span class="t u3 p3"' in shown
    wrong = sample_section([sample | {"log_probs": [1.0]}])
    assert "ab&lt;c&gt;d" in wrong
    assert 'class="t ' not in wrong.partition('class="prompt"')[2]


def test_the_policy_of_the_page_allows_its_own_scripts_and_nothing_else(tmp_path: Path) -> None:
    tracker = JsonlTracker(context(tmp_path))
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    text = write_report(tmp_path)[0].read_text()
    policy = re.search('Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == "'none'"
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
              for code in re.findall("<script>(.*?)</script>", text, re.DOTALL)}  # fmt: skip
    assert len(hashes) == 2
    assert set(rules["script-src"].split()) == hashes
    assert "unsafe" not in policy[1]


def test_data_of_a_page_cannot_end_its_block_and_reads_back() -> None:
    block = json_block("data", {"label": "</script><script>alert(1)</script>", "n": [1, None]})
    assert block.count("<") == 2
    inner = block.partition(">")[2].rpartition("<")[0]
    assert json.loads(inner) == {"label": "</script><script>alert(1)</script>", "n": [1, None]}


def test_a_long_run_has_no_more_points_than_a_screen(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"step": step, "reward/mean": step}) + "\n" for step in range(1, 10_001))
    (tmp_path / "metrics.jsonl").write_text(lines)
    record = read_run(tmp_path)
    data = data_of([record], charts_of([record]))
    [series] = data["charts"][0]["series"]
    assert len(series["values"]) == len(data["steps"]) <= 1500
    assert series["values"][0] == 4.0  # mean of steps 1 to 7
    assert data["steps"][-1] == 10_000


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)])
def test_student_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.04 if degrees == 2 else 0.003)


def test_every_metric_without_a_chart_of_its_own_has_one_below(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1, "rollout/turns": 2, "x/<b>": 3}\n')
    record = read_run(tmp_path)
    charts = charts_of([record])
    shown = {name for chart in [*charts, *others_of([record], charts)] for name in chart.curves.values()}
    assert set(record.names) <= shown


def test_waiting_beside_the_phases_of_a_step_is_no_phase() -> None:
    from rlsdk.trainer.tracking.step_times import phase_names

    others = ["time/wait_prev_gen_s", "time/publish_s", "time/publish_lag_s", "time/train_idle_share", "reward/mean"]
    line = ["time/step_s", "time/rollout_s", "time/update_s", *others]
    assert phase_names(line) == ["time/rollout_s", "time/update_s"]


def test_a_start_is_shown_as_a_person_reads_it_and_a_long_command_says_that_it_is_cut(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    history = run / "config.history.jsonl"
    start = json.loads(history.read_text())
    start["surroundings"]["command"] = "rlsdk train " + "--x 1 " * 100
    history.write_text(json.dumps(start) + "\n")
    rows = dict(fact_rows(read_run(run)))
    assert rows["started"] == "2026-01-02 03:04:05 UTC"
    assert rows["command"].endswith(" ...")
    history.write_text(json.dumps(start | {"time": "yesterday"}) + "\n")
    assert dict(fact_rows(read_run(run)))["started"] == "yesterday"


def test_a_run_that_a_module_started_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/rlsdk/cli/__main__.py", "train", "--trainer.run_name", "a b"])
    assert surroundings()["command"] == "rlsdk train --trainer.run_name 'a b'"


def test_names_of_a_legend_do_not_lie_on_each_other() -> None:
    """`training samples` was written over `held-out, sampled`: places were 90 pixels wide whatever stood in them."""
    names = ["training samples", "held-out, sampled", "held-out, greedy", "one that is much longer than all the others"]
    chart = line_chart("Accuracy", [Line(name=name, points=[(1, 0.1), (2, 0.2)]) for name in names])
    places = re.findall(r'<text x="(\d+)" y="(\d+)">([^<]+)</text>', chart)
    written = [(int(x), int(y), name) for x, y, name in places if name in names]
    assert [name for *_, name in written] == names
    for (x, y, name), (after, below, _) in pairwise(written):
        assert below > y or after >= x + 5.5 * len(name) + 10
    assert all(x + 5.5 * len(name) < 420 for x, _, name in written)


def test_steps_of_a_warm_start_do_not_squeeze_the_curves_of_training(tmp_path: Path) -> None:
    """Both stages count from 1: 100 supervised steps left 16 of training a sixth of their charts."""
    lines = [{"step": step, "sft/loss": 1.0} | ({"reward/mean": 0.5} if step <= 16 else {}) for step in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(tmp_path)
    charts = {chart["title"]: chart for chart in data_of([record], charts_of([record]))["charts"]}
    assert (charts["Score"]["first"], len(charts["Score"]["series"][0]["values"])) == (0, 16)
    assert len(charts["Loss"]["series"][0]["values"]) == 100
    assert dict(fact_rows(record))["steps"] == "16, after 100 supervised ones"


def test_a_setting_reads_as_in_a_file() -> None:
    value = [{"name": "gsm8k", "label": None, "weight": 1.0, "options": {}, "remote": None}, {"name": "x", "rows": {}}]
    assert readable(value) == "[{name: gsm8k, weight: 1.0}, {name: x}]"
    assert (readable(True), readable(None), readable("a b"), readable([1, 2.5])) == ("true", "null", "a b", "[1, 2.5]")


@pytest.mark.parametrize(
    ("path", "title"),
    [("/home/me/runs/base/model", "base/model"), ("/home/me/qwen", "qwen"), ("org/model", "org/model")],
)
def test_a_title_says_which_model(path: str, title: str) -> None:
    assert title_of({"model": {"path": path}}, "run") == title


def test_prompts_whose_samples_scored_differently_come_first_and_the_rest_is_folded() -> None:
    def sample(step: int, scores: Sequence[float | None]) -> dict[str, object]:
        return {"step": step, "prompt": f"p{step}", "response": "r", "score": scores[0], "reward/x": scores[0],
                "advantage": 0.0, "group_scores": scores, "sample": 0}  # fmt: skip

    page = sample_section([sample(step, [1.0, 0.0] if step == 3 else [1.0, 1.0]) for step in range(1, 31)])
    prompts = re.findall(r'ask">(p\d+)<', page)
    assert prompts[:3] == ["p3", "p30", "p29"]
    close = {2: [0.30001, 0.30002], 4: [0.1 + 0.2, 0.3], 6: [0.5, None]}
    others = sample_section([sample(step, close.get(step, [1.0, 1.0])) for step in range(1, 9)])
    assert re.findall(r'ask">(p\d+)<', others)[:2] == ["p2", "p8"], "a small difference is one, and rounding is none"
    assert (ROUNDING, NEGLIGIBLE) == (signal.ROUNDING, signal.NEGLIGIBLE)
    assert page.index("10 more prompts") > page.index(">p12<")
    assert ">+0<" not in page
    assert "<span>x</span>" not in page  # equal to the score: it is the only term


def test_a_model_that_the_run_made_for_itself_is_said_to_be_small_and_random() -> None:
    settings = {"model": {"path": "/home/me/runs/a/model"}, "data": {"train": "reasoning_gym:x"}}
    title = title_of({**settings, "trainer": {"run_name": "a"}}, "copy")
    assert title == "small random model \N{MIDDLE DOT} reasoning_gym:x"
    assert title_of(settings, "b") == "a/model \N{MIDDLE DOT} reasoning_gym:x"


def test_rows_that_were_given_in_python_are_not_named_after_their_file() -> None:
    settings = {"model": {"path": "org/model"}, "data": {"train": "/home/me/runs/a/inputs/data-0a1b2c.jsonl"}}
    assert title_of(settings, "a") == "org/model \N{MIDDLE DOT} rows given in Python"


def test_names_in_tables_break_between_their_words() -> None:
    """On a phone `placement.devices_per_n/ode` was cut within a word."""
    assert "<th>placement.<wbr>devices_<wbr>per_<wbr>node</th>" in table([["placement.devices_per_node", "1"]])
    assert "<wbr>" not in table([["a.<b>", "0.5"]]).partition("<td>")[2]


def test_the_page_of_a_warm_start_counts_its_steps_and_seconds(tmp_path: Path) -> None:
    """Watched in its first stage, a run showed 0.0 s, and an advice about samples that were not due yet."""
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "sft/loss": 3.0 / step, "sft/step_s": 2.0} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = dict(fact_rows(read_run(run)))
    assert rows["steps"] == "3 supervised"
    assert rows["time"].startswith("6.0 s in steps")
    assert "the first step of reinforcement learning logs them" in sample_section([])
