"""Files of log-probs: `rlsdk generate --log-probs` writes what the teacher computes, and `rlsdk distill` learns it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_distill import logits, models, registry, stage_of
from test_keep import rollout_here

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.config import RunConfig, load_config
from rlsdk.config.checks.training import Training, training_problems
from rlsdk.interfaces import BatchError, ConfigError, DataError
from rlsdk.registry import Registry
from rlsdk.trainer.inputs.log_prob_files import LogProbFile
from rlsdk.trainer.runs import keep
from rlsdk.trainer.runs.keep_rules import KeepRule
from rlsdk.trainer.runs.sampled_log_probs import LogProbs

__all__ = ["models", "registry"]

K = 5
DISTILLATION = "--algorithm.distillation."
TASK = ("--data.max_prompt_tokens", "32", "--rollout.max_response_tokens", "12", "--tracking.trackers", "[]")
STEPS = ("--sft.steps", "4", "--sft.rows_per_step", "6", "--sft.lr", "3e-3", "--data.num_eval_rows", "2")


def written(model: str, folder: Path, registry: Registry, *extra: str, rule: str = "all") -> tuple[str, str]:
    """Rows and file of a teacher's samples."""
    asked, rows, file = folder / "asked.jsonl", folder / "rows.jsonl", folder / "rows.safetensors"
    made = [{"question": f"{at}+{at}=", "answer": str(2 * at), "task": "ab"[at % 2]} for at in range(16)]
    asked.write_text("\n".join(map(json.dumps, made)))
    flags = ["--model", model, "--data", str(asked), *TASK, "--eval.every_steps", "null", *extra]
    found = keep.keep_samples(
        load_config([], flags, registry), registry, KeepRule.parse(rule), num_prompts=None, num_samples=2,
        notice=lambda text: None, log_probs=LogProbs(count=K, path=file),
    )  # fmt: skip
    rows.write_text("\n".join(map(json.dumps, found)))
    return str(rows), str(file)


