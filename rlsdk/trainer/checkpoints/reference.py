"""Finds the reference policy of a run (the policy from which reinforcement learning started), also after the run was
resumed elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlsdk.interfaces import CheckpointError
from rlsdk.interfaces.spelling import Setting
from rlsdk.trainer.checkpoints.checkpoint import MANIFEST, damage
from rlsdk.trainer.checkpoints.manifest import seal

FOLDER = "reference"
"""Folder of a run with a warm start: the policy from which its reinforcement learning starts, in Hugging Face
format."""
KEY = "reference"
"""Key in a checkpoint's state."""


def reference_state(reference: Path | None, checkpoints: Path) -> dict[str, Any]:
    """The reference's entry in a checkpoint: its path, and its path relative to the checkpoint folder, which stays
    valid if the run's folder is moved as a whole. Empty if the reference is the configured model."""
    if reference is None:
        return {}
    whole = reference.resolve()
    return {KEY: {"path": str(whole), "from_checkpoints": os.path.relpath(whole, checkpoints.resolve())}}


def seal_reference(folder: Path) -> None:
    """Writes the checksums of the reference's files beside them."""
    seal(folder, step=0, order=0, state={})


def _check_seal(folder: Path) -> None:
    """Refuses a reference that was changed since it was written: every KL of the run would be to another policy.

    Raises:
        CheckpointError: names the files.
    """
    if (folder / MANIFEST).exists() and (problems := damage(folder)):
        raise CheckpointError(
            f"the reference policy in {str(folder)!r} is damaged: {'; '.join(problems[:3])}. Restore it from a copy, "
            f"or name a policy's folder: {Setting('ref.path', 'FOLDER')}"
        )


def find_reference(state: dict[str, Any], checkpoint: Path, *, warmed_up: bool) -> Path | None:
    """Finds the reference of the run that wrote a checkpoint.

    Args:
        state: state of the checkpoint.
        checkpoint: folder of the checkpoint, `RUN/checkpoints/step_N`.
        warmed_up: the run began with supervised training, so its reference is not the configured model.

    Returns:
        The reference's folder; None if it is the configured model.

    Raises:
        CheckpointError: it is damaged, or not where the checkpoint says; names the places that were searched and what
            to do.
    """
    checkpoints = checkpoint.resolve().parent
    said = state.get(KEY)
    if said is not None:
        places = [checkpoints / str(said["from_checkpoints"]), Path(str(said["path"]))]
    elif warmed_up:  # The checkpoint was written before this entry existed.
        places = [checkpoints.parent / FOLDER]
    else:
        return None
    for place in places:
        if (place / "config.json").is_file():
            _check_seal(place)
            return place.resolve()
    looked = " nor ".join(dict.fromkeys(repr(str(place.resolve())) for place in places))
    raise CheckpointError(
        f"the reference policy that {str(checkpoint)!r} was trained against is not at {looked}: its run's folder was "
        f"moved or deleted. Put it back, or name the policy's folder: {Setting('ref.path', 'FOLDER')}"
    )
