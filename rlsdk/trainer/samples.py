"""Samples to be looked at: a few of a step, with their text, and all of an evaluation."""

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
from rlsdk.kit.atomic import atomic_write_bytes
from rlsdk.kit.printable import json_line
from rlsdk.rollouts import Group, Sample


def write_eval_samples(
    folder: Path, step: int | None, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, compress: bool
) -> list[Path]:
    """A file for each set, one JSON object a line; each is whole or absent. Returns them.

    Raises:
        OSError: the disk refuses.
    """
    written = []
    for name, rows in samples.items():
        text = "".join(json_line({"step": step, **row}) + "\n" for row in rows)
        path = folder / (f"{name}.jsonl.gz" if compress else f"{name}.jsonl")
        # No time in the header: equal samples are equal files.
        atomic_write_bytes(path, gzip.compress(text.encode(), mtime=0) if compress else text.encode())
        written.append(path)
    return written


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """What of a step's samples is logged with its text."""

    count: int
    """Samples of a step."""
    max_tokens: int = 0
    """First tokens of each that are logged one by one, with their log-probs."""
    pieces: Callable[[Sequence[int]], list[str]] | None = None
    """Text that each token adds; None: tokens are not logged."""


def shown_samples(groups: Sequence[Group], batch: Batch, log: SampleLog) -> list[Mapping[str, Any]]:
    """The best and the worst sample of some prompts: rewards, advantages, and log-probs token by token.

    Of a step's prompts those are taken whose hash is lowest, so that the same ones are logged in every epoch, and what
    the policy makes of them at first and at last can be compared.

    Args:
        groups: of the step.
        batch: a row for each sample that was made, in the order of the groups.
        log: how much.
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
    """Without what is logged token by token and sample by sample: for tables with a text in each cell."""
    return [{name: value for name, value in sample.items() if not isinstance(value, list)} for sample in samples]


def _num_made(group: Group) -> int:
    return sum(sample.trajectory is not None for sample in group.samples)


def _rank(group: Group) -> bytes:
    """The same for a prompt in every epoch; as good as random among prompts."""
    return hashlib.blake2b(f"{group.task.id.source}/{group.task.id.index}".encode(), digest_size=8).digest()


def _best_and_worst(group: Group) -> list[tuple[int, int]]:
    """Index in the group, and number among those that were made, of its best and its worst sample."""
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
        # Where the ratio is taken against the sampler's log-probs, those stand in both fields: nothing was recomputed.
        if source in rows and (name == "log_probs" or not torch.equal(rows[source], rows["rollout_log_probs"])):
            values = rows[source][where].tolist()
            found[name] = [round(value, 4) if own else None for value, own in zip(values, sampled, strict=True)]
    return found
