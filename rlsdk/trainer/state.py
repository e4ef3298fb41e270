"""What a run must remember to continue exactly where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlsdk.interfaces import Batch, CheckpointError, OptimStepResult


def is_large(step: OptimStepResult) -> bool:
    """True for a step after which float32 weights must differ: AdamW moves each by about its learning rate, and 1e-7 is
    more than what rounding swallows of small ones. A stretch without signal, or steps too small for the dtype, are a
    run that learns nothing, not one that serves stale weights."""
    return not step.skipped and step.lr >= 1e-7 and step.grad_norm >= 1e-6


@dataclass
class TrainerState:
    """State in a checkpoint besides that of the engines and the position in the data."""

    policy_version: int = 0
    """Optimizer steps contained in the weights, those before anything moved not counted."""
    moving: bool = False
    """A gradient other than zero was seen: from now on every optimizer step changes the weights."""
    expects_change: bool = False
    """A step since the last sync was one that weights cannot sleep through: see `is_large`."""
    samples: int = 0
    tokens: int = 0
    reward_failures: dict[str, int] = field(default_factory=dict)
    """Samples without a score, by kind, over the whole run."""

    def count_update(self, step: OptimStepResult) -> None:
        """A step whose gradients were all zero from the start (equal rewards) leaves the weights as they are,
        and must not raise the version: a sync that changes nothing at a new version is an error elsewhere."""
        self.expects_change = self.expects_change or is_large(step)
        self.moving = self.moving or (step.grad_norm > 0 and not step.skipped)
        if self.moving and not step.skipped and step.lr > 0:
            self.policy_version += 1

    def count_batch(self, batch: Batch) -> None:
        """The samples and tokens of a step."""
        self.samples += batch.num_rows
        self.tokens += batch.num_tokens

    def count_failures(self, failures: Mapping[str, int]) -> None:
        for kind, count in failures.items():
            self.reward_failures[kind] = self.reward_failures.get(kind, 0) + count

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint.

        Raises:
            CheckpointError: fields are missing or unknown; it was written by another version of rlsdk.
        """
        names = {field.name for field in fields(self)}
        if set(data) != names:
            raise CheckpointError(
                f"the checkpoint's trainer state does not fit this rlsdk: it has {sorted(data)}, expected "
                f"{sorted(names)}"
            )
        for name, value in data.items():
            setattr(self, name, value)
