"""Process rewards: rows and ends of steps, what a model of them learns, and reinforcement learning on its scores."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_runs import Recorder, run
from test_preferences import reinforce

from rlsdk.algorithms import REDUCTIONS, Samples, reduce_steps, step_scores
from rlsdk.config import PairTraining, RunConfig, check_run, load_config, sft_optim_spec, with_dtype
from rlsdk.config.checks.watched import reported_on_pairs
from rlsdk.config.derived.roles import best_of_role, rollout_role
from rlsdk.data import DataRow, PromptFormat, StepFields
from rlsdk.data.fields import find_fields
from rlsdk.data.steps import TAG
from rlsdk.interfaces import Batch, BatchError, ConfigError, DataError
from rlsdk.kit.model.tokenizers import write_byte_tokenizer
from rlsdk.registry import Registry
from rlsdk.rollouts import Group
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.inputs.step_ends import StepReader
from rlsdk.trainer.learner.model_scores import add_step_scores, with_step_ends
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.placement import roles
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.roles.session import Session, start_roles
from rlsdk.trainer.runs import inference
from rlsdk.trainer.runs.build_supervised import sft_stage
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.runs.step_judge import StepJudge
from rlsdk.trainer.stages.evaluation.metrics import best_at_k
from rlsdk.trainer.stages.evaluation.run import Evaluated
from rlsdk.trainer.stages.export import export_policy

HERE = Path(__file__).parent
FORM = PromptFormat(steps=StepFields())
EOS = 1
WRONG = (string.ascii_letters + string.punctuation).replace(";", "")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


def selected(row: Mapping[str, Any]) -> DataRow:
    return FORM.select([DataRow(row=row, source="rows.jsonl:1", fields=find_fields(row))])[0]


def test_rows_of_trl_math_shepherd_and_prm800k_are_read_alike() -> None:
    plain = {"prompt": "2 + 3 =", "completions": ["Step 1: 2 + 3", "Step 2: 6"], "labels": [True, False]}
    row = selected(plain | {"labels": [1.0, -1]})
    assert (row.prompt, row.steps) == ("2 + 3 =", selected(plain).steps)
    shepherd = {
        "input": f"2 + 3 = Step 1: 2 + 3 {TAG}\nStep 2: 6 {TAG}",
        "label": "2 + 3 = Step 1: 2 + 3 +\nStep 2: 6 -",
        "task": "GSM8K",
    }
    assert (selected(shepherd).prompt, selected(shepherd).steps) == (row.prompt, row.steps)
    rated = [
        {"completions": [{"text": "Step 1: 2 + 3", "rating": 0}, {"text": "no", "rating": -1}], "chosen_completion": 0},
        {"completions": [{"text": "Step 2: 6", "rating": -1}], "human_completion": None, "chosen_completion": None},
    ]
    prm800k = {"question": {"problem": "2 + 3 ="}, "label": {"steps": rated, "finish_reason": "found_error"}}
    assert (selected(prm800k).prompt, selected(prm800k).steps) == (row.prompt, row.steps)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [True]}, "2 steps in 'completions' and 1 labels in 'labels'"),
        ({"labels": [True, 2]}, "'labels' (preferences.step_label_field): '2': expected true or false"),
        ({"completions": ["a", " "]}, "step 2 in 'completions': ' ': expected a text"),
        ({"completions": "a"}, "must be a list with one item for each step, got 'a'"),
        ({"completions": None, "steps": ["a"]}, "preferences.step_field"),
        ({"completions": None, "input": f"Q Step 1: a {TAG}", "label": "Q Step 1: b +"}, "'label' does not go on as"),
        ({"completions": None, "input": f"Step 1: a {TAG}", "label": "Step 1: a +"}, "holds no 'Step 1:' behind a"),
    ],
)
def test_rows_that_are_no_steps_are_refused_by_line_and_field(change: Mapping[str, Any], said: str) -> None:
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [1, None], **change}
    with pytest.raises(DataError) as caught:
        selected({name: value for name, value in row.items() if value is not None})
    assert "rows.jsonl:1" in str(caught.value)
    assert said in str(caught.value)


STEP = st.text(alphabet="ab é1.", min_size=1, max_size=6).filter(lambda text: text.strip() != "")


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(STEP, min_size=1, max_size=5), separator=st.sampled_from(["\n", "\n\n", ";"]), cut=st.booleans())
def test_ends_of_given_steps_are_those_that_are_found_in_a_response(
    tokenizer: Any, texts: list[str], separator: str, cut: bool
) -> None:
    """Against the bytes of the text: each is one token."""
    reader = StepReader(tokenizer=tokenizer, separator=separator, stops={EOS})
    ids = tokenizer(separator.join(texts), add_special_tokens=False)["input_ids"]
    ids = ids if cut else [*ids, EOS]
    lengths = [len((text + separator * (at < len(texts) - 1)).encode()) for at, text in enumerate(texts)]
    ends = [sum(lengths[: at + 1]) - 1 for at in range(len(texts))]
    wanted = ends[:-1] if cut else ends
    assert reader.ends(ids, is_followed=False) == wanted
    assert reader.ends_of(texts, ids) == [*wanted, *([None] if cut else [])]
    assert reader.ends(ids, is_followed=True) == ends
    # In a batch: after a prompt, and with the turn of a tool before another response.
    batch = Batch.from_rows([[7, 8, *ids, 9, *ids], [7, *ids]])
    mask = [False] * 2 + [True] * len(ids) + [False] + [True] * len(ids) + [False] + [True] * len(ids)
    marked = reader.mark(batch.with_tokens(response_mask=torch.tensor(mask))).nonzero()[:, 0].tolist()
    second, third = 3 + len(ids), 4 + 2 * len(ids)
    assert marked == [2 + at for at in ends] + [second + at for at in wanted] + [third + at for at in wanted]


def test_blank_steps_are_none_and_a_token_may_end_a_line_and_more(tokenizer: Any) -> None:
    reader = StepReader(tokenizer=tokenizer, separator="\n", stops={EOS})
    ids = tokenizer("\na\n\n b\n", add_special_tokens=False)["input_ids"]
    assert reader.ends([*ids, EOS], is_followed=False) == [2, 6]
    assert reader.ends([EOS], is_followed=False) == reader.ends([], is_followed=True) == []


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=st.integers(0, 2**16), several=st.booleans())
def test_scores_of_steps_and_their_reductions_are_those_of_plain_loops(
    lengths: list[int], seed: int, several: bool
) -> None:
    drawn = random.Random(seed)
    batch = Batch.from_rows([[*range(length + 1)] for length in lengths])
    sample = torch.tensor([at // 2 if several else at for at in range(len(lengths))])
    batch = batch.with_rows(uid=torch.zeros_like(sample), sample=sample, scores=torch.zeros(len(lengths)).double())
    ends = torch.tensor([at < n and drawn.random() < 0.5 for n in lengths for at in range(n + 1)])
    values = torch.tensor([drawn.gauss(0, 2) for _ in ends])
    chances: dict[int, list[float]] = {}
    wanted = [0.0] * len(ends)
    for at in ends.nonzero()[:, 0].tolist():
        wanted[at] = 1 / (1 + math.exp(-float(values[at + 1])))
        chances.setdefault(int(sample[batch.row_of_token[at]]), []).append(wanted[at])
    found = step_scores(batch, ends, values)
    assert found.tolist() == pytest.approx(wanted)
    plain = {"min": min, "mean": lambda x: sum(x) / len(x), "product": math.prod, "last": lambda x: x[-1]}
    samples, count = Samples.of(batch), int(sample.max()) + 1
    for how in REDUCTIONS:
        expected = [plain[how](chances[at]) if at in chances else 0.0 for at in range(count)]
        assert reduce_steps(samples, ends, found, how).tolist() == pytest.approx(expected)
        (scored, _) = add_step_scores(batch.with_tokens(**{"step_end.reward": ends}), values, 0.5, "reward", how)
        assert scored["scores"].tolist() == pytest.approx([0.5 * expected[at] for at in sample.tolist()])
    each, metrics = add_step_scores(
        batch.with_tokens(**{"step_end.reward": ends, "token_scores": torch.ones(len(ends))}),
        values,
        2.0,
        "reward",
        "each",
    )
    assert each["token_scores"].tolist() == pytest.approx([1 + 2 * value for value in wanted])
    assert metrics["reward/reward/steps"] == pytest.approx(int(ends.sum()) / count)


def test_a_step_that_ends_a_row_has_no_value() -> None:
    batch = Batch.from_rows([[1, 2]])
    with pytest.raises(BatchError, match="row_id 0: a step ends at its last token"):
        step_scores(batch, torch.tensor([False, True]), torch.zeros(2))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Solutions of two or three steps of one to two characters. Right steps are digits, wrong ones other characters, in
    any order; labels are soft."""
    drawn, lines = random.Random(3), []
    for at in range(640):
        right = [drawn.random() < 0.5 for _ in range(drawn.randint(2, 3))]
        steps = ["".join(drawn.choices(string.digits if one else WRONG, k=drawn.randint(1, 2))) for one in right]
        labels = [0.9 if one else 0.05 for one in right]
        row = {"question": f"{at % 10} + {at} =", "completions": steps, "labels": labels, "answer": ";".join(steps)}
        lines.append(json.dumps(row))
    path = tmp_path_factory.mktemp("rows") / "steps.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def config_of(model: str, rows: str, registry: Registry, *extra: str) -> RunConfig:
    task = [
        "--model", model, "--data", rows, "--data.num_eval_rows", "32", "--data.max_prompt_tokens", "96",
        "--rollout.max_response_tokens", "10", "--tracking.trackers", "[]", "--eval.every_steps", "48",
        "--preferences.pairs_per_step", "32", "--preferences.lr", "3e-3", "--preferences.steps", "48",
        "--preferences.step_separator", ";",
    ]  # fmt: skip
    return load_config([], [*task, *extra], registry)


