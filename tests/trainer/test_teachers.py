"""Teachers: frozen models whose log-probs of the policy's samples give advantages, on real engines in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import HERE, TASK, Recorder, config_of, model, registry, run, trainer_of
from test_made_by import settings_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlsdk.config import RunConfig, check_run, load_config, needed_roles
from rlsdk.interfaces import Batch, BatchError, ConfigError, DataError
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.planning.calibration import planned_passes
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.inputs.teacher_tokenizers import token_bytes
from rlsdk.trainer.inputs.teachers import OwnPrompts, row_field

__all__ = ["model", "registry"]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of other weights, and one with another number of layers and a padded vocabulary."""
    folder = tmp_path_factory.mktemp("teachers")
    made = [write_tiny_model(folder / f"{seed}", seed=seed, sharpness=2.0) for seed in (5, 6)]
    return [str(path) for path in (*made, write_tiny_model(folder / "wide", seed=7, layers=1, vocab_size=160))]


def alone(model: str, registry: Registry, steps: int, given: Any, *extra: str) -> RunConfig:
    """A run without rewards."""
    task = ["--model", model, *TASK, "--trainer.steps", str(steps), "--teachers", json.dumps(given)]
    return load_config([], [*task, "--algorithm", "on_policy_distillation", *extra], registry)


def trained(config: RunConfig, registry: Registry, folder: Path) -> tuple[Recorder, list[Batch]]:
    """The view of a run, and the batch of each step."""
    view, batches = Recorder(), []
    with trainer_of(config, registry, folder, view) as (trainer, stage, _):
        algorithm = stage.learner.algorithm
        updates = algorithm.updates

        def kept(batch: Batch, *, step: int) -> Any:
            batches.append(batch)
            return updates(batch, step=step)

        algorithm.updates = kept  # type: ignore[method-assign]
        trainer.fit()
    return view, batches


