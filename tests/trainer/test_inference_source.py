"""Which model `rlsdk eval` and `rlsdk generate` take of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.data import DataRow, PromptFormat
from rlsdk.interfaces import ConfigError
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.checkpoints.model_source import find_model
from rlsdk.trainer.runs.inference import typed_format


def save(run: Path, step: int) -> Path:
    with CheckpointStore(run / "checkpoints", 9).write(step, {}) as draft:
        for name in ("model", "actor"):
            (draft / name).mkdir()
            (draft / name / "config.json").write_text(f"{{}}  of step {step}")
    return run / "checkpoints" / f"step_{step:08d}"


def test_a_damaged_model_is_passed_over_and_named(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    assert find_model(tmp_path, pytest.fail).model == newer / "model"
    (newer / "model" / "config.json").write_text("{}  of step 3")
    said: list[str] = []
    assert find_model(tmp_path, said.append).model == older / "model"
    assert "step_00000002" in said[0]
    with pytest.raises(ConfigError, match=r"model/config.json is damaged"):
        find_model(newer)


def test_a_damaged_optimizer_does_not_keep_a_model_from_being_used(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "actor" / "config.json").write_text("{}  of step 3")
    assert find_model(tmp_path, pytest.fail).model == path / "model"


def test_a_run_with_nothing_whole_says_so(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
        find_model(tmp_path)
    with pytest.raises(ConfigError, match="is no run"):
        find_model(tmp_path / "nothing")


def test_a_run_that_ended_before_its_first_checkpoint_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {steps: 2}\n")
    with pytest.raises(ConfigError, match="is a run without a checkpoint yet"):
        find_model(tmp_path)


@pytest.mark.parametrize(
    ("template", "prompt", "said"),
    [
        ("{prompt} Think.", "why? Think.", None),
        ("{metadata.word}>", "why?>", "put in for 'metadata.word'"),
        ("{a} and {b}", "why?", "is the whole user message"),
        ("{prompt} of {b}", "why?", "is the whole user message"),
    ],
)
def test_a_typed_prompt_needs_no_field_of_the_data(template: str, prompt: str, said: str | None) -> None:
    """The README's own command failed on the README's own run, whose template asks for `metadata.word`."""
    notices: list[str] = []
    form = PromptFormat(prompt_field="text", answer_field="solution", prompt_template=template)
    form, field = typed_format(form, notices.append)
    (row,) = form.select([DataRow(row={field: "why?"}, source="--prompt 1")])
    assert row.prompt == prompt
    assert len(notices) == (said is not None)
    assert all(str(said) in text for text in notices)
