"""`rlsdk generate --keep`: which samples become rows, and that `sft` and `dpo` read these rows as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pair_runs import Recorder

from rlsdk.config import PairTraining, RunConfig, load_config, with_dtype
from rlsdk.config.derived.roles import rollout_role
from rlsdk.config.sections.role_kinds import ROLLOUT
from rlsdk.data import DataRow, PromptFormat
from rlsdk.data.fields import find_fields
from rlsdk.interfaces import ConfigError, DataError, Episode, FinishReason, PromptView, SamplingParams, Span, Trajectory
from rlsdk.registry import Registry
from rlsdk.rollouts import Grade, Group, GroupId, GroupTask, Sample
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.roles.in_process import start_in_process
from rlsdk.trainer.roles.placement import placed, placement_of
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.runs import keep
from rlsdk.trainer.runs.build_supervised import read_pairs
from rlsdk.trainer.runs.keep import keep_samples, kept_rows
from rlsdk.trainer.runs.keep_rules import KeepRule
from rlsdk.trainer.runs.run_inputs import build_run_inputs

REWARD = Path(__file__).parent / "rewards.py"


def sample(text: str, score: float, *, cut: bool = False, failed: bool = False) -> Sample:
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    row = Trajectory(spans=(Span.given([1]), Span(token_ids=[2], log_probs=[-1.0])), finish_reason=reason)
    return Sample(episode=Episode.of(row), text=text, grade=Grade(score=score, valid=not failed))


def group(*samples: Sample) -> Group:
    prompt = PromptView(prompt_ids=(1,), text="p", answer=None, row={})
    task = GroupTask(
        id=GroupId(source="train", epoch=0, index=0), ordinal=0, prompt=prompt, num_samples=len(samples),
        sampling=SamplingParams(max_tokens=4), seed=(0,),
    )  # fmt: skip
    return Group(task=task, samples=samples)


def kept(rule: str, row: dict[str, Any], *samples: Sample, answer_field: str | None = None) -> list[Any]:
    given = DataRow(row=row, source="rows:1", fields=find_fields(row))
    selected = PromptFormat(answer_field=answer_field).select([given])
    return kept_rows(selected, [group(*samples)], KeepRule.parse(rule), answer_field)[0]


ROW = {"question": "1+1=", "answer": "2", "level": 3}
SAMPLES = (
    sample("1", 0.0),
    sample("2", 1.0),
    sample("3", 0.5),
    sample("2", 1.0),
    sample("9", 2.0, cut=True),
    sample("8", 3.0, failed=True),
)


def test_the_best_answer_stands_where_sft_looks_for_one() -> None:
    """The first of the best; neither a cut sample nor one without a score."""
    assert kept("best", ROW, *SAMPLES) == [{**ROW, "answer": "2", "reference": "2", "score": 1.0}]
    assert kept("best", ROW, *SAMPLES[4:]) == []


def test_above_keeps_each_text_once_and_in_order() -> None:
    found = kept("above:0.4", ROW, *SAMPLES)
    assert [(row["answer"], row["score"]) for row in found] == [("2", 1.0), ("3", 0.5)]
    assert kept("above:1", ROW, *SAMPLES) == []  # above, and not equal


def test_all_are_kept_without_a_reward_too() -> None:
    found = kept("all", ROW, *SAMPLES)
    assert [(row["answer"], row.get("score"), row["truncated"]) for row in found] == [
        ("1", 0.0, False), ("2", 1.0, False), ("3", 0.5, False), ("2", 1.0, False), ("9", 2.0, True),
        ("8", None, False),
    ]  # fmt: skip
    (given,) = PromptFormat().select([DataRow(row=ROW, source="rows:1", fields=find_fields(ROW))])
    (row,), report = kept_rows([given], [group(SAMPLES[0])], KeepRule.parse("all"), None, graded=False)
    assert row == {**ROW, "answer": "1", "reference": "2", "truncated": False}
    assert "mean score" not in report.line(KeepRule.parse("all"))


def test_pairs_are_the_best_and_the_worst_where_they_differ() -> None:
    (pair,) = kept("pairs", ROW, *SAMPLES)
    assert pair == {**ROW, "chosen": "2", "rejected": "1", "chosen_score": 1.0, "rejected_score": 0.0}
    assert kept("pairs", ROW, sample("1", 0.5), sample("2", 0.5)) == []


def test_a_conversation_gets_the_sample_as_its_last_turn() -> None:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "two"}]
    (row,) = kept("best", {"messages": turns}, *SAMPLES)
    (same,) = PromptFormat().select([DataRow(row=row, source="rows:1", fields=find_fields(row))])
    assert row["messages"] == [turns[0], {"role": "assistant", "content": "2"}]
    assert same.answer == "2"
    (pair,) = kept("pairs", {"messages": turns}, *SAMPLES)
    assert pair["messages"] == turns[:1]


def test_an_answer_in_a_nested_field_stands_in_answer() -> None:
    row = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    (found,) = kept("best", row, *SAMPLES, answer_field="reward_model.ground_truth")
    assert found["answer"] == "2"
    assert found["reward_model"] == row["reward_model"]
    assert find_fields(found).answer == "answer"


@pytest.mark.parametrize("text", ["bset", "above", "above:x", "above:nan", "best:1", "pairs:2", ""])
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        KeepRule.parse(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


@contextmanager
def rollout_here(config: RunConfig, registry: Registry, **_: Any) -> Iterator[RoleGroup]:
    pools = placement_of(config.placement, [ROLLOUT], "cpu")
    (role,) = placed([rollout_role(with_dtype(config, "cpu")).loading_weights()], pools)
    yield start_in_process(role, registry)


def config_of(model: str, rows: Path, registry: Registry, *extra: str) -> RunConfig:
    task = [
        "--model", model, "--data", str(rows), "--data.num_eval_rows", "4", "--data.max_prompt_tokens", "96",
        "--rollout.max_response_tokens", "24", "--rollout.stop_strings", "[a, e, i, o, u, t]",
        "--tracking.trackers", "[]", "--eval.every_steps", "null",
    ]  # fmt: skip
    return load_config([], [*task, *extra], registry)


def test_sft_and_dpo_read_what_is_kept(
    model: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real engine samples, real graders grade, and the kept rows are tokenized by the next commands."""
    monkeypatch.setattr(keep, "open_rollout", rollout_here)  # without a cluster around it
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{at} + 1 =", "answer": str(at + 1)}) + "\n" for at in range(20)))
    reward = f"[{{name: '{REWARD}:number_of_digits'}}]"
    config = config_of(model, rows, registry, "--rewards", reward)
    notices: list[str] = []
    samples: dict[str, list[Any]] = {
        rule: keep_samples(config, registry, KeepRule.parse(rule), num_prompts=12, num_samples=6, notice=notices.append)
        for rule in ("above:-1", "pairs")
    }
    # Four questions of the twenty are held out, and never sampled; the same twelve are in both calls.
    asked = {row["question"] for row in samples["above:-1"]}
    assert len(asked) <= 12
    assert {row["question"] for row in samples["pairs"]} <= asked
    assert "samples of 12 prompts" in notices[-1]
    digits = [sum(letter.isdigit() for letter in row["answer"]) for row in samples["above:-1"]]
    assert digits == [row["score"] for row in samples["above:-1"]]
    files = {}
    for rule, found in samples.items():
        files[rule] = tmp_path / f"{rule.partition(':')[0]}.jsonl"
        files[rule].write_text("".join(json.dumps(row) + "\n" for row in found))
    learned = config_of(model, files["above:-1"], registry, "--sft.steps", "1")
    with closing(build_run_inputs(learned, registry, tmp_path, Recorder(), rewarded=False)) as run_inputs:
        assert run_inputs.learned is not None
        prompts, made = run_inputs.learned
        spans = [row.token_ids[first:end] for rows in made for row in rows for first, end in row.learned]
        texts = [run_inputs.tokenizer.decode(ids, skip_special_tokens=True) for ids in spans]
    assert texts == [row["answer"] for row in samples["above:-1"]]
    assert [prompt.text for prompt in prompts][:1] == [samples["above:-1"][0]["question"]]
    compared = config_of(model, files["pairs"], registry)
    with closing(build_run_inputs(compared, registry, tmp_path, Recorder(), rewarded=False, of_pairs=True)) as inputs:
        pairs = read_pairs(PairTraining.DPO, inputs)
        texts = [inputs.tokenizer.decode(ids, skip_special_tokens=True) for ids in pairs.train.chosen]
    assert texts == [row["chosen"] for row in samples["pairs"]]
    with pytest.raises(DataError, match="nothing to train on"):
        keep_samples(config, registry, KeepRule.parse("above:99"), num_prompts=2, num_samples=1, notice=notices.append)


def test_what_cannot_be_kept_is_refused_before_anything_starts(model: str, registry: Registry, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1", "answer": "1"}\n')
    config, rule = config_of(model, rows, registry), KeepRule.parse("pairs")
    with pytest.raises(ConfigError, match="rewards: expected what grades the samples"):
        keep_samples(config, registry, rule, num_prompts=None, num_samples=2, notice=print)
    graded = config_of(model, rows, registry, "--reward", "exact")
    with pytest.raises(ConfigError, match="pairs need at least 2 responses"):
        keep_samples(graded, registry, rule, num_prompts=None, num_samples=1, notice=print)
