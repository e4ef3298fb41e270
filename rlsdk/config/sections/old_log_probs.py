"""Decides which log-probs stand in the denominator of the policy ratio: the only place that does.

The learner carries out what is decided here, the checks of a configuration refuse by it, and the planner counts by it
(`rlsdk.config.derived.step_passes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rlsdk.interfaces import LogProbKind

if TYPE_CHECKING:
    from rlsdk.config.sections.engines import RolloutConfig


class CorrectionSettings(Protocol):
    @property
    def is_on(self) -> bool: ...


class RatioSettings(Protocol):
    """What is read of the section `algorithm`, whose own checks ask here."""

    @property
    def old_log_probs(self) -> Literal["auto", "always", "rollout", "decoupled"]: ...

    @property
    def correction(self) -> CorrectionSettings: ...


@dataclass(frozen=True, kw_only=True)
class OldLogProbs:
    """Where a step takes `old_log_probs` from. Afterwards the field is complete for all rows, or absent."""

    source: Literal["current", "recomputed", "rollout"]
    """`current`: each update uses its own log-probs (ratio 1). `recomputed`: the train engine computes them before the
    first update. `rollout`: copied from `rollout_log_probs`."""
    correct: bool
    """Whether tokens are weighted by old / rollout (`rlsdk.algorithms.correct_rollout`)."""
    first_on_policy: bool
    """Whether the first update of the step has the weights of `old_log_probs`. Then it can use its own log-probs
    instead (`PolicyObjective.on_policy`), so that its ratio is exactly 1."""
    compared: tuple[Literal["old_log_probs", "correction"], ...]
    """Fields of `algorithm` that put the sampler's log-probs into the loss: they must belong to the same distribution
    as the train engine's."""
    why: str
    """The reason, as one line."""

    @property
    def accounts_for_sampler(self) -> bool:
        """Whether the policy that sampled, which may be an older one, stands in the ratio or in a weight."""
        return self.correct or self.source == "rollout"

    @property
    def corrects_twice(self) -> bool:
        """Whether a correction is configured although the ratio already holds the sampler's log-probs: refused."""
        return self.source == "rollout" and "correction" in self.compared


def choose_old_log_probs(
    algorithm: RatioSettings, *, stale: bool, num_updates: int, comparable: bool = True
) -> OldLogProbs:
    """Decides for one step.

    | `old_log_probs` | rows | updates | correction | source | correct | first on policy |
    |---|---|---|---|---|---|---|
    | auto | current | 1 | no | current | no | yes |
    | auto | current | more | no | recomputed | no | yes |
    | auto | current | any | yes | recomputed | yes | yes |
    | auto | some stale | any | any | recomputed | yes | yes |
    | auto | some stale, not comparable | any | no | recomputed | no | yes |
    | always | any | any | as configured | recomputed | as configured | no |
    | decoupled | any | any | any | recomputed | yes | yes |
    | rollout | any | any | no (yes: refused) | rollout | no | no |

    `auto` with stale rows gives the decoupled objective (AReaL, arXiv 2505.24298). The clip range is then around the
    current weights, and a bounded weight corrects for the sampler. Otherwise the ratio of most tokens would start
    outside the clip range.

    Args:
        algorithm: the section of the configuration.
        stale: whether any token was sampled with weights older than those that the step updates first.
        num_updates: optimizer steps in the step: mini-batches times epochs.
        comparable: whether the sampler's log-probs are those of the contract (temperature applied, before top-k and
            top-p).
    """
    choice, correction = algorithm.old_log_probs, algorithm.correction.is_on
    source: Literal["current", "recomputed", "rollout"] = "recomputed"
    correct, why = correction, f"recomputed, as configured ({choice})"
    if choice == "rollout":
        source, correct, why = "rollout", False, "the sampler's, as configured"
    elif choice == "decoupled":
        correct = True
    elif choice == "auto" and stale:
        correct = comparable
        why = f"recomputed: some rows are older{'' if correct else '; no correction, log-probs not comparable'}"
    elif choice == "auto" and correction:
        why = "recomputed for the correction"
    elif choice == "auto" and num_updates > 1:
        why = f"recomputed: {num_updates} updates, only the first is on policy"
    elif choice == "auto":
        source, why = "current", "one update on policy: ratio 1"
    chosen: tuple[Literal["old_log_probs"], ...] = ("old_log_probs",) if choice in ("rollout", "decoupled") else ()
    configured: tuple[Literal["correction"], ...] = ("correction",) if correction else ()
    return OldLogProbs(
        source=source,
        correct=correct,
        first_on_policy=choice in ("auto", "decoupled"),
        compared=(*chosen, *configured),
        why=why,
    )


def comparable_log_probs(kind: LogProbKind, rollout: RolloutConfig) -> bool:
    """Whether rollout log-probs of this kind equal those of the contract under these settings."""
    return not differing_settings(kind, rollout)


def differing_settings(kind: LogProbKind, rollout: RolloutConfig) -> str:
    """The settings under which log-probs of this kind differ from the contract's, as text; empty if there are none."""
    if kind is LogProbKind.RAW and rollout.temperature != 1:
        return f"rollout.temperature {rollout.temperature}"
    if kind is LogProbKind.PROCESSED:
        return cuts_of(rollout)
    return ""


def cuts_of(rollout: RolloutConfig) -> str:
    """The settings that cut tokens out of the sampling distribution, as text; empty: none does."""
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    return " and ".join(f"rollout.{name} {getattr(rollout, name)}" for name, cut in cuts.items() if cut)
