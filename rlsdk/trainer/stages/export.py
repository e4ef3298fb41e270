"""Exports a run's model: weights, tokenizer and model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlsdk.config import PairTraining, RunConfig
from rlsdk.system.atomic import atomic_write_text
from rlsdk.trainer.stages.model_card import FILE as CARD
from rlsdk.trainer.stages.model_card import model_card

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session
    from rlsdk.trainer.stages.stage import Stage

TRAINED_BY = {
    "sft_checkpoints": "sft",
    "distill_checkpoints": "distill",
    **{kind.checkpoints: kind.value for kind in PairTraining},
}
"""Maps a stage's checkpoint folder to its training method, for stages that do not train with `algorithm`."""


def export_policy(
    session: Session, tokenizer: Any, folder: Path, *, card: str | None = None, timeout_s: float | None = None
) -> None:
    """Writes the actor's weights, configuration and tokenizer in Hugging Face format into a new folder, with a card."""
    folder.mkdir(parents=True)
    with session.turns.using(session.actor.name):
        session.actor.run("save_pretrained", str(folder), timeout_s=timeout_s)
    complete_export(tokenizer, folder, card)


def complete_export(tokenizer: Any, folder: Path, card: str | None) -> None:
    """Writes the tokenizer and the model card next to exported weights."""
    tokenizer.save_pretrained(str(folder))
    if card is not None:
        atomic_write_text(folder / CARD, card)


def card_of(stage: Stage, config_text: str) -> str | None:
    """Model card for an export of the current model; None if the run's configuration is unknown."""
    try:
        config = RunConfig.model_validate_json(json.dumps(yaml.safe_load(config_text)))
    except (ValueError, TypeError, yaml.YAMLError):
        return None
    evaluations = stage.evaluations
    return model_card(
        config,
        step=stage.step,
        before=evaluations.first,
        after=evaluations.last,
        trained_by=TRAINED_BY.get(stage.settings.folder, ""),
    )
