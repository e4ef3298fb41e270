"""Where the reference policy of a run is: what reinforcement learning started from, also after the run was resumed
elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlsdk.interfaces import CheckpointError

FOLDER = "reference"
"""Of a run that warmed up: the policy that its reinforcement learning starts from, in Hugging Face form."""
KEY = "reference"
"""Of a checkpoint's state."""


def reference_state(reference: Path | None, checkpoints: Path) -> dict[str, Any]:
    """What a checkpoint says of the reference: its path, and the path from the folder of checkpoints, by which it is
    found when the run's folder was moved as a whole. Empty where the reference is the model that is configured."""
    if reference is None:
        return {}
    whole = reference.resolve()
    return {KEY: {"path": str(whole), "from_checkpoints": os.path.relpath(whole, checkpoints.resolve())}}


def find_reference(state: dict[str, Any], checkpoint: Path, *, warmed_up: bool) -> Path | None:
    """The reference of the run that a checkpoint is of.

    Args:
        state: of the checkpoint.
        checkpoint: its folder, `RUN/checkpoints/step_N`.
        warmed_up: the run began with supervised training, so its reference is not the model that is configured.

    Returns:
        Its folder; None where it is the model that is configured.

    Raises:
        CheckpointError: it is not where the checkpoint says; names the places and what to do.
    """
    checkpoints = checkpoint.resolve().parent
    said = state.get(KEY)
    if said is not None:
        places = [checkpoints / str(said["from_checkpoints"]), Path(str(said["path"]))]
    elif warmed_up:  # Written before checkpoints said it.
        places = [checkpoints.parent / FOLDER]
    else:
        return None
    for place in places:
        if (place / "config.json").is_file():
            return place.resolve()
    looked = " nor ".join(dict.fromkeys(repr(str(place.resolve())) for place in places))
    raise CheckpointError(
        f"the reference policy that {str(checkpoint)!r} was trained against is not at {looked}: its run's folder was "
        "moved or deleted. Put it back, or name the policy's folder: --ref.path FOLDER"
    )