def plain_log_probs(path: str, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """`[N]` by transformers, row by row."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = torch.zeros(batch.num_tokens)
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids = batch["input_ids"][start:end]
        with torch.no_grad():
            logits = plain(ids[None]).logits[0, :-1] / temperature
        found[start + 1 : end] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return found


def test_teachers_give_the_advantages_of_the_formula_to_the_rows_that_they_teach(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """Two teachers, one of some rows, the other of all and at another temperature; and rewards."""
    rows = [{"question": f"{at} + {at} =", "answer": str(2 * at), "task": "ab"[at % 2]} for at in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [
        {"path": teachers[0], "name": "a", "rows": {"task": ["a"]}, "weight": 0.5},
        {"path": teachers[2], "name": "every", "temperature": 2.0},
    ]
    config = config_of(
        model, registry, 2, "--data", str(tmp_path / "rows.jsonl"), "--teachers", json.dumps(given),
        "--algorithm.distillation.coef", "0.7", "--algorithm.distillation.reward_coef", "0.4",
        "--trainer.updates_per_step", "1", "--trainer.seed", "3",
    )  # fmt: skip
    assert needed_roles(config) == ("actor", "rollout", "teacher.a", "teacher.every")
    assert [(one.role, one.field) for one in planned_passes(config, registry).passes] == [
        ("actor", "old_log_probs"), ("teacher.a", "teacher_log_probs.a"), ("teacher.every", "teacher_log_probs.every"),
    ]  # fmt: skip
    view, batches = trained(config, registry, tmp_path / "run")
    without = run(
        config_of(model, registry, 1, "--data", str(tmp_path / "rows.jsonl"), "--trainer.seed", "3"),
        registry,
        tmp_path / "plain",
    )
    batch, mask = batches[0], batches[0]["response_mask"]
    of_a = mask & batch[row_field("teacher.a")][batch.row_of_token]
    assert 0 < int(of_a.sum()) < int(mask.sum())
    policy = plain_log_probs(model, batch)
    gaps = plain_log_probs(teachers[0], batch) - policy, plain_log_probs(teachers[2], batch, 2.0) - policy
    scores = batch["scores"].view(4, 4)
    normal = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    expected = 0.4 * normal.view(-1)[batch.row_of_token].float() + 0.7 * gaps[1] + 0.35 * torch.where(of_a, gaps[0], 0)
    torch.testing.assert_close(batch["advantages"][mask], expected[mask], rtol=1e-3, atol=2e-3)
    assert not batch["advantages"][~mask].any()
    first = view.steps[0]
    assert first["teacher/tokens"] == first["teacher/every/tokens"] == int(mask.sum())
    assert (first["teacher/share"], first["teacher/a/tokens"]) == (1.0, int(of_a.sum()))
    assert first["teacher/a/gap"] == pytest.approx(-float(gaps[0][of_a].mean()), abs=1e-4)
    assert first["teacher/every/gap"] == pytest.approx(-float(gaps[1][mask].mean()), abs=1e-4)
    assert first["reward/mean"] == without.steps[0]["reward/mean"]  # the samples are the same
    assert "teacher.a teaches 12 of 24 training rows" in view.notices


def test_a_teacher_alone_teaches_without_rewards_and_its_gap_shrinks(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    more = ("--trainer.samples_per_prompt", "16", "--train.optim.lr", "3e-3", "--trainer.updates_per_step", "1")
    config = alone(model, registry, 15, teachers[0], *more)
    assert not config.rewards
    view = run(config, registry, tmp_path / "run")
    gaps = [step["teacher/gap"] for step in view.steps]
    assert sum(gaps[-3:]) < 0.8 * sum(gaps[:3])
    assert not [text for text in view.notices if text.startswith("warning")]


def test_a_run_with_teachers_resumes_and_repeats_number_for_number(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """One step off policy, several updates, devices in turns."""
    extra = ("--schedule.max_staleness", "1", "--placement.preset", "disaggregated",
             "--placement.devices_per_node", "3")  # fmt: skip
    config = alone(model, registry, 4, teachers[0], *extra)
    whole = run(config, registry, tmp_path / "whole")
    assert [round(step["schedule/staleness_max"]) for step in whole.steps[1:]] == [1, 1, 1]
    turns = run(alone(model, registry, 4, teachers[0], *extra), registry, tmp_path / "turns", forced=True)
    view, rest = Recorder(), Recorder()
    with trainer_of(config, registry, tmp_path / "part", view, stop=lambda: len(view.steps) == 2) as (trainer, _, _):
        trainer.fit()
    with trainer_of(config, registry, tmp_path / "part", rest) as (trainer, _, _):
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        trainer.fit()

    def learned(steps: Sequence[Any]) -> list[dict[str, float]]:
        return [{k: v for k, v in step.items() if k.startswith(("policy/", "teacher/"))} for step in steps]

    assert learned([*view.steps, *rest.steps]) == learned(whole.steps) == learned(turns.steps)


def test_a_token_that_should_have_a_teacher_and_has_none_ends_the_step(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    config = alone(model, registry, 1, teachers[0])
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, stage, _):
        forward = stage.learner.forward

        def lossy(role: str, batch: Batch, output: str) -> torch.Tensor:
            found = forward(role, batch, output)
            if role == "teacher":
                found[batch["response_mask"].nonzero()[3]] = float("nan")
            return found

        stage.learner.forward = lossy  # type: ignore[method-assign]
        with pytest.raises(BatchError, match=r"teacher: 1 of \d+ tokens that it should teach have no finite number"):
            trainer.fit()


def test_a_token_beyond_a_teachers_vocabulary_is_refused_by_name(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    small = str(write_tiny_model(tmp_path / "small", seed=3, vocab_size=100))
    config = alone(model, registry, 1, small)
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (_, stage, _):
        batch = Batch.from_rows([[1, 110]]).with_tokens(response_mask=torch.tensor([False, True]))
        with pytest.raises(
            BatchError, match=r"teachers.0.path .* has vocab_size 100, and the policy sampled token 110"
        ):
            stage.learner.forward("teacher", batch, "log_probs")


def changed_tokenizer(source: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A model whose tokenizer differs from another one's by `change` of its tokenizer.json."""
    write_tiny_model(folder)
    fields = json.loads((Path(source) / "tokenizer.json").read_text())
    change(fields)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return str(folder)


def test_a_tokenizer_that_reads_an_id_otherwise_is_refused_with_the_first_such_token(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    def refused(change: Callable[[dict[str, Any]], None], name: str, match: str) -> None:
        config = alone(model, registry, 1, changed_tokenizer(model, tmp_path / name, change))
        with pytest.raises(ConfigError, match=match), trainer_of(config, registry, tmp_path / f"r{name}", Recorder()):
            pass

    def swap(fields: dict[str, Any]) -> None:
        vocabulary = fields["model"]["vocab"]
        vocabulary["3"], vocabulary["7"] = vocabulary["7"], vocabulary["3"]

    def rename(fields: dict[str, Any]) -> None:
        special = fields["added_tokens"][0]["content"]
        fields["added_tokens"][0]["content"] = "<other>"
        fields["model"]["vocab"]["<other>"] = fields["model"]["vocab"].pop(special)

    plain = AutoTokenizer.from_pretrained(model)
    three = plain.convert_tokens_to_ids("3")
    refused(swap, "swapped", rf"teachers.0.path .* token {three} is '3' here and is '7' there\. A teacher gets")
    special = json.loads((Path(model) / "tokenizer.json").read_text())["added_tokens"][0]
    refused(rename, "special", rf"token {special['id']} is '{special['content']}' here and is '<other>' there")


def test_tokens_of_every_kind_of_vocabulary_are_compared_by_their_bytes() -> None:
    byte_level = Tokenizer(models.BPE(vocab={"Ġa": 0, "Ã": 1, "é": 2}, merges=[]))
    byte_level.pre_tokenizer, byte_level.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    pieces = Tokenizer(models.BPE(vocab={"▁a": 0, "<0xC3>": 1, "<0xE9>": 2}, merges=[], byte_fallback=True))
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    both = [PreTrainedTokenizerFast(tokenizer_object=one) for one in (byte_level, pieces)]
    for one in both:
        one.add_special_tokens({"additional_special_tokens": ["<|énd|>"]})
    assert token_bytes(both[0]) == token_bytes(both[1]) == {0: b" a", 1: b"\xc3", 2: b"\xe9", 3: "<|énd|>".encode()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"rows": {"tsk": ["a"]}}], r"teachers.0.rows.tsk: no data row has a field 'tsk'; did you mean 'task'\?"),
        ([{"rows": {"task": ["c"]}}], r"teachers.0.rows.task: no data row has 'c' there"),
        ([{"rows": {"task": ["a"]}}], r"teachers: 12 of 24 training rows have neither a teacher nor a reward"),
        ([{"rows": {"task": ["a"], "odd": [True]}}], r"teachers.0: teaches none of the 24 training rows, because no r"),
    ],
)
def test_rows_without_a_teacher_and_teachers_without_rows_are_refused(
    given: list[dict[str, Any]], message: str, model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    rows = [{"question": f"{at} + {at} =", "answer": "0", "task": "ab"[at % 2], "odd": at % 2 == 1} for at in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = [{"path": teachers[0], **one} for one in given]
    config = alone(model, registry, 1, named, "--data", str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=message), trainer_of(config, registry, tmp_path / "run", Recorder()):
        pass


def test_a_teacher_of_sources_teaches_the_rows_of_these_sources(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    files = []
    for name, sign in {"plus": "+", "minus": "-"}.items():
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text(
            "\n".join(json.dumps({"question": f"{at} {sign} 0 =", "answer": "0"}) for at in range(16))
        )
    given = [{"path": path, "name": f"t{at}", "sources": [files[at]]} for at, path in enumerate(teachers[:2])]
    mixed = json.dumps([{"source": one} for one in files])
    flags = [
        "--model",
        model,
        *TASK[2:],
        "--data.mixture",
        mixed,
        "--trainer.steps",
        "1",
        "--teachers",
        json.dumps(given),
    ]
    config = load_config([], [*flags, "--algorithm", "on_policy_distillation"], registry)
    _, (batch,) = trained(config, registry, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = batch.offsets.tolist()
    for row in range(batch.num_rows):
        text = tokenizer.decode(
            batch["input_ids"][ends[row] : ends[row + 1]][~batch["response_mask"][ends[row] : ends[row + 1]]]
        )
        assert [bool(batch[row_field(f"teacher.t{at}")][row]) for at in (0, 1)] == ["+" in text, "-" in text]


def test_distillation_without_a_teacher_is_refused(model: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"teachers: at least one is required, because .*reward_coef is 0"):
        config_of(model, registry, 1, "--algorithm", "on_policy_distillation")


def test_what_a_teacher_needs_is_asked_of_its_backend_by_its_field(model: str, registry: Registry) -> None:
    config = alone(model, registry, 1, [{"path": "t", "backend": "turbbo"}])
    (said,) = [problem for problem in check_run(config, registry, "qwen2") if problem.path.startswith("teachers")]
    assert said.path == "teachers.0.backend"


def test_samples_are_made_by_the_teachers_of_their_run(teachers: list[str]) -> None:
    before, after = settings_of(), settings_of("--teachers", json.dumps([{"path": teachers[0]}]))
    assert before != after


def test_a_student_that_is_its_own_teacher_has_no_gap(model: str, registry: Registry, tmp_path: Path) -> None:
    config = alone(model, registry, 1, model)
    view = run(config, registry, tmp_path / "run")
    assert view.steps[0]["teacher/gap"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("own", [True, False], ids=["another model", "the policy itself"])
def test_a_teacher_may_read_a_prompt_of_its_own(
    own: bool, model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """The answer in the teacher's prompt: its log-probs of the same response behind it, row by row; a second model is
    started only where one is named."""
    given: dict[str, Any] = {"prompt_template": "{prompt} {answer};"} | ({"path": teachers[0]} if own else {})
    config = alone(model, registry, 1, [given], "--trainer.updates_per_step", "1")
    assert needed_roles(config) == (("actor", "rollout", "teacher") if own else ("actor", "rollout"))
    passes = [(one.role, one.output) for one in planned_passes(config, registry).passes]
    assert passes == [("actor", "log_probs"), ("teacher", "log_probs")]
    view, (batch,) = trained(config, registry, tmp_path / "run")
    tokenizer = load_tokenizer(model)
    plain = AutoModelForCausalLM.from_pretrained(teachers[0] if own else model, dtype=torch.float32).eval()
    rows = list(map(json.loads, Path(TASK[1]).read_text().splitlines()))
    read = [[tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts] for texts in (
        [row["question"] for row in rows], [f"{row['question']} {row['answer']};" for row in rows]
    )]  # fmt: skip
    own_prompts = dict(zip(*read, strict=True))
    policy, mask, longer = plain_log_probs(model, batch), batch["response_mask"], 0
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids, sampled = batch["input_ids"][start:end], mask[start:end]
        behind = own_prompts[tuple(ids[~sampled].tolist())]
        longer += len(behind) - int((~sampled).sum())
        whole = torch.tensor([*behind, *ids[sampled].tolist()])
        with torch.no_grad():
            logs = plain(whole[None]).logits[0, :-1].log_softmax(-1).gather(-1, whole[1:, None])[:, 0]
        expected = logs[len(behind) - 1 :] - policy[start:end][sampled]
        torch.testing.assert_close(batch["advantages"][start:end][sampled], expected, rtol=1e-3, atol=1e-3)
    assert longer > 0
    assert view.steps[0]["teacher/gap"] != pytest.approx(0.0, abs=1e-3)


def test_the_policy_as_it_was_at_the_start_teaches_from_below_its_adapter(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """No second model; as the model that the run began with, in every step."""
    rewards = ("--reward", f"{HERE / 'rewards.py'}:share_of_digits", "--algorithm.distillation.reward_coef", "1.0")
    flags = ("--model.lora.rank", "4", "--trainer.updates_per_step", "1", "--train.optim.lr", "3e-2", *rewards)
    config = alone(model, registry, 3, [{"weights": "start"}], *flags)
    assert needed_roles(config) == ("actor", "rollout")
    view, batches = trained(config, registry, tmp_path / "run")
    for batch in batches:
        mask = batch["response_mask"]
        expected = plain_log_probs(model, batch)[mask]
        torch.testing.assert_close(batch["teacher_log_probs"][mask], expected, rtol=1e-4, atol=1e-4)
    gaps = [step["teacher/gap"] for step in view.steps]
    assert gaps[0] == pytest.approx(0.0, abs=1e-6)
    assert abs(gaps[2]) > 1e-4
    with pytest.raises(ConfigError, match=r"teachers.0.weights.*only a policy with an adapter"):
        alone(model, registry, 1, [{"weights": "start"}])
    with pytest.raises(ConfigError, match="start belongs to a teacher without a path"):
        alone(model, registry, 1, [{"path": model, "weights": "start"}])


def test_a_template_that_cannot_be_filled_or_taught_is_refused(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    config = alone(model, registry, 1, [{"path": teachers[0], "prompt_template": "{prompt}{solution}"}])
    with pytest.raises(DataError, match="solution"), trainer_of(config, registry, tmp_path / "run", Recorder()):
        pass
    with pytest.raises(ConfigError, match="null is the policy itself, which needs a prompt_template of its own"):
        alone(model, registry, 1, [{"name": "me"}])


def test_a_row_that_does_not_begin_with_its_prompt_is_refused() -> None:
    batch = Batch.from_rows([[1, 2, 3]], uid=torch.tensor([7]))
    batch = batch.with_tokens(response_mask=torch.tensor([False, False, True]))
    with pytest.raises(BatchError, match=r"row_id 0 \(uid 7\) does not begin with its prompt"):
        OwnPrompts({7: ([1, 4], [5])}).read(batch)
    read = OwnPrompts({7: ([1, 2], [5, 6, 7])}).read(batch)
    assert read["input_ids"].tolist() == [5, 6, 7, 3]
    assert read["response_mask"].tolist() == [False, False, False, True]
    back = OwnPrompts({7: ([1, 2], [5, 6, 7])}).back(batch, {"log_probs": torch.tensor([0.0, 0.1, 0.2, 0.3])})
    assert back["log_probs"].tolist() == [0.0, 0.0, pytest.approx(0.3)]
