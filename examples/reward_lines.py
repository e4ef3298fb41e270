"""Scores of single tokens: every line with a correct sum earns where it ends.

    --rewards '[{name: reward_lines.py:correct_lines, label: lines, options: {tokenizer: FOLDER}}]'

It needs the policy's tokenizer to know which token ends which line; `FOLDER` is the model's.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlsdk.interfaces import RewardRecord, RewardSample

_SUM = re.compile(r"(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*=\s*(\d{1,18})")


def correct_lines(sample: RewardSample, *, tokenizer: str, bonus: float = 0.1) -> RewardRecord | None:
    """`bonus` on the last token of each line that holds sums, if all of them are correct; less it, if one is wrong.
    Does not apply to a response without sums."""
    ends, line, scores = load_tokenizer(tokenizer), "", [0.0] * len(sample.response_ids)
    counts = {True: 0, False: 0}
    for at, token in enumerate(sample.response_ids):
        line += ends.decode([token], skip_special_tokens=False)
        if "\n" in line or at == len(scores) - 1:
            found = _SUM.findall(line)
            if found:
                correct = all(holds(*parts) for parts in found)
                counts[correct] += 1
                scores[at] = bonus if correct else -bonus
            line = ""
    if not sum(counts.values()):
        return None
    return RewardRecord(score=0.0, token_scores=scores, metrics={"correct": counts[True], "wrong": counts[False]})


correct_lines.reads_tokens = True  # type: ignore[attr-defined]


def holds(left: str, sign: str, right: str, result: str) -> bool:
    """Whether `left sign right = result` holds."""
    one, other = int(left), int(right)
    return int(result) == {"+": one + other, "-": one - other, "*": one * other}[sign]


@lru_cache(maxsize=1)
def load_tokenizer(folder: str) -> Any:
    """Once for each grading process. By the light library: transformers takes seconds to import, which would count as
    time of the first sample (or belongs into `correct_lines.prepare`)."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
