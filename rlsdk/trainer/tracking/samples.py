"""Sample logs for people: a few samples of each step, with their text, and all of an evaluation."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from rlsdk.interfaces import Batch
from rlsdk.rollouts import Group, Sample
from rlsdk.system.atomic import atomic_write_bytes
from rlsdk.system.printable import json_line


def write_eval_samples(
    folder: Path, step: int | None, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, compress: bool
) -> list[Path]:
    """Writes a file per set atomically, one JSON object per line. Returns the files.

    Raises:
        OSError: a file cannot be written.
    """
    written = []
    for name, rows in samples.items():
        text = "".join(json_line({"step": step, **row}) + "\n" for row in rows)
        path = folder / (f"{name}.jsonl.gz" if compress else f"{name}.jsonl")
        # No time in the header, so that equal samples give equal files.
        atomic_write_bytes(path, gzip.compress(text.encode(), mtime=0) if compress else text.encode())
        written.append(path)
    return written


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """Which of a step's samples are logged with their text."""

    count: int
    """Number of samples per step."""
    max_tokens: int = 0
    """Number of first tokens per sample that are logged one by one, with their log-probs."""
    pieces: Callable[[Sequence[int]], list[str]] | None = None
    """Text that each token adds; None: tokens are not logged."""


def shown_samples(groups: Sequence[Group], batch: Batch, log: SampleLog) -> list[Mapping[str, Any]]:
    """Returns the best and the worst sample of some prompts, with rewards, advantages, and log-probs token by token.

    Takes the step's prompts with the lowest hashes: the same prompts are logged in every epoch, so that early and late
    responses can be compared.

    Args:
        groups: groups of the step.
        batch: one row per finished sample, in the order of the groups.
        log: how many samples and tokens are logged.
    """
    first = list(accumulate((_num_made(group) for group in groups), initial=0))
    order = sorted(range(len(groups)), key=lambda at: (_rank(groups[at]), at))
    picked: list[tuple[Group, int, int]] = []
    for at in order:
        picked += [(groups[at], index, first[at] + row) for index, row in _best_and_worst(groups[at])]
        if len(picked) >= log.count:
            break
    picked = picked[: log.count]
    rows = batch.select([row for _, _, row in picked])
    tokens = rows.row_sum(rows["response_mask"].long()).clamp(min=1)
    advantages = (rows.row_sum(rows["advantages"]) / tokens).tolist()
    return [
        {
            "group": str(group.task.id),
            "sample": index,
            "prompt": group.task.prompt.text,
            "response": group.samples[index].text,
            "answer": group.task.prompt.answer,
            "score": group.samples[index].total,
            **{f"reward/{name}": value for name, value in group.samples[index].grade.terms.items()},
            "advantage": advantages[at],
            "group_scores": [round(sample.total, 4) if sample.grade.valid else None for sample in group.samples],
            **_tokens(group.samples[index], rows, at, log),
        }
        for at, (group, index, _) in enumerate(picked)
    ]


def plain_columns(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Removes the per-token and per-sample lists: for tables with one text per cell."""
    return [{name: value for name, value in sample.items() if not isinstance(value, list)} for sample in samples]


def _num_made(group: Group) -> int:
    return sum(sample.trajectory is not None for sample in group.samples)


def _rank(group: Group) -> bytes:
    """Sort key of a prompt: equal in every epoch, pseudo-random among prompts."""
    return hashlib.blake2b(f"{group.task.id.source}/{group.task.id.index}".encode(), digest_size=8).digest()


def _best_and_worst(group: Group) -> list[tuple[int, int]]:
    """For the group's best and worst sample: its index in the group, and its index among the finished samples."""
    made = [index for index, sample in enumerate(group.samples) if sample.trajectory is not None]
    if not made:
        return []
    ranked = sorted(range(len(made)), key=lambda row: -group.samples[made[row]].total)
    rows = [ranked[0], ranked[-1]] if len(made) > 1 else ranked
    return [(made[row], row) for row in rows]


def _tokens(sample: Sample, rows: Batch, at: int, log: SampleLog) -> dict[str, Any]:
    """The first response tokens of row `at`: their texts and log-probs (nats), null where they were not sampled."""
    if log.pieces is None or not log.max_tokens or sample.trajectory is None:
        return {}
    ids = [int(token) for token in sample.trajectory.response_ids.tolist()]
    begin = sample.trajectory.num_tokens - len(ids)
    where = rows.token_index(torch.tensor([at]))[begin : begin + log.max_tokens]
    sampled = rows["response_mask"][where].tolist()
    pieces = log.pieces(ids)
    found: dict[str, Any] = {"tokens": pieces[: log.max_tokens]}
    if rest := "".join(pieces[log.max_tokens :]):
        found["rest"] = rest
    for name, source in (("log_probs", "rollout_log_probs"), ("train_log_probs", "old_log_probs")):
        # If the ratio is taken against the sampler's log-probs, both fields hold these: nothing was recomputed.
        if source in rows and (name == "log_probs" or not torch.equal(rows[source], rows["rollout_log_probs"])):
            values = rows[source][where].tolist()
            found[name] = [round(value, 4) if own else None for value, own in zip(values, sampled, strict=True)]
    return found
