"""What a run must remember to go on exactly where it stopped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlsdk.interfaces import CheckpointError, OptimStepResult


@dataclass
class TrainerState:
    """What a checkpoint keeps besides the engine's own part and the data's position."""

    step: int = 0
    """Trainer steps done."""
    policy_version: int = 0
    """Optimizer steps contained in the weights, those before anything moved not counted."""
    moving: bool = False
    """A gradient other than zero was seen: from now on every optimizer step changes the weights."""
    samples: int = 0
    tokens: int = 0
    reward_failures: dict[str, int] = field(default_factory=dict)
    """Samples without a score, by kind, over the whole run."""

    def count_update(self, step: OptimStepResult) -> None:
        """A step whose gradients were all zero from the start (every reward alike) leaves the weights as they are,
        and must not raise the version: a sync that changes nothing at a new version is an error elsewhere."""
        self.moving = self.moving or (step.grad_norm > 0 and not step.skipped)
        if self.moving and not step.skipped and step.lr > 0:
            self.policy_version += 1

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, data: dict[str, Any]) -> TrainerState:
        """The state of a checkpoint.

        Raises:
            CheckpointError: fields are missing or unknown; it was written by another version of rlsdk.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise CheckpointError(f"the checkpoint's trainer state does not fit this rlsdk: {error}") from error
