"""The coefficient of a KL penalty from step to step: fixed, or steered towards a target. Pure: state in, state out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlsdk.interfaces import ConfigError

MAX_ERROR = 0.2
"""The proportional error is cut here, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class KlController:
    """The coefficient now, and how it moves. `coef` is all the state that a checkpoint needs.

    Adaptive: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2: `e = clip(kl / target - 1, -0.2, 0.2)`,
    `coef <- coef * (1 + K e)`; K = samples / horizon, as in the authors' code.

    Raises:
        ConfigError: a number outside its range.
    """

    coef: float
    """Weight of the KL, at least 0."""
    target: float | None = None
    """Nats of KL per sample or token, whichever `after` is given; None: `coef` is fixed."""
    horizon: float = 10_000.0
    """Samples after which a KL of 20 % off target has moved the coefficient by about 20 %."""

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ConfigError(f"kl coef is {self.coef!r}: expected a number of at least 0, such as 0.001")
        if self.target is not None and not self.target > 0:
            raise ConfigError(f"kl target is {self.target!r}: expected nats above 0, such as 0.1, or None")
        if self.target is not None and not self.coef > 0:
            raise ConfigError(f"kl coef is {self.coef!r}: an adaptive one is multiplied, and must begin above 0")
        if not self.horizon > 0:
            raise ConfigError(f"kl horizon is {self.horizon!r}: expected a number of samples above 0, such as 10000")

    def after(self, kl: float, samples: int) -> KlController:
        """The controller after a step.

        Args:
            kl: mean KL of the step, in the unit of `target`. NaN leaves the coefficient as it is.
            samples: samples of the step.
        """
        if self.target is None or kl != kl:
            return self
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return replace(self, coef=max(self.coef * (1 + error * samples / self.horizon), 0.0))
