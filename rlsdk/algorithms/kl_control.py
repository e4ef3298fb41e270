"""The coefficient of a KL penalty: fixed, or adapted after each step towards a target KL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlsdk.interfaces import ConfigError

MAX_ERROR = 0.2
"""The proportional error is clipped to this, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class KlController:
    """The current coefficient, and how it changes. Immutable; a checkpoint needs only `coef`.

    Adaptive: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2: `e = clip(kl / target - 1, -0.2, 0.2)`,
    `coef <- coef * (1 + K e)`; K = samples / horizon, as in the authors' code.

    Raises:
        ConfigError: a number is outside its range.
    """

    coef: float
    """Weight of the KL, at least 0."""
    target: float | None = None
    """Target KL in nats, per sample or per token, as `after` receives it; None: `coef` is fixed."""
    horizon: float = 10_000.0
    """Samples after which a KL of 20 % off target has moved the coefficient by about 20 %."""

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ConfigError(f"kl coef is {self.coef!r}: expected a number of at least 0, such as 0.001")
        if self.target is not None and not self.target > 0:
            raise ConfigError(f"kl target is {self.target!r}: expected nats above 0, such as 0.1, or None")
        if self.target is not None and not self.coef > 0:
            raise ConfigError(f"kl coef is {self.coef!r}: an adaptive coefficient is scaled, and must start above 0")
        if not self.horizon > 0:
            raise ConfigError(f"kl horizon is {self.horizon!r}: expected a number of samples above 0, such as 10000")

    def after(self, kl: float, samples: int) -> KlController:
        """Returns the controller after a step.

        Args:
            kl: mean KL of the step, in the unit of `target`. NaN leaves the coefficient unchanged.
            samples: number of samples in the step.
        """
        if self.target is None or kl != kl:
            return self
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return replace(self, coef=max(self.coef * (1 + error * samples / self.horizon), 0.0))
