"""The reference policy of a run is found from the checkpoint that is resumed, wherever the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.interfaces import CheckpointError
from rlsdk.trainer.checkpoints.reference import FOLDER, find_reference, reference_state, seal_reference


def make_run(run: Path) -> tuple[Path, Path]:
    """A run with a reference and a checkpoint: (reference, checkpoint)."""
    reference, checkpoint = run / FOLDER, run / "checkpoints" / "step_00000002"
    reference.mkdir(parents=True)
    checkpoint.mkdir(parents=True)
    (reference / "config.json").write_text("{}")
    return reference, checkpoint


def test_another_run_that_resumes_finds_the_reference_of_the_first(tmp_path: Path) -> None:
    reference, checkpoint = make_run(tmp_path / "first")
    state = reference_state(reference, checkpoint.parent)
    assert find_reference(state, checkpoint, warmed_up=True) == reference
    # The second run has no `reference/` of its own; its checkpoints name the first's, and a third run finds it, too.
    later = tmp_path / "second" / "checkpoints" / "step_00000004"
    later.mkdir(parents=True)
    again = reference_state(reference, later.parent)
    assert find_reference(again, later, warmed_up=True) == reference


def test_a_run_that_was_moved_as_a_whole_finds_its_own(tmp_path: Path) -> None:
    reference, checkpoint = make_run(tmp_path / "here")
    state = reference_state(reference, checkpoint.parent)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / "checkpoints" / checkpoint.name
    assert find_reference(state, moved, warmed_up=True) == tmp_path / "there" / FOLDER


def test_a_checkpoint_of_before_is_looked_up_in_its_run(tmp_path: Path) -> None:
    reference, checkpoint = make_run(tmp_path / "old")
    assert find_reference({}, checkpoint, warmed_up=True) == reference


def test_without_a_warm_start_the_reference_is_the_configured_model(tmp_path: Path) -> None:
    _, checkpoint = make_run(tmp_path / "plain")
    assert reference_state(None, checkpoint.parent) == {}
    assert find_reference({}, checkpoint, warmed_up=False) is None


def test_a_reference_that_was_changed_since_it_was_made_is_refused(tmp_path: Path) -> None:
    """Every KL of the resumed run would be to another policy."""
    reference, checkpoint = make_run(tmp_path / "run")
    (reference / "model.safetensors").write_bytes(bytes(100))
    seal_reference(reference)
    state = reference_state(reference, checkpoint.parent)
    assert find_reference(state, checkpoint, warmed_up=True) == reference
    (reference / "model.safetensors").write_bytes(bytes(99) + b"\1")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.* --ref\.path FOLDER"):
        find_reference(state, checkpoint, warmed_up=True)


def test_a_reference_that_is_gone_is_asked_for_by_the_field_that_can_name_it(tmp_path: Path) -> None:
    reference, checkpoint = make_run(tmp_path / "run")
    state = reference_state(reference, checkpoint.parent)
    (reference / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"run/reference'.* name the policy's folder: --ref\.path FOLDER"):
        find_reference(state, checkpoint, warmed_up=True)
