"""Gradings a second of processor time, of one process: `python -m benchmarks.grading tests/data/gsm8k/train.jsonl`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.math.graders import gsm8k
from rlsdk.rewards.math.symbolic import math

FORMS: dict[str, Callable[[str, str], str]] = {
    "reference": lambda work, number: f"{work}#### {number}",
    "boxed": lambda work, number: rf"{work}The answer is \boxed{{{number}}}.",
    "bold, with a unit": lambda work, number: f"{work}#### **{number}** dollars",
    "wrong, with a unit": lambda work, number: rf"{work}\boxed{{{int(number.replace(',', '')) + 1}\text{{ eggs}}}}",
}


def measure(grade: Callable[[RewardSample], float], samples: list[RewardSample]) -> tuple[float, float]:
    """Gradings a second, best of five rounds, and the share that is right."""
    best, right = 0.0, 0.0
    for _ in range(5):
        before = time.process_time()
        right = sum(map(grade, samples)) / len(samples)
        best = max(best, len(samples) / (time.process_time() - before))
    return best, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="GSM8K as JSON lines")
    rows = [json.loads(line) for line in parser.parse_args().path.read_text(encoding="utf-8").splitlines()]
    for grade in (gsm8k, math):
        for form, write in FORMS.items():
            samples = []
            for row in rows:
                work, _, number = row["answer"].partition("####")
                response = write(work, number.strip())
                samples.append(
                    RewardSample(
                        prompt=row["question"], response=response, answer=row["answer"], row={}, truncated=False
                    )
                )
            speed, right = measure(grade, samples)
            print(f"{grade.__name__:6} {form:20} {speed:>10,.0f}/s  right {right:.0%}  rows {len(rows)}")


if __name__ == "__main__":
    main()
