"""Evaluations in a run on real reference engines in this process: sets, files, failures, best checkpoint, early end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_loop import HERE, TASK, Recorder, run, trainer_of

from rlsdk.config import RunConfig, load_config
from rlsdk.config.checks.watched import reported_in_rl
from rlsdk.interfaces import ConfigError, LogProbKind, SamplingParams
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.runs.build_stream import evaluation_of
from rlsdk.trainer.stages.evaluation.metrics import pass_at_k
from rlsdk.trainer.stages.evaluation.run import set_figures
from rlsdk.trainer.stages.evaluation.schedule import EvaluationError

REWARD = HERE / "rewards.py"
EVERY_STEP = ["--eval.every_steps", "1", "--trainer.keep_checkpoints", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


def config_of(model: str, registry: Registry, steps: int, *extra: str, reward: str = "share_of_digits") -> RunConfig:
    task = ["--model", model, *TASK, "--reward", f"{REWARD}:{reward}", "--trainer.steps", str(steps)]
    return load_config([], [*task, *extra], registry)


def sets_of(**sets: Mapping[str, Any]) -> list[str]:
    return ["--eval.sets", json.dumps(sets)]


def read_samples(run_dir: Path, step: int, name: str) -> list[dict[str, Any]]:
    file = run_dir / "eval_samples" / f"step_{step:08d}" / f"{name}.jsonl.gz"
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def test_sets_have_their_own_rows_sampling_and_rewards(model: str, registry: Registry, tmp_path: Path) -> None:
    rows = [{"q": f"{at}+{at}=", "a": str(2 * at)} for at in range(5)]
    (tmp_path / "doubles.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = sets_of(
        held={"temperature": 0.0, "num_rows": 3},
        doubles={
            "data": str(tmp_path / "doubles.jsonl"), "prompt_field": "q", "answer_field": "a",
            "prompt_template": "double {prompt}", "samples_per_prompt": 6, "temperature": 0.7, "top_k": 40,
            "max_response_tokens": 3, "rewards": [{"name": f"{REWARD}:even_letters"}],
        },
        again={"num_rows": 3, "samples_per_prompt": 2, "correct_from": 0.3},
    )  # fmt: skip
    view = run(config_of(model, registry, 0, *sets, *EVERY_STEP), registry, tmp_path / "none")
    (found,) = run(config_of(model, registry, 1, *sets, *EVERY_STEP), registry, tmp_path / "run").evals[:1]
    assert view.evals == [found]  # seeds are those of the set: an evaluation is the same wherever it is made
    names = {name for name in found if not name.startswith("time/")}
    known = set(reported_in_rl(config_of(model, registry, 1, *sets, *EVERY_STEP)).metrics)
    assert names <= known
    # Nothing failed, no response marks an answer, and `top_k` or greedy samples have no entropy.
    absent = ("invalid_share", "answered_share", "maj@", "entropy")
    assert [name for name in known - names if not any(part in name for part in absent)] == []
    held, doubles = read_samples(tmp_path / "run", 0, "held"), read_samples(tmp_path / "run", 0, "doubles")
    assert len(held) == 3
    assert len(doubles) == 30
    assert all(row["prompt"].startswith("double ") for row in doubles)
    assert [row["reference"] for row in doubles[::6]] == ["0", "2", "4", "6", "8"]
    assert max(row["tokens"] for row in doubles) == 3
    assert {name for row in doubles for name in row["rewards"]} == {"even_letters"}
    assert {name for row in held for name in row["rewards"]} == {"share_of_digits"}
    assert len({(row["seed"], row["sample"]) for row in doubles}) == 30

    assert found["eval/held/reward"] == pytest.approx(sum(row["score"] for row in held) / 3)
    assert found["eval/doubles/accuracy"] == pytest.approx(sum(row["correct"] for row in doubles) / 30)
    right = [sum(row["correct"] for row in doubles[at : at + 6]) for at in range(0, 30, 6)]
    assert 0 < sum(right) < 30
    for k in (1, 2, 4, 6):
        expected = sum(pass_at_k(6, c, k) for c in right) / 5
        assert found[f"eval/doubles/pass@{k}"] == pytest.approx(expected)
    assert "eval/doubles/pass@3" not in found
    assert "eval/doubles/entropy" not in found  # top_k cuts what it would be the entropy of
    assert found["eval/again/entropy"] == pytest.approx(-found["eval/again/log_prob"])
    again = read_samples(tmp_path / "run", 0, "again")
    assert found["eval/again/accuracy"] == sum(row["score"] >= 0.3 for row in again) / 6
    assert found["eval/doubles/truncated_share"] == sum(row["truncated"] for row in doubles) / 30


def test_one_set_without_a_name_keeps_the_names_of_its_metrics(model: str, registry: Registry, tmp_path: Path) -> None:
    extra = [*EVERY_STEP, "--eval.samples_per_prompt", "2", "--eval.save_samples", "plain"]
    view = run(config_of(model, registry, 0, *extra), registry, tmp_path / "run")
    (found,) = view.evals
    assert {"eval/accuracy_sampled", "eval/reward_sampled", "eval/tokens_sampled"} <= found.keys()
    assert {"eval/accuracy_greedy", "eval/reward_greedy", "eval/pass@2_sampled"} <= found.keys()
    assert "eval/pass@1_greedy" not in found
    written = sorted(file.name for file in (tmp_path / "run" / "eval_samples" / "step_00000000").iterdir())
    assert written == ["greedy.jsonl", "sampled.jsonl"]


def test_rewards_that_always_fail_end_an_evaluation_with_words(model: str, registry: Registry, tmp_path: Path) -> None:
    """They counted as 0: an accuracy of 0.0, and nothing more."""
    view = Recorder()
    config = config_of(model, registry, 2, "--eval.every_steps", "1", reward="always_fails")
    with (
        trainer_of(config, registry, tmp_path / "run", view) as (trainer, _, _),
        pytest.raises(EvaluationError, match=r"evaluation \(sampled\): 8 of 8 samples have no score \(8 exception\)"),
    ):
        trainer.fit()
    (found,) = view.evals
    assert str(found["eval/accuracy_greedy"]) == str(found["eval/reward_sampled"]) == "nan"
    assert found["eval/invalid_share_greedy"] == 1.0
    rows = read_samples(tmp_path / "run", 0, "greedy")
    assert all(row["correct"] is None and row["failures"][0]["kind"] == "exception" for row in rows)
    assert any("ValueError: always" in row["failures"][0]["message"] for row in rows)


@pytest.mark.parametrize("on_failure", ["drop", "-1.0"])
def test_samples_without_a_grade_are_left_out_and_counted(
    model: str, registry: Registry, tmp_path: Path, on_failure: str
) -> None:
    """Also where training gives them a score."""
    extra = ["--eval.every_steps", "1", "--eval.samples_per_prompt", "4", "--reward_limits.on_failure", on_failure]
    view = run(config_of(model, registry, 0, *extra, reward="fails_on_some"), registry, tmp_path / "run")
    rows = read_samples(tmp_path / "run", 0, "sampled")
    failed = [row for row in rows if row["correct"] is None]
    assert 0 < len(failed) < 16
    assert view.evals[0]["eval/accuracy_sampled"] == view.evals[0]["eval/reward_sampled"] == 1.0
    assert view.evals[0]["eval/invalid_share_sampled"] == pytest.approx(len(failed) / 32)
    assert any("they are in no figure but eval/invalid_share_sampled" in text for text in view.notices)


def test_an_evaluation_that_fails_later_ends_the_run_after_a_save(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    sets = sets_of(late={"rewards": [{"name": f"{REWARD}:fails_after_two"}], "num_rows": 2, "temperature": 0.0})
    config = config_of(model, registry, 5, *sets, "--eval.every_steps", "1")
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, _, _):
        with pytest.raises(EvaluationError, match="100% of the set"):
            trainer.fit()
        assert trainer.last_checkpoint is not None
        assert trainer.last_checkpoint.name == "step_00000001"


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--checkpoint.best.metric", "eval/accuracy"], "never measured"),
        (["--checkpoint.best.metric", "eval/accuracy_gredy", "--eval.every_steps", "1"], "eval/accuracy_greedy"),
        (["--eval.early_stopping.metric", "reward/mean", "--eval.every_steps", "1"], "is not a metric of the eval"),
        (["--eval.early_stopping.metric", "eval/reward/other_greedy", "--eval.every_steps", "1"], "is not a metric"),
        (["--checkpoint.best.metric", "eval/rollout/turns_greedy", "--eval.every_steps", "1"], "is not a metric"),
        (
            ["--checkpoint.best.metric", "eval/maj@4_sampled", "--eval.every_steps", "1"],
            "it needs several samples of a prompt, but eval.samples_per_prompt is 1",
        ),
        (
            [
                "--checkpoint.best.metric",
                "eval/a/pass@16",
                "--eval.every_steps",
                "1",
                "--eval.sets",
                "{a: {samples_per_prompt: 6}}",
            ],
            "eval.sets.a.samples_per_prompt is 6, so there are eval/a/pass@1, eval/a/maj@1, eval/a/pass@2, ",
        ),
    ],
)
def test_a_metric_that_is_never_measured_is_refused(
    model: str, registry: Registry, extra: list[str], told: str
) -> None:
    from rlsdk.config import check_run

    problems = check_run(config_of(model, registry, 1, *extra), registry, "qwen2", "cpu")
    assert any(told in str(problem) for problem in problems)


def test_the_score_of_an_evaluation_is_shown_only_where_it_is_the_whole_score(model: str, registry: Registry) -> None:
    """Reward models do not score evaluations: what the other rewards add up to is not the score that is trained on."""
    from rlsdk.config import check_run

    watch = ["--eval.every_steps", "1", "--eval.early_stopping.metric"]
    models = ["--reward_models", json.dumps([{"path": model}])]
    whole = config_of(model, registry, 1, *watch, "eval/reward_greedy")
    part = config_of(model, registry, 1, *watch, "eval/reward_greedy", *models)
    other = config_of(model, registry, 1, *watch, "eval/accuracy_greedy", *models)
    refused = [any("eval.early_stopping" in each.path for each in check_run(c, registry, "qwen2", "cpu"))
               for c in (whole, part, other)]  # fmt: skip
    assert refused == [False, True, False]
    stream: Any = None
    sampling = SamplingParams(max_tokens=4)
    for config, expected in ((whole, True), (part, False)):
        sets = {measure.name: [] for measure in config.eval.measures()}
        evaluation = evaluation_of(config, sets, sampling, stream, LogProbKind.AFTER_TEMPERATURE)  # type: ignore[arg-type]
        assert evaluation is not None
        figures = [set_figures([], each) for each in evaluation.sets]
        assert all("accuracy" in found and ("reward" in found) is expected for found in figures)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ({"a b": {}}, r"eval\.sets\.a b: expected a name of letters"),
        ({"a": {"temperature": 0.0, "samples_per_prompt": 2}}, r"eval\.sets\.a\.samples_per_prompt: 2: expected 1"),
        ({"a": {"max_response_tokens": 500}}, r"eval\.sets\.a\.max_response_tokens: 500: prompt and response come to"),
        ({"a": {"correct_reward": "gsm8k"}}, r"eval\.sets\.a\.correct_reward: 'gsm8k': expected one of"),
        ({"a": {"option": {}}}, "did you mean 'options'"),
        ({"a": {"options": {"split": "test"}}}, "has no effect without a source"),
        ({"a": {"rewards": [{"name": "math"}, {"name": "math"}]}}, r"eval\.sets\.a\.rewards\.1\.label: None: expected"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_by_its_field(
    model: str, registry: Registry, sets: Mapping[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(model, registry, 1, *sets_of(**sets))


def test_the_best_checkpoint_is_written_when_it_is_measured_and_kept(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    best = ["--checkpoint.best.metric", "eval/tokens_greedy", "--trainer.save_every_steps", "2"]
    config = config_of(model, registry, 4, *EVERY_STEP, *best)
    view = Recorder()
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        lengths = iter([9.0, 1.0, 3.0, 2.0, 3.0])  # before the first step; then after each
        measured = stage.evaluations._evaluate
        assert measured is not None

        def with_lengths() -> Any:
            found = measured()
            return type(found)(metrics={**found.metrics, "eval/tokens_greedy": next(lengths)})

        stage.evaluations._evaluate = with_lengths
        trainer.store.keep = 1
        trainer.fit()
        assert trainer.best_checkpoint == tmp_path / "run" / "checkpoints" / "step_00000002"
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 1)
    assert [step for step, _ in store.whole()] == [2, 4]
    record = store.best()
    assert record is not None
    assert (record.step, record.metric, record.value) == (2, "eval/tokens_greedy", 3.0)


def test_a_run_that_gets_no_better_ends_early_and_a_resume_goes_on_counting(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """The length of greedy responses of a model that never stops is the same in every evaluation."""
    stopping = ["--eval.early_stopping.metric", "eval/tokens_greedy", "--eval.early_stopping.patience", "3"]
    config = config_of(model, registry, 9, *EVERY_STEP, *stopping, "--trainer.save_every_steps", "1")
    part = Recorder()
    with trainer_of(config, registry, tmp_path / "run", part, stop=lambda: len(part.steps) == 2) as (trainer, _, _):
        trainer.fit()
        assert trainer.ended_early is None
    rest = Recorder()
    for expected in (1, 0):  # the third evaluation ends it; resumed once more it is over at once, and says why
        rest = Recorder()
        with trainer_of(config, registry, tmp_path / "run", rest) as (trainer, stage, _):
            newest = trainer.store.newest()
            assert newest is not None
            trainer.restore(newest)
            trainer.fit()
            assert stage.step == 3
        assert len(rest.steps) == expected
        told = "stopped early: 3 evaluations in a row without a better eval/tokens_greedy than 5 (after step 0)"
        assert any(told in text for text in rest.notices)
    assert (tmp_path / "run" / "checkpoints" / "step_00000003").is_dir()


def test_where_reward_models_alone_score_a_run_nothing_is_called_accuracy(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    models = ["--reward_models", f"[{{path: {model}, name: judge}}]"]
    config = load_config(
        [], ["--model", model, *TASK, "--trainer.steps", "0", *EVERY_STEP, *models, "--eval.samples_per_prompt", "2"]
    )
    (found,) = run(config, registry, tmp_path / "run").evals
    assert {"eval/tokens_greedy", "eval/log_prob_sampled", "eval/truncated_share_greedy"} <= found.keys()
    assert not [name for name in found if "accuracy" in name or "reward" in name or "@" in name]


def test_a_run_that_goes_on_from_elsewhere_looks_for_its_best_checkpoint_anew(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    best = ["--checkpoint.best.metric", "eval/tokens_greedy", "--trainer.save_every_steps", "1"]
    config = config_of(model, registry, 2, *EVERY_STEP, *best)
    with trainer_of(config, registry, tmp_path / "first", Recorder()) as (trainer, _, _):
        trainer.fit()
        assert trainer.best is not None
        assert trainer.best.step == 1  # every response is cut at the same length: the first one counts
    view = Recorder()
    more = config_of(model, registry, 3, *EVERY_STEP, *best)
    with trainer_of(more, registry, tmp_path / "second", view) as (trainer, _, _):
        trainer.restore(tmp_path / "first" / "checkpoints" / "step_00000002")
        trainer.fit()
        assert trainer.best is not None
        assert trainer.best.step == 3
        assert trainer.store.best() == trainer.best
    assert any("step 1, eval/tokens_greedy 5) is not in" in text for text in view.notices)


def test_evaluations_between_steps_that_overlap_sample_their_own_prompts(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    ahead = [
        "--schedule.max_staleness",
        "1",
        "--placement.preset",
        "disaggregated",
        "--placement.devices_per_node",
        "2",
    ]
    config = config_of(model, registry, 3, *sets_of(x={"num_rows": 4, "samples_per_prompt": 2}), *EVERY_STEP, *ahead)
    view = run(config, registry, tmp_path / "run")
    assert len(view.steps) == 3
    assert len(view.evals) == 4
    asked = [[row["prompt"] for row in read_samples(tmp_path / "run", step, "x")] for step in range(4)]
    assert all(prompts == asked[0] for prompts in asked)
    assert len(asked[0]) == 8


@pytest.mark.parametrize("at", [0, 2, 3])
def test_an_evaluation_that_is_stopped_is_made_by_the_run_that_goes_on(
    model: str, registry: Registry, tmp_path: Path, at: int
) -> None:
    """Before the first step, between steps, and behind the last one."""
    sets = sets_of(x={"num_rows": 4, "samples_per_prompt": 2})
    best = ["--checkpoint.best.metric", "eval/x/tokens"]
    config = config_of(model, registry, 3, *sets, *EVERY_STEP, *best)
    whole, part, rest = Recorder(), Recorder(), Recorder()
    with trainer_of(config, registry, tmp_path / "whole", whole) as (trainer, _, _):
        trainer.fit()
        found = trainer.best

    asked: list[int] = []
    with trainer_of(config, registry, tmp_path / "run", part, stop=lambda: bool(asked)) as (trainer, stage, _):
        measured = stage.evaluations._evaluate
        assert measured is not None

        def interrupted() -> Any:
            if stage.step == at:
                asked.append(at)
            return measured()

        stage.evaluations._evaluate = interrupted
        trainer.fit()
    assert len(part.evals) == at
    assert len(part.steps) == at

    with trainer_of(config, registry, tmp_path / "run", rest) as (trainer, _, _):
        if at:
            newest = trainer.store.newest()
            assert newest is not None
            trainer.restore(newest)
        trainer.fit()
        assert trainer.best == found == trainer.store.best()
    assert [*part.steps, *rest.steps] == whole.steps
    assert [*part.evals, *rest.evals] == whole.evals
