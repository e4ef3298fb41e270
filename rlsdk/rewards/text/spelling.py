"""The quickstart's reward: a word that is to be spelt backward."""

from __future__ import annotations

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.functions.load import checks_rows
from rlsdk.rewards.text.answer import final_answer, no_answer

OVERLONG = 0.8
"""Share of a response that begins with the right word and goes on."""


@checks_rows
def spell_backward(sample: RewardSample, *, partial: float = 0.0) -> float:
    """Returns 1 for the right word in upper or lower case, else `partial` times the share of letters in their place.

    These are the scores of reasoning-gym's task of this name, by the plugin's reward `reasoning_gym`. The word itself,
    which the question shows, is no answer even where it reads the same backward but for its case.

    Args:
        sample: its answer is the word, spelt backward.
        partial: weight of the letters of a wrong answer.

    Raises:
        ValueError: the row has no answer.
    """
    if sample.answer is None:
        raise ValueError(no_answer())
    marked = final_answer(sample.response)
    given = sample.response.strip() if marked is None else marked
    if given == sample.answer:
        return 1.0
    if given.lower() == sample.answer.lower():
        return partial if given in str(sample.row.get("question", "")) else 1.0
    return partial * _share(given.lower(), sample.answer.lower())


def _share(given: str, wanted: str) -> float:
    """Share of the letters that stand in their place, added up one by one as the library does."""
    share = 0.0
    for one, other in zip(given, wanted, strict=False):
        if one == other:
            share += 1 / len(wanted)
    return OVERLONG if share == 1.0 else share
