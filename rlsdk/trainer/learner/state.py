"""State of a run that is needed to resume exactly where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlsdk.algorithms import Samples
from rlsdk.interfaces import Batch, CheckpointError, OptimStepResult


def is_large(step: OptimStepResult) -> bool:
    """Whether float32 weights must differ after this step: AdamW moves each by about its learning rate, and steps above
    1e-7 are not lost to rounding in small weights. After smaller steps, or steps without signal, unchanged weights mean
    that the run learns nothing, not that it serves stale weights."""
    return not step.skipped and step.lr >= 1e-7 and step.grad_norm >= 1e-6


@dataclass
class TrainerState:
    """State in a checkpoint, except that of the engines and the position in the data."""

    policy_version: int = 0
    """Number of optimizer steps in the weights, not counting those before the first nonzero gradient."""
    moving: bool = False
    """Whether a nonzero gradient was seen: since then every optimizer step changes the weights."""
    expects_change: bool = False
    """Whether a step since the last sync must have changed the weights: see `is_large`."""
    samples: int = 0
    tokens: int = 0
    reward_failures: dict[str, int] = field(default_factory=dict)
    """Number of samples without a score, by kind, over the whole run."""

    def count_update(self, step: OptimStepResult) -> None:
        """Counts an optimizer step. While all gradients so far were zero (equal rewards), a step leaves the weights
        unchanged and must not raise the version: a sync of a new version without any change is an error."""
        self.expects_change = self.expects_change or is_large(step)
        self.moving = self.moving or (step.grad_norm > 0 and not step.skipped)
        if self.moving and not step.skipped and step.lr > 0:
            self.policy_version += 1

    def count_batch(self, batch: Batch) -> None:
        """Counts the samples and tokens of a step."""
        self.samples += Samples.of(batch).count
        self.tokens += batch.num_tokens

    def count_failures(self, failures: Mapping[str, int]) -> None:
        for kind, count in failures.items():
            self.reward_failures[kind] = self.reward_failures.get(kind, 0) + count

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restores the result of `dump`.

        Raises:
            CheckpointError: fields are missing or unknown: another version of rlsdk wrote the checkpoint.
        """
        names = {field.name for field in fields(self)}
        if set(data) != names:
            raise CheckpointError(
                f"the checkpoint's trainer state does not fit this rlsdk: it has {sorted(data)}, expected "
                f"{sorted(names)}"
            )
        for name, value in data.items():
            setattr(self, name, value)