@pytest.fixture(scope="module")
def given(models: tuple[str, str], registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A teacher's samples, most of which were cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keep, "open_rollout", rollout_here)  # without a cluster around it
        return written(models[1], tmp_path_factory.mktemp("given"), registry)


def config_of(model: str, rows: str, teachers: Any, registry: Registry, *extra: str) -> RunConfig:
    flags = ["--model", model, "--data", rows, *TASK, *STEPS, "--teachers", json.dumps(teachers), "--eval.every_steps"]
    return load_config([], [*flags, "50", f"{DISTILLATION}top_k", str(K), *extra], registry)


def of_file(model: str, given: tuple[str, str], registry: Registry, objective: str, *extra: str) -> RunConfig:
    flags = (f"{DISTILLATION}objective", objective, f"{DISTILLATION}divergence", "forward")
    return config_of(model, given[0], [{"log_probs": given[1]}], registry, *flags, *extra)


def test_a_file_gives_the_numbers_of_its_teacher(
    models: tuple[str, str], given: tuple[str, str], registry: Registry, tmp_path: Path
) -> None:
    """Of the tokens that were sampled, cut answers too: what the same teacher computes in a train engine."""
    rows = [json.loads(line) for line in Path(given[0]).read_text().splitlines()]
    assert {row["truncated"] for row in rows} == {True, False}
    stage = stage_of(of_file(models[0], given, registry, "top_k"), registry, tmp_path / "file")
    top_k = (f"{DISTILLATION}objective", "top_k")
    live = stage_of(config_of(models[0], given[0], [{"path": models[1]}], registry, *top_k), registry, tmp_path / "l")
    prompts = stage.stream.take(12)
    batch = stage.weighed(prompts)
    mask = batch["response_mask"]
    tokens = [[*row.token_ids[slice(*row.learned[0])]] for prompt in prompts for row in stage.rows[prompt.index]]
    cut = [not ids or ids[-1] != tokens[0][-1] for ids in tokens]
    assert any(len(ids) == 12 for ids in tokens)
    assert any(not one for one in cut)
    expected = live._teachers.outputs("teacher", batch.with_meta(top_k=K), ("log_probs", "top_ids", "top_log_probs"))
    same = {"rtol": 0.0, "atol": 1e-5}
    torch.testing.assert_close(batch["teacher_log_probs"][mask], expected["log_probs"][mask], **same)
    torch.testing.assert_close(batch["teacher_top_log_probs"][mask], expected["top_log_probs"][mask], **same)
    assert (batch["teacher_top_ids"][mask] == expected["top_ids"][mask]).double().mean() > 0.99  # but for ties
    stage.begin()
    steps = [stage.advance() for _ in range(4)]
    assert steps[-1]["distill/divergence"] < steps[0]["distill/divergence"]
    assert steps[0]["distill/teacher_share"] == pytest.approx(1.0)


def test_sampled_tokens_of_a_teacher_estimate_the_forward_divergence(
    models: tuple[str, str], given: tuple[str, str], registry: Registry, tmp_path: Path
) -> None:
    """By plain transformers: the mean gap, and the gradient of the negative log-likelihood; one of two tasks."""
    config = of_file(
        models[0], given, registry, "sampled", f"{DISTILLATION}coef", "0.5", f"{DISTILLATION}sft_coef", "0.25"
    )
    (teacher,) = config.teachers
    taught = teacher.model_copy(update={"rows": {"task": ("a",)}, "weight": 0.5})
    stage = stage_of(config.model_copy(update={"teachers": (taught,)}), registry, tmp_path / "run")
    prompts = stage.stream.take(9)
    batch = stage.weighed(prompts)
    engine: Any = stage.session.actor.group.hosts[0].engine  # type: ignore[attr-defined]
    found = engine.forward_backward(batch, stage.objective)
    model, own = logits(models[0], batch)
    with torch.no_grad():
        _, other = logits(models[1], batch)
    own, theirs = (one.log_softmax(-1).gather(1, batch["input_ids"][:, None])[:, 0] for one in (own, other))
    weight = batch["response_mask"] / batch["response_mask"].sum()
    is_taught = torch.tensor([prompt.row["task"] == "a" for prompt in prompts])[batch.row_of_token]
    (weight * (0.5 * 0.5 * is_taught * (theirs - own) - 0.25 * own)).sum().backward()
    expected = (weight * (0.25 * is_taught * (theirs - own) - 0.25 * own)).sum()
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            engine.engine.parameters[name].grad.double(), parameter.grad, rtol=1e-3, atol=2e-6, msg=name
        )


def changed(path: str, to: Path, change: Callable[[dict[str, torch.Tensor]], None], **about: str) -> str:
    """A copy of a file with other tensors or metadata."""
    tensors = load_file(path)
    change(tensors)
    with safe_open(path, framework="pt") as file:
        save_file(tensors, to, metadata={**file.metadata(), **about})
    return str(to)


def nothing(tensors: dict[str, torch.Tensor]) -> None: ...


DAMAGES: Mapping[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "short": (lambda t: t.update(lengths=t["lengths"][:-1].clone()), r"lengths is I32 \[.*\], and not int32"),
    "lost": (lambda t: t.__delitem__("top_ids"), "it lacks top_ids"),
    "other": (lambda t: t.update(lengths=t["lengths"] * 2), "its answers have .* tokens, and it holds"),
    "twice": (lambda t: t.update(keys=t["keys"][:1].repeat(len(t["keys"]), 1)), "it holds an answer twice"),
}


def test_what_is_no_whole_file_is_refused_when_it_is_opened(given: tuple[str, str], tmp_path: Path) -> None:
    for name, (change, said) in DAMAGES.items():
        with pytest.raises(ConfigError, match=f"is damaged .{said}.*write it again"):
            LogProbFile(changed(given[1], tmp_path / name, change))
    cut = tmp_path / "cut"
    cut.write_bytes(Path(given[1]).read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"is damaged \(.*write it again"):
        LogProbFile(str(cut))
    with pytest.raises(ConfigError, match=r"is no file of log-probs .*`rlsdk generate --log-probs K` writes one"):
        LogProbFile(changed(given[1], tmp_path / "kind", nothing, format="other"))
    with pytest.raises(ConfigError, match=r"no such file; `rlsdk generate --log-probs K` writes one"):
        LogProbFile(str(tmp_path / "none"))


