"""Teachers that teach by the divergence over the whole vocabulary, on real engines in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_loop import Recorder, config_of, model, registry, run, trainer_of
from test_teachers import alone, teachers, trained
from transformers import AutoModelForCausalLM

from rlsdk.interfaces import Batch, ConfigError
from rlsdk.planning.calibration import planned_passes
from rlsdk.registry import Registry
from rlsdk.trainer.inputs.teachers import row_field

__all__ = ["model", "registry", "teachers"]


def plain_divergence(policy: str, teacher: str, batch: Batch, share: float, temperature: float = 1.0) -> torch.Tensor:
    """`[N]` by transformers, with probabilities of both models; 0 at the first position of each row."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (policy, teacher)]
    found = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids = batch["input_ids"][start:end]
        with torch.no_grad():
            ours, theirs = (one(ids[None]).logits[0, :-1, :128].double() for one in models)
        q, p = ours.softmax(-1), (theirs / temperature).softmax(-1)
        mean = share * p + (1 - share) * q
        of_teacher = 0.0 if share == 1.0 else (p * (p / (mean if share else q)).log()).sum(-1)
        of_policy = 0.0 if share == 0.0 else (q * (q / (mean if share < 1.0 else p)).log()).sum(-1)
        weights = (share, 1 - share) if 0.0 < share < 1.0 else (1.0, 1.0)
        found[start + 1 : end] = weights[0] * of_teacher + weights[1] * of_policy
    return found


@pytest.mark.parametrize(("divergence", "share"), [("reverse", 1.0), ("forward", 0.0), ("jsd", 0.3)])
def test_an_exact_teacher_gives_the_divergence_over_the_whole_vocabulary(
    divergence: str, share: float, model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """A teacher with a padded vocabulary, another number of layers, and a temperature of its own."""
    flags = ["--algorithm.distillation.objective", "exact", "--algorithm.distillation.divergence", divergence]
    flags += ["--algorithm.distillation.beta", "0.3"] if divergence == "jsd" else []
    given = [{"path": teachers[2], "temperature": 1.5, "weight": 0.5}]
    more = ("--algorithm.distillation.coef", "0.8", "--trainer.updates_per_step", "1", "--train.optim.lr", "3e-3")
    config = alone(model, registry, 6, given, *flags, *more)
    assert [(one.role, one.output, one.field) for one in planned_passes(config, registry).passes] == [
        ("teacher", "hidden_states", "teacher_states")
    ]
    view, batches = trained(config, registry, tmp_path / "run")
    mask = batches[0]["response_mask"]
    expected = 0.4 * plain_divergence(model, teachers[2], batches[0], share, 1.5)[mask].mean()
    assert view.steps[0]["policy/divergence_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert view.steps[0]["policy/loss"] == pytest.approx(float(expected), rel=1e-4)
    assert view.steps[0]["teacher/tokens"] == int(mask.sum())
    assert view.steps[-1]["policy/divergence_loss"] < 0.8 * view.steps[0]["policy/divergence_loss"]


def test_an_exact_teacher_is_resumed_number_for_number_and_teaches_its_rows_only(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    rows = [{"question": f"{at} + {at} =", "answer": str(2 * at), "task": "ab"[at % 2]} for at in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = json.dumps([{"path": teachers[0], "rows": {"task": ["a"]}}])
    flags = ["--data", str(tmp_path / "rows.jsonl"), "--teachers", given, "--algorithm.distillation.objective", "exact"]
    config, view, rest = config_of(model, registry, 4, *flags), Recorder(), Recorder()
    whole = run(config, registry, tmp_path / "whole", forced=True)
    assert 0.0 < whole.steps[1]["teacher/share"] < 1.0
    with trainer_of(config, registry, tmp_path / "part", view, stop=lambda: len(view.steps) == 2) as (trainer, _, _):
        trainer.fit()
    with trainer_of(config, registry, tmp_path / "part", rest) as (trainer, _, _):
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        trainer.fit()
    assert [*view.steps, *rest.steps] == whole.steps


def test_two_exact_teachers_teach_their_own_rows(
    model: str, teachers: list[str], registry: Registry, tmp_path: Path
) -> None:
    """Of other weights, vocabularies and temperatures; the loss is that of plain transformers, row by row."""
    rows = [{"question": f"{at} + {at} =", "answer": str(2 * at), "task": "ab"[at % 2]} for at in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [
        {"path": teachers[0], "name": "a", "rows": {"task": ["a"]}, "weight": 0.5},
        {"path": teachers[2], "name": "b", "rows": {"task": ["b"]}, "temperature": 1.5},
    ]
    flags = ["--data", str(tmp_path / "rows.jsonl"), "--algorithm.distillation.objective", "exact", *ONE_UPDATE]
    flags += ["--data.shuffle", "false"]
    view, (batch, *_) = trained(alone(model, registry, 2, given, *flags), registry, tmp_path / "run")
    mask, of_a = batch["response_mask"], batch[row_field("teacher.a")][batch.row_of_token]
    expected = torch.where(
        of_a,
        0.5 * plain_divergence(model, teachers[0], batch, 1.0),
        plain_divergence(model, teachers[2], batch, 1.0, 1.5),
    )
    assert 0 < int((mask & of_a).sum()) < int(mask.sum())
    assert view.steps[0]["policy/divergence_loss"] == pytest.approx(float(expected[mask].mean()), rel=1e-4)
    assert view.steps[0]["teacher/a/tokens"] == int((mask & of_a).sum())
    everywhere = [{**one, "rows": {}} for one in given]
    with pytest.raises(ConfigError, match="objective 'exact' a row may have one: say which rows each teaches"):
        trained(alone(model, registry, 1, everywhere, *flags), registry, tmp_path / "twice")


ONE_UPDATE = ("--trainer.updates_per_step", "1")


def test_what_cannot_be_exact_is_refused(model: str, registry: Registry) -> None:
    exact = ("--algorithm.distillation.objective", "exact")
    with pytest.raises(ConfigError, match="expected 'sampled', because a teacher has a prompt_template of its own"):
        alone(model, registry, 1, [{"path": "a", "prompt_template": "{prompt}"}], *exact)
