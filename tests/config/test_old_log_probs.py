"""Which log-probs stand in the denominator of the policy ratio."""

from __future__ import annotations

import pytest

from rlsdk.config import AlgorithmConfig, CorrectionConfig, choose_old_log_probs


def decide(
    choice: str, *, stale: bool = False, updates: int = 1, correction: bool = False, comparable: bool = True
) -> tuple[str, bool, bool]:
    config = AlgorithmConfig(
        old_log_probs=choice,  # type: ignore[arg-type]
        correction=CorrectionConfig(mode="truncate" if correction else "none"),
    )
    found = choose_old_log_probs(config, stale=stale, num_updates=updates, comparable=comparable)
    assert found.why
    return found.source, found.correct, found.first_on_policy


@pytest.mark.parametrize("updates", [1, 4])
def test_the_table_of_cases(updates: int) -> None:
    """The table of the docstring, line by line."""
    first = ("current", False, True) if updates == 1 else ("recomputed", False, True)
    assert decide("auto", updates=updates) == first
    assert decide("auto", updates=updates, correction=True) == ("recomputed", True, True)
    for correction in (False, True):
        assert decide("auto", stale=True, updates=updates, correction=correction) == ("recomputed", True, True)
    assert decide("auto", stale=True, updates=updates, comparable=False) == ("recomputed", False, True)
    for stale in (False, True):
        assert decide("always", stale=stale, updates=updates) == ("recomputed", False, False)
        assert decide("always", stale=stale, updates=updates, correction=True) == ("recomputed", True, False)
        assert decide("decoupled", stale=stale, updates=updates) == ("recomputed", True, True)
        assert decide("rollout", stale=stale, updates=updates) == ("rollout", False, False)


def test_it_says_what_needs_comparable_log_probs_and_what_is_corrected_twice() -> None:
    on = CorrectionConfig(mode="truncate")
    for choice, compared in (("auto", ()), ("always", ()), ("decoupled", ("old_log_probs",)),
                             ("rollout", ("old_log_probs",))):  # fmt: skip
        plain = AlgorithmConfig(old_log_probs=choice)  # type: ignore[arg-type]
        found = choose_old_log_probs(plain, stale=False, num_updates=1)
        assert (found.compared, found.corrects_twice) == (compared, False)
        twice = choose_old_log_probs(plain.model_copy(update={"correction": on}), stale=False, num_updates=1)
        assert (twice.compared, twice.corrects_twice) == ((*compared, "correction"), choice == "rollout")
