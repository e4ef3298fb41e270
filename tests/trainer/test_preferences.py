"""Training from preferences on real reference engines in this process: models of rewards, DPO, KTO, and RL on a reward
model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pair_runs import Recorder, inputs_of, ready, run

from rlsdk.algorithms import RewardModelObjective
from rlsdk.config import (
    PairTraining,
    PlacementConfig,
    Role,
    RunConfig,
    check_run,
    load_config,
)
from rlsdk.config.checks.watched import reported_on_pairs, watch_problems
from rlsdk.interfaces import Batch, BatchError, ConfigError, DataError
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.roles.device_turns import DeviceTurns, shared_pools
from rlsdk.trainer.roles.placement import placement_of, roles
from rlsdk.trainer.roles.session import Session, sharding_manager, start_roles
from rlsdk.trainer.runs.build_rl import rl_stage
from rlsdk.trainer.runs.build_supervised import pair_stage, read_pairs
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.stages.export import export_policy
from rlsdk.trainer.stages.loop import Trainer

HERE = Path(__file__).parent
KINDS = tuple(PairTraining)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The better answer is made of digits, the worse one of letters; both of 1 to 4 characters. The labelled answer is
    one of the two."""
    drawn = random.Random(5)
    lines = []
    for at in range(120):
        right, wrong = ("".join(drawn.choices(kind, k=drawn.randint(1, 4))) for kind in ("0123456789", "qwertyuiop"))
        row = {"question": f"{at % 10} + {at} =", "chosen": right, "rejected": wrong, "margin": drawn.choice([0, 0.5]),
               "answer": (right, wrong)[at % 3 == 1], "label": at % 3 != 1,
               "completions": [wrong[0], right[:1]], "labels": [0.2, None if at % 5 == 2 else True]}  # fmt: skip
        lines.append(json.dumps(row))
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def config_of(model: str, rows: str, registry: Registry, *extra: str) -> RunConfig:
    task = [
        "--model", model, "--data", rows, "--data.num_eval_rows", "16", "--data.max_prompt_tokens", "96",
        "--rollout.max_response_tokens", "5", "--tracking.trackers", "[]", "--eval.every_steps", "4",
        "--preferences.pairs_per_step", "8", "--preferences.lr", "1e-3", "--preferences.steps", "4",
        "--train.micro_batch_rows", "5", "--preferences.step_separator", ";",
    ]  # fmt: skip
    return load_config([], [*task, *extra], registry)


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    ids = batch.padded("input_ids").long()
    return ids, (torch.arange(ids.shape[1])[None] < batch.lengths[:, None]).long()


def answer_log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """`[B]`: summed over each row's response."""
    ids, mask = padded(batch)
    logs = model(input_ids=ids, attention_mask=mask).logits.float().log_softmax(-1)
    picked = logs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return (picked * batch.padded("response_mask")[:, 1:]).sum(1)


def mismatched(batch: Batch) -> Batch:
    """Each prompt of a batch with the answer of the row before it."""
    ids, mask = batch["input_ids"].split(batch.lengths.tolist()), batch["response_mask"].split(batch.lengths.tolist())
    prompts, answers = ([row[on == side].tolist() for row, on in zip(ids, mask, strict=True)] for side in (False, True))
    made = Batch.from_rows([[*prompts[at], *answers[at - 1]] for at in range(len(prompts))])
    starts = torch.tensor([len(prompt) for prompt in prompts])
    return made.with_tokens(response_mask=made.position_ids >= starts[made.row_of_token])


