"""Decides which log-probs are the denominator of the policy ratio."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from rlsdk.interfaces import BatchError, ConfigError, nearest

CHOICES = ("auto", "always", "rollout", "decoupled")


@dataclass(frozen=True, kw_only=True)
class Denominator:
    """Where a step takes `old_log_probs` from. Afterwards the field is complete for all rows, or absent."""

    source: str
    """`current`: the field is absent, and each update uses its own log-probs (ratio 1). `recomputed`: the train engine
    computes it for all rows before the first update. `rollout`: copied from `rollout_log_probs`."""
    correct: bool
    """Whether to weight tokens by old / rollout (`correct_rollout`)."""
    first_on_policy: bool
    """Whether the first update of the step has the weights of `old_log_probs`. Then it can use its own log-probs
    instead (`PolicyObjective.on_policy`), so that its ratio is exactly 1."""
    why: str
    """The reason, as one line for the log."""


def denominator(
    choice: str,
    *,
    first_version: Tensor,
    last_version: Tensor,
    current_version: int,
    num_updates: int,
    correction: bool = False,
    comparable: bool = True,
) -> Denominator:
    """Decides for one step, from the policy versions of its rows and the configuration.

    A row is stale if any of its tokens was sampled with an older version than the one that the step updates first.

    | choice | rows | updates | correction | source | correct | first on policy |
    |---|---|---|---|---|---|---|
    | auto | current | 1 | no | current | no | yes |
    | auto | current | more | no | recomputed | no | yes |
    | auto | current | any | yes | recomputed | yes | yes |
    | auto | some stale | any | any | recomputed | yes | yes |
    | auto | some stale, not comparable | any | no | recomputed | no | yes |
    | always | any | any | as configured | recomputed | as configured | no |
    | decoupled | any | any | any | recomputed | yes | yes |
    | rollout | any | any | no | rollout | no | no |
    | rollout | any | any | yes | error: the ratio already uses the sampler's log-probs | | |
    | any with correction, or decoupled, or rollout | not comparable | | | error | | |

    `auto` with stale rows gives the decoupled objective (AReaL, arXiv 2505.24298). The clip range is then around the
    current weights, and a bounded weight corrects for the sampler. Otherwise the ratio of most tokens would start
    outside the clip range.

    Args:
        choice: `auto`, `always`, `rollout` or `decoupled`.
        first_version: `[B]` int64, policy version of each row's first sampled token.
        last_version: `[B]` int64, policy version of each row's last sampled token.
        current_version: version of the weights before the step's first update.
        num_updates: optimizer steps in the step: mini-batches times epochs.
        correction: whether a correction is configured.
        comparable: whether the sampler's log-probs are those of the contract (temperature applied, before top-k and
            top-p).

    Raises:
        ConfigError: the choice is unknown, or contradicts the configuration.
        BatchError: a row has a version newer than the current one, or its last token is older than its first.
    """
    if choice not in CHOICES:
        raise ConfigError(f"old_log_probs is {choice!r}{nearest(choice, CHOICES)}; choose one of {list(CHOICES)}")
    num_stale = _count_stale(first_version, last_version, current_version)
    if choice == "rollout" and correction:
        raise ConfigError(
            "old_log_probs is 'rollout' with a correction, but the ratio already uses the sampler's log-probs; "
            "choose 'decoupled', or no correction"
        )
    if not comparable and (correction or choice in ("rollout", "decoupled")):
        raise ConfigError(
            f"old_log_probs is {choice!r}{' with a correction' if correction else ''}, but the rollout engine's "
            "log-probs belong to another distribution than the train engine's: choose 'always' without a correction, "
            "or sample with top_p 1, top_k 0 and min_p 0"
        )
    if choice == "rollout":
        return Denominator(source="rollout", correct=False, first_on_policy=False, why="the sampler's, as configured")
    if choice != "auto":
        correct = correction or choice == "decoupled"
        decided = _recomputed(correct, f"recomputed, as configured ({choice})")
        return decided if choice == "decoupled" else replace(decided, first_on_policy=False)
    if num_stale:
        said = f"recomputed: {num_stale} of {len(first_version)} rows are older than version {current_version}"
        return _recomputed(comparable, said if comparable else f"{said}; no correction, log-probs not comparable")
    if correction:
        return _recomputed(True, "recomputed for the correction")
    if num_updates > 1:
        return _recomputed(False, f"recomputed: {num_updates} updates, only the first is on policy")
    return Denominator(source="current", correct=False, first_on_policy=True, why="one update on policy: ratio 1")


def _recomputed(correct: bool, why: str) -> Denominator:
    return Denominator(source="recomputed", correct=correct, first_on_policy=True, why=why)


def _count_stale(first_version: Tensor, last_version: Tensor, current_version: int) -> int:
    if not len(first_version):
        return 0
    newest = int(last_version.max())
    if newest > current_version:
        raise BatchError(f"policy_version: a row is of version {newest}, newer than the current {current_version}")
    if bool((first_version > last_version).any()):
        at = int((first_version > last_version).nonzero()[0])
        raise BatchError(
            f"policy_version: row {at} begins at version {int(first_version[at])} and ends at {int(last_version[at])}; "
            "versions must not decrease within a row"
        )
    return int((first_version < current_version).sum())