def test_numbers_that_are_no_log_probs_end_the_run(
    models: tuple[str, str], given: tuple[str, str], registry: Registry, tmp_path: Path
) -> None:
    for value, said in {
        0.5: r"no log-probs: above 0, or not finite",
        -0.01: r"add up to [2-9]\.\d+ at a token",
    }.items():
        file = changed(given[1], tmp_path / "f", lambda t, value=value: t["top_log_probs"].fill_(value))  # type: ignore[misc]
        stage = stage_of(of_file(models[0], (given[0], file), registry, "top_k"), registry, tmp_path / f"{value}")
        with pytest.raises((ConfigError, BatchError), match=said):
            stage.weighed(stage.stream.take(2))


def test_rows_and_tokenizers_of_others_are_refused_before_a_role_starts(
    models: tuple[str, str], given: tuple[str, str], registry: Registry, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in Path(given[0]).read_text().splitlines()]
    rows[3]["answer"] += "7"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"teachers.0.log_probs .*lacks 1 row of .*rows.jsonl:4.*is found by"):
        stage_of(
            of_file(models[0], (str(tmp_path / "rows.jsonl"), given[1]), registry, "top_k"), registry, tmp_path / "r"
        )

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors["vocabulary_bytes"][:] = tensors["vocabulary_bytes"].flip(0)

    other = changed(given[1], tmp_path / "other", swap)
    with pytest.raises(ConfigError, match=r"teachers.0.log_probs .*token 0 is '<pad>' here and is .* there"):
        stage_of(of_file(models[0], (given[0], other), registry, "top_k"), registry, tmp_path / "t")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ((f"{DISTILLATION}top_k", "9"), rf"top_k: 9: expected at most {K}, the tokens that teachers.0.log_probs"),
        ((f"{DISTILLATION}objective", "exact"), r"'top_k' or 'sampled', because teachers.0 is a file of log-probs"),
        (("--rollout.max_response_tokens", "8"), r"rollout.max_response_tokens: 8: expected at least 12"),
        (
            ("--sft.answer_template", "{answer}!"),
            r"sft.answer_template: the tokens of teachers.0.log_probs are learned",
        ),
    ],
)
def test_what_a_file_cannot_teach_is_refused_when_the_run_is_prepared(
    extra: tuple[str, ...], said: str, models: tuple[str, str], given: tuple[str, str]
) -> None:
    teachers = json.dumps([{"log_probs": given[1]}])
    flags = ["--model", models[0], "--data", given[0], *TASK, *STEPS, "--teachers", teachers]
    flags += [f"{DISTILLATION}objective", "top_k", f"{DISTILLATION}top_k", "3"]
    assert resolve(Settings(flags=flags), Training.DISTILL, device="cpu").config.teachers[0].log_probs == given[1]
    with pytest.raises(ConfigError, match=said):
        resolve(Settings(flags=[*flags, *extra]), Training.DISTILL, device="cpu")


def test_filtered_samples_are_no_estimate(
    models: tuple[str, str], registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep, "open_rollout", rollout_here)
    _, file = written(models[1], tmp_path, registry, "--rollout.top_p", "0.9")
    flags = ["--model", models[0], "--data", str(tmp_path / "rows.jsonl"), *TASK, *STEPS]
    flags += ["--teachers", json.dumps([{"log_probs": file}]), f"{DISTILLATION}objective"]
    resolve(Settings(flags=[*flags, "top_k", f"{DISTILLATION}top_k", "3"]), Training.DISTILL, device="cpu")
    with pytest.raises(ConfigError, match="so that the gap is no estimate"):
        resolve(Settings(flags=[*flags, "sampled"]), Training.DISTILL, device="cpu")


def test_a_file_teaches_given_answers_only(models: tuple[str, str], given: tuple[str, str], registry: Registry) -> None:
    config = config_of(models[0], given[0], [{"log_probs": given[1]}], registry)
    (said,) = [one for one in training_problems(Training.RL, config) if one.path.startswith("teachers")]
    assert "see `rlsdk distill`" in str(said)
    with pytest.raises(ConfigError, match=r"teachers.0.path: and log_probs .* a file has its log-probs without it"):
        config_of(models[0], given[0], [{"log_probs": given[1], "path": models[1]}], registry)