def plain_loss(kind: PairTraining, folder: Path, ref: str, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers and the papers' formulas: one padded pass, nothing of this project."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    if kind is PairTraining.PROCESS_REWARD:
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
        ids, mask = padded(batch)
        values = model(input_ids=ids, attention_mask=mask).logits[..., 0]
        # Rows end with a step of one character, its separator, another such step, and the end token.
        ends = torch.stack([batch.lengths - 3, batch.lengths - 2], 1)
        labels = torch.tensor(
            [
                [0.2, math.nan if math.isnan(last) else 1.0]
                for last in batch["step_labels"][batch.offsets[1:] - 1].tolist()
            ]
        )
        chance = values.gather(1, ends).sigmoid()[labels.isfinite()]
        wanted = labels[labels.isfinite()]
        loss = -(wanted * chance.log() + (1 - wanted) * (1 - chance).log()).mean()
    elif kind is PairTraining.REWARD_MODEL:
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
        ids, mask = padded(batch)
        last = batch.lengths - 1
        scores = model(input_ids=ids, attention_mask=mask).logits[torch.arange(len(ids)), last, 0]
        loss = -F.logsigmoid(scores[0::2] - scores[1::2] - batch["margin"][0::2]).mean()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        frozen = AutoModelForCausalLM.from_pretrained(ref, dtype=torch.float32).eval()
        with torch.no_grad():
            before = answer_log_probs(frozen, batch)
        ratio = answer_log_probs(model, batch) - before
        if kind is PairTraining.DPO:
            loss = -F.logsigmoid(0.3 * (ratio[0::2] - ratio[1::2])).mean()
        else:
            others = mismatched(batch)
            with torch.no_grad():
                kl = (answer_log_probs(model, others) - answer_log_probs(frozen, others)).mean().clamp(min=0)
            value = torch.where(batch["chosen"], ratio - kl, kl - ratio)
            loss = (torch.where(batch["chosen"], 1.5, 0.8) * (1 - (0.3 * value).sigmoid())).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_plain_transformers(
    kind: PairTraining, model: str, rows: str, registry: Registry, tmp_path: Path
) -> None:
    """In micro-batches of five rows, into which two pairs fit; the exported score head is the one that is trained."""
    other = str(write_tiny_model(tmp_path / "other", seed=9))
    extra = {
        PairTraining.REWARD_MODEL: ["--preferences.margin_field", "margin"],
        PairTraining.DPO: ["--preferences.beta", "0.3", "--ref.path", other],
        PairTraining.KTO: [
            "--preferences.beta", "0.3", "--ref.path", other, "--preferences.desirable_weight", "1.5",
            "--preferences.undesirable_weight", "0.8",
        ],
        PairTraining.PROCESS_REWARD: [],
    }[kind]  # fmt: skip
    config = config_of(model, rows, registry, *extra)
    session = ready(config, kind, registry)
    of_pairs = kind.reads_pairs
    with closing(inputs_of(kind, config, registry, tmp_path, Recorder())) as run_inputs:
        stage = pair_stage(kind, run_inputs, read_pairs(kind, run_inputs), session)
        export_policy(session, run_inputs.tokenizer, tmp_path / "model")
    batch = stage._estimated(*stage._rows(stage.pairs, range(11)))
    engine: Any = session.actor.group.hosts[0].engine  # type: ignore[attr-defined]
    found = engine.forward_backward(batch, stage.options.objective)
    assert found.num_micro_batches == (6 if of_pairs else 3)
    loss, gradients = plain_loss(kind, tmp_path / "model", other, batch)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.sums["metric_weight"] == pytest.approx(1.0)
    trained = engine.engine.parameters
    assert gradients.keys() <= trained.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(trained[name].grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_training_that_is_resumed_goes_on_number_for_number(
    kind: PairTraining, model: str, rows: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(model, rows, registry, "--preferences.steps", "5", "--preferences.save_every_steps", "2")
    whole = run(config, kind, registry, tmp_path / "whole")
    first = run(config, kind, registry, tmp_path / "part", stop=lambda stage: stage.step >= 3)
    assert first.trainer.last_checkpoint is not None
    assert first.trainer.last_checkpoint.parent.name == kind.checkpoints
    rest = run(config, kind, registry, tmp_path / "part")
    assert [len(first.view.steps), len(rest.view.steps)] == [3, 2]
    assert [*first.view.steps, *rest.view.steps] == whole.view.steps
    assert [*first.view.evals, *rest.view.evals] == whole.view.evals
    first_eval = rest.stage.evaluations.first
    assert first_eval is not None
    assert {name: first_eval[name] for name in whole.view.evals[0]} == whole.view.evals[0]
    assert len({step["loss"] for step in whole.view.steps}) == 5


def digits(folder: Path) -> float:
    """Share of the greedy responses' characters that are digits, by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = ""
    for at in range(200, 216):
        ids = torch.tensor([tokenizer(f"{at % 10} + {at} =", add_special_tokens=False)["input_ids"]])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        text += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_raises_margin_accuracy_and_what_greedy_answers_hold(
    loss: str, model: str, rows: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(
        model, rows, registry, "--preferences.steps", "20", "--preferences.loss", loss, "--preferences.lr", "3e-4"
    )
    done = run(config, PairTraining.DPO, registry, tmp_path / "run", export=tmp_path / "after")
    before, after = done.view.evals[0], done.view.evals[-1]
    assert set(after) == set(reported_on_pairs(config, PairTraining.DPO).metrics)
    # The policy begins as the reference: no pair is ahead, and the loss is what it is at a ratio of 1.
    assert before["eval/reward_margin_pairs"] == pytest.approx(0.0, abs=1e-5)
    assert before["eval/loss_pairs"] == pytest.approx({"sigmoid": 0.693147, "ipo": 25.0}[loss], rel=1e-4)
    assert after["eval/accuracy_pairs"] == 1.0
    assert after["eval/loss_pairs"] < before["eval/loss_pairs"]
    assert after["eval/reward_margin_pairs"] > 0.1
    assert after["eval/chosen_reward_pairs"] > after["eval/rejected_reward_pairs"]
    assert digits(tmp_path / "after") > digits(Path(model)) + 0.3


def test_a_reward_model_learns_pairs_and_reinforcement_learning_follows_it(
    model: str, rows: str, registry: Registry, tmp_path: Path
) -> None:
    """Its folder is what `reward_models` loads; the run sees no other reward than its scores."""
    config = config_of(model, rows, registry, "--preferences.steps", "20", "--preferences.center_coef", "0.01")
    done = run(config, PairTraining.REWARD_MODEL, registry, tmp_path / "rm", export=tmp_path / "scores")
    before, after = done.view.evals[0], done.view.evals[-1]
    assert set(after) == set(reported_on_pairs(config, PairTraining.REWARD_MODEL).metrics)
    watch = load_config([], ["--checkpoint.best.metric", "eval/acuracy_pairs"], registry)
    (problem,) = watch_problems(watch, reported_on_pairs(watch, PairTraining.REWARD_MODEL))
    assert "did you mean 'eval/accuracy_pairs'" in str(problem)
    assert before["eval/accuracy_pairs"] < 0.95
    assert after["eval/accuracy_pairs"] == 1.0
    assert after["eval/score_margin_pairs"] > before["eval/score_margin_pairs"] + 1.0
    fields = json.loads((tmp_path / "scores" / "config.json").read_text())
    rl = config_of(
        model, rows, registry, "--reward_models", f"[{{path: {tmp_path / 'scores'}, name: pairs}}]",
        "--rewards", f"[{{name: '{HERE / 'rewards.py'}:share_of_digits', weight: 0.0}}]",
        "--trainer.steps", "12", "--trainer.prompts_per_step", "8", "--trainer.samples_per_prompt", "8",
        "--train.optim.lr", "1e-3", "--eval.every_steps", "null", "--trainer.save_every_steps", "null",
    )  # fmt: skip
    scores = {"reward.pairs": fields}
    assert check_run(rl, registry, "qwen2", "cpu", model={"model_type": "qwen2"}, models=scores) == []
    steps = reinforce(rl, registry, tmp_path / "rl")
    first, last = steps[0], steps[-1]
    assert last["reward/reward.pairs"] > first["reward/reward.pairs"] + 1.0
    share = next(name for name in first if name.startswith("reward/") and "share_of_digits" in name)
    assert last[share] > first[share] + 0.3


def reinforce(config: RunConfig, registry: Registry, folder: Path) -> Sequence[Mapping[str, float]]:
    folder.mkdir()
    table, view = roles(config, "cpu"), Recorder()
    placement = placement_of(PlacementConfig(), [role.name for role in table], "cpu")
    turns = DeviceTurns(shared=shared_pools(placement))

    def build(role: Role) -> Any:
        return start_in_process(role, registry)

    groups = start_roles(table, build, turns)
    manager = sharding_manager(config.sharding, registry, groups["actor"], groups["rollout"], timeout_s=60.0)
    session = Session(roles=groups, turns=turns, cluster=InProcessStore(), manager=manager)
    with closing(build_run_inputs(config, registry, folder, view)) as run_inputs:
        stage = rl_stage(config, registry, run_inputs, session)
        with closing(stage):
            Trainer(stage, session, tokenizer=run_inputs.tokenizer, config_text="", keep_checkpoints=1).fit()
    return view.steps


def refused(tmp_path: Path, model: str, registry: Registry, made: list[dict[str, Any]], *extra: str) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{at} =", **row}) for at, row in enumerate(made)))
    config = config_of(model, str(path), registry, "--eval.every_steps", "null", *extra)
    session = ready(config, PairTraining.DPO, registry)
    with (
        pytest.raises(DataError) as caught,
        closing(build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False, of_pairs=True)) as run_inputs,
    ):
        pair_stage(PairTraining.DPO, run_inputs, read_pairs(PairTraining.DPO, run_inputs), session)
    return str(caught.value)


def test_rows_that_are_no_pairs_are_refused_by_file_line_and_field(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    good = {"chosen": "1", "rejected": "2"}
    said = refused(tmp_path, model, registry, [good, {"choosen": "1", "rejected": "2"}])
    assert "rows.jsonl:2" in said
    assert "no field 'chosen', did you mean 'choosen'" in said.replace("; did", ", did")
    assert "preferences.chosen_field" in said
    said = refused(tmp_path, model, registry, [good], "--preferences.rejected_field", "worse")
    assert "'worse' (preferences.rejected_field)" in said.replace("'worse';", "'worse'")
    said = refused(tmp_path, model, registry, [{**good, "chosen": 3}])
    assert "must be a text, or a list of messages that ends in" in said
    assert "got '3'" in said
    said = refused(tmp_path, model, registry, [{**good, "m": "big"}], "--preferences.margin_field", "m")
    assert "'m' (preferences.margin_field) must be a number of at least 0, got 'big'" in said
    said = refused(tmp_path, model, registry, [{"chosen": "7", "rejected": "7"}, {"chosen": "123456", "rejected": "1"}])
    assert "no pair is left to learn from: 0 of 2 pairs are used; 1 left out, whose answers are equal" in said
    assert "1 left out with an answer of over 5 tokens" in said
    assert "rollout.max_response_tokens 5" in said


def test_equal_and_long_answers_are_left_out_and_counted(
    model: str, registry: Registry, rows: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    kept = {"chosen": [{"role": "user", "content": "0 ="}, {"role": "assistant", "content": "12"}], "rejected": "3"}
    made = [kept, {"chosen": "1", "rejected": "1"}, {"chosen": "12345", "rejected": "123456"}]
    path.write_text("\n".join(json.dumps({"question": f"{at} =", **row}) for at, row in enumerate(made)))
    for choice, expected in (("drop", 1), ("cut", 1)):
        # Cut to five tokens each, the answers of the third row are equal.
        config = config_of(
            model, str(path), registry, "--eval.every_steps", "null", "--preferences.long_answers", choice
        )
        view, session = Recorder(), ready(config, PairTraining.REWARD_MODEL, registry)
        with closing(build_run_inputs(config, registry, tmp_path, view, rewarded=False, of_pairs=True)) as run_inputs:
            stage = pair_stage(
                PairTraining.REWARD_MODEL, run_inputs, read_pairs(PairTraining.REWARD_MODEL, run_inputs), session
            )
        assert len(stage.pairs) == expected
        assert [line for line in view.notices if line.startswith("train pairs: 1 of 3 pairs are used")]
        tokens = run_inputs.tokenizer("12", add_special_tokens=False)["input_ids"]
        assert list(stage.pairs.chosen[0]) == [*tokens, run_inputs.tokenizer.eos_token_id]


def test_settings_that_contradict_one_another_are_refused(model: str, rows: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match="needs loss 'sigmoid'"):
        config_of(model, rows, registry, "--preferences.loss", "ipo", "--preferences.label_smoothing", "0.1")
    with pytest.raises(ConfigError, match="name two fields"):
        config_of(model, rows, registry, "--preferences.chosen_field", "rejected")
    with pytest.raises(ConfigError, match=r"expected fewer than preferences\.steps 4"):
        config_of(model, rows, registry, "--preferences.warmup_steps", "4", "--preferences.schedule", "linear")


def test_a_pair_twice_in_a_step_counts_twice(model: str, rows: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, rows, registry)
    session = ready(config, PairTraining.REWARD_MODEL, registry)
    with closing(build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False, of_pairs=True)) as run_inputs:
        stage = pair_stage(
            PairTraining.REWARD_MODEL, run_inputs, read_pairs(PairTraining.REWARD_MODEL, run_inputs), session
        )
    batch = stage.pairs.batch([3, 3, 5])
    assert batch["uid"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["row_weight"].tolist() == pytest.approx([1 / 3] * 6)


@pytest.mark.parametrize("rows_in_pass", [1, 2, 3, 7])
def test_an_engine_keeps_pairs_together_where_the_objective_asks_it(
    rows_in_pass: int, model: str, rows: str, registry: Registry, tmp_path: Path
) -> None:
    """Rows of like length go together, and pairs are of unlike length: every cut would part some."""
    config = config_of(model, rows, registry, "--train.micro_batch_rows", str(rows_in_pass))
    session = ready(config, PairTraining.REWARD_MODEL, registry)
    with closing(build_run_inputs(config, registry, tmp_path, Recorder(), rewarded=False, of_pairs=True)) as run_inputs:
        stage = pair_stage(
            PairTraining.REWARD_MODEL, run_inputs, read_pairs(PairTraining.REWARD_MODEL, run_inputs), session
        )
    batch = stage.pairs.batch(range(9))
    engine: Any = session.actor.group.hosts[0].engine  # type: ignore[attr-defined]
    cut = engine.forward_backward(batch, RewardModelObjective())
    assert cut.num_micro_batches == -(-9 // max(rows_in_pass // 2, 1))
    if rows_in_pass == 1:
        with pytest.raises(BatchError, match="whole pairs in every mini-batch and micro-batch"):
            engine.forward_backward(batch, replace(RewardModelObjective(), whole_groups=False))