@pytest.fixture(scope="module")
def learned(model: str, rows: str, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model, after the check that it learned."""
    folder = tmp_path_factory.mktemp("prm")
    config = config_of(model, rows, registry)
    done = run(config, PairTraining.PROCESS_REWARD, registry, folder / "run", export=folder / "scores")
    before, after = done.view.evals[0], done.view.evals[-1]
    assert set(after) == set(reported_on_pairs(config, PairTraining.PROCESS_REWARD).metrics)
    assert before["eval/accuracy_pairs"] < 0.8
    assert after["eval/accuracy_pairs"] > 0.95
    # The least that these labels allow is their own entropy.
    least = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (0.9, 0.05)) / 2
    assert least < after["eval/loss_pairs"] < least + 0.15
    assert after["eval/score_pairs"] == pytest.approx(after["eval/label_pairs"], abs=0.05)
    (said,) = [text for text in done.view.notices if text.startswith("train data: ") and "labelled steps" in text]
    assert "labelled steps of 608 solutions" in said
    return folder / "scores"


@pytest.mark.parametrize(("how", "advantage"), [("min", "grpo"), ("each", "reinforce")])
def test_reinforcement_learning_follows_a_process_reward_model(
    how: str, advantage: str, model: str, rows: str, registry: Registry, learned: Path, tmp_path: Path
) -> None:
    """The run sees no other reward than its scores: their sum pays for more steps, the least of them for none wrong."""
    config = config_of(
        model, rows, registry, "--reward_models", f"[{{path: {learned}, step_scores: {how}, step_separator: ';'}}]",
        "--rewards", f"[{{name: '{HERE / 'rewards.py'}:share_of_digits', weight: 0.0}}]",
        "--trainer.steps", "10", "--trainer.prompts_per_step", "8", "--trainer.samples_per_prompt", "8",
        "--train.optim.lr", "1e-3", "--eval.every_steps", "null", "--trainer.save_every_steps", "null",
        "--algorithm.advantage", advantage,
    )  # fmt: skip
    fields = json.loads((learned / "config.json").read_text())
    assert check_run(config, registry, "qwen2", "cpu", model={"model_type": "qwen2"}, models={"reward": fields}) == []
    steps = reinforce(config, registry, tmp_path / "rl")
    first, last = steps[0], steps[-1]
    assert last["reward/mean"] > first["reward/mean"] + {"min": 0.05, "each": 1.0}[how]
    for step in steps:
        per_sample = step["reward/reward"] * (step["reward/reward/steps"] if how == "each" else 1.0)
        assert step["reward/mean"] == pytest.approx(per_sample, abs=1e-6)


def test_marks_are_made_for_each_process_reward_model(tokenizer: Any) -> None:
    ids = tokenizer("a;b\nc", add_special_tokens=False)["input_ids"]
    batch = Batch.from_rows([[*ids, EOS]]).with_tokens(response_mask=torch.ones(6, dtype=torch.bool))
    readers = {
        role: StepReader(tokenizer=tokenizer, separator=by, stops={EOS}) for role, by in {"a": ";", "b": "\n"}.items()
    }
    marked = with_step_ends(batch, readers)
    assert marked["step_end.a"].nonzero()[:, 0].tolist() == [1, 4]
    assert marked["step_end.b"].nonzero()[:, 0].tolist() == [3, 4]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_best_at_k_is_what_plain_enumeration_gives(scored: list[tuple[float, bool]], k: int) -> None:
    k = min(k, len(scored))
    shares = []
    for drawn in itertools.combinations(scored, k):
        best = [correct for score, correct in drawn if score == max(score for score, _ in drawn)]
        shares.append(sum(best) / len(best))
    assert best_at_k(scored, k) == pytest.approx(sum(shares) / len(shares))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations run without a cluster around them."""

    @contextmanager
    def open_rollout(config: RunConfig, registry: Registry, **_: Any) -> Iterator[RoleGroup]:
        role = replace(rollout_role(with_dtype(config, "cpu")).loading_weights(), pool="main")
        yield start_in_process(role, registry)

    @contextmanager
    def open_judged(
        config: RunConfig, registry: Registry, reader: StepReader, **own: Any
    ) -> Iterator[tuple[RoleGroup, StepJudge]]:
        role = start_in_process(replace(best_of_role(with_dtype(config, "cpu")), pool="main"), registry)
        with open_rollout(config, registry) as rollout:
            yield rollout, StepJudge.of_config(config, role, InProcessStore(), reader)

    monkeypatch.setattr(inference, "open_rollout", open_rollout)
    monkeypatch.setattr(inference, "open_judged", open_judged)


def evaluated(model: str, rows: str, registry: Registry, best_of: str, *extra: str) -> Evaluated:
    config = config_of(
        model, rows, registry, "--rewards", f"[{{name: '{HERE / 'rewards.py'}:right_steps'}}]",
        "--data.num_eval_rows", "24", "--eval.greedy", "false",
        *(("--eval.best_of", best_of) if best_of else ()), *extra,
    )  # fmt: skip
    return inference.evaluate_model(config, registry, Recorder())[0]


@cache
def plain(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model


def plain_scores(folder: Path, before: Sequence[int], own: Sequence[int]) -> list[float]:
    """The probability that each step of a response is right, by plain transformers: a token is a character at most."""
    tokenizer, model = plain(folder)
    with torch.no_grad():
        chances = model(input_ids=torch.tensor([[*before, *own]])).logits[0, :, 0].sigmoid()[len(before) :].tolist()
    found, has_words = [], False
    for at, token in enumerate(own):
        text = tokenizer.decode([token])
        ends = token == tokenizer.eos_token_id
        if (text == ";" or ends) and has_words and at + 1 < len(own) + ends:
            found.append(chances[at - ends])
        has_words = text != ";" and (has_words or text != "")
    return found


@pytest.fixture(scope="module")
def policy(model: str, rows: str, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Answers in steps, half of which are right."""
    folder = tmp_path_factory.mktemp("policy")
    config = config_of(model, rows, registry, "--sft.steps", "40", "--sft.lr", "3e-3", "--sft.rows_per_step", "32")
    turns = DeviceTurns()
    table = [role.with_optim(sft_optim_spec(config)) for role in roles(config, "cpu", needed=["actor"])]
    groups = start_roles(table, lambda role: start_in_process(role, registry), turns)
    session = Session(roles=groups, turns=turns, cluster=InProcessStore())
    with closing(build_run_inputs(config, registry, folder, Recorder(), rewarded=False)) as run_inputs:
        stage = sft_stage(config, run_inputs, session)
        stage.begin()
        while stage.step < config.sft.steps:
            stage.advance()
        export_policy(session, run_inputs.tokenizer, folder / "model")
    return str(folder / "model")


def test_eval_chooses_the_best_of_several_samples(
    policy: str, rows: str, registry: Registry, learned: Path, judged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, given, wanted = f"{{path: {learned}, step_separator: ';', step_scores: min}}", [], []
    of_samples = StepJudge.of_samples

    def noted(self: StepJudge, groups: Sequence[Group]) -> list[list[float]]:
        given.extend(of_samples(self, groups))
        for group in groups:
            spans = [sample.rows[0].spans for sample in group.samples]
            plain = [plain_scores(learned, *(span.token_ids.tolist() for span in pair)) for pair in spans]
            wanted.append([min(scores, default=0.0) for scores in plain])
        return given

    monkeypatch.setattr(StepJudge, "of_samples", noted)
    found = evaluated(policy, rows, registry, own, "--eval.samples_per_prompt", "6")
    for one, other in zip(given, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert found.samples is not None
    scored: list[list[tuple[float, bool]]] = [[] for _ in given]
    for row in found.samples["sampled"]:
        scored[row["index"]].append((given[row["index"]][row["sample"]], row["correct"]))
    for k in (1, 2, 4, 6):
        expected = sum(best_at_k(members, k) for members in scored) / len(scored)
        assert found.metrics[f"eval/best@{k}_sampled"] == pytest.approx(expected)
    assert found.metrics["eval/best@6_sampled"] > found.metrics["eval/best@1_sampled"] + 0.1
    assert found.metrics["eval/best@1_sampled"] == pytest.approx(found.metrics["eval/accuracy_sampled"])


def test_eval_searches_step_by_step(policy: str, rows: str, registry: Registry, learned: Path, judged: None) -> None:
    """Steps are right that would be so half of the time, and so are answers."""
    own = f"{{path: {learned}, step_separator: ';', by: step, num_candidates: 12}}"
    usual, searched = evaluated(policy, rows, registry, ""), evaluated(policy, rows, registry, own)
    assert usual.samples is not None
    assert searched.samples is not None
    tokenizer, _ = plain(learned)

    def scores_of(samples: Sequence[Mapping[str, Any]]) -> list[float]:
        ids = [[tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("prompt", "response")]
               for row in samples]  # fmt: skip
        return [score for before, own in ids for score in plain_scores(learned, before, [*own, EOS])]

    scores = [scores_of(one["sampled"]) for one in (usual.samples, searched.samples)]
    assert sum(scores[0]) / len(scores[0]) < 0.7
    assert sum(scores[1]) / len(scores[1]) > 0.8
    assert searched.metrics["eval/accuracy_sampled"] > usual.metrics["eval/accuracy_sampled"] + 0.3
    assert searched.metrics["eval/rollout/steps_sampled"] > 1
    assert "eval/best@1_sampled" not in searched.metrics
    again = evaluated(policy, rows, registry, own)
    assert [row["response"] for row in (again.samples or {})["sampled"]] == [
        row["response"] for row in searched.samples["sampled"]
    ]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("{path: MODEL}", "gives no score: expected an architecture that ends in"),
        ("{path: LEARNED}", "eval.best_of: there is one sample of a prompt"),
        ("{path: LEARNED, by: steps}", "'answer' or 'step'"),
        ("{path: LEARNED, by: step, backend: none}", "backend"),
    ],
)
def test_eval_refuses_what_it_could_not_choose_by(
    own: str, said: str, model: str, rows: str, registry: Registry, learned: Path, judged: None
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        evaluated(model, rows, registry, own.replace("MODEL", model).replace("LEARNED", str(learned)))
