"""Sample logs for people: a few samples of each step, with their text, and all of an evaluation."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.algorithms import Samples
from rlsdk.interfaces import Batch, BatchError
from rlsdk.rollouts import Group, Sample
from rlsdk.system.atomic import atomic_write_bytes
from rlsdk.system.printable import json_line
from rlsdk.trainer.tracking.episodes import conversation


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
        batch: the rows of their samples.
        log: how many samples and tokens are logged.
    """
    order = sorted(range(len(groups)), key=lambda at: (_rank(groups[at]), at))
    picked: list[tuple[Group, int]] = []
    for at in order:
        picked += [(groups[at], index) for index in _best_and_worst(groups[at])]
        if len(picked) >= log.count:
            break
    picked = picked[: log.count]
    parts = [_rows_of(batch, group.task.ordinal, index) for group, index in picked]
    rows = batch.select(torch.cat([torch.empty(0, dtype=torch.int64), *parts]))
    samples = Samples.of(rows)
    advantages = (samples.token_sum(rows["advantages"]) / samples.lengths.clamp(min=1)).tolist()
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
            "group_scores": [sample.total if sample.grade.valid else None for sample in group.samples],
            **_episode(group.samples[index], log),
            **_tokens(group.samples[index], rows, (samples.index == at).nonzero()[:, 0], log),
        }
        for at, (group, index) in enumerate(picked)
    ]


def plain_columns(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Removes the per-token and per-sample lists, and episodes: for tables with one text per cell."""
    return [{name: value for name, value in sample.items() if not isinstance(value, list | dict)} for sample in samples]


def _rows_of(batch: Batch, uid: int, sample: int) -> Tensor:
    """Rows of a sample, in their order.

    Raises:
        BatchError: the batch has none.
    """
    rows = ((batch["uid"] == uid) & (batch["sample"] == sample)).nonzero()[:, 0]
    if not len(rows):
        raise BatchError(f"the batch has no row of sample {sample} of uid {uid}; every sample that was made has one")
    return rows[batch["row_id"][rows].argsort()]


def _rank(group: Group) -> bytes:
    """Sort key of a prompt: equal in every epoch, pseudo-random among prompts."""
    return hashlib.blake2b(f"{group.task.id.source}/{group.task.id.index}".encode(), digest_size=8).digest()


def _best_and_worst(group: Group) -> list[int]:
    """Index of the group's best and worst finished sample."""
    made = [index for index, sample in enumerate(group.samples) if sample.rows]
    ranked = sorted(made, key=lambda index: -group.samples[index].total)
    return [ranked[0], ranked[-1]] if len(made) > 1 else ranked


def _episode(sample: Sample, log: SampleLog) -> dict[str, Any]:
    """The sample as a conversation, where it is more than one turn."""
    if log.pieces is None or sample.episode is None:
        return {}
    found = conversation(sample.episode, log.pieces)
    return {"episode": found} if found else {}


def _tokens(sample: Sample, batch: Batch, rows: Tensor, log: SampleLog) -> dict[str, Any]:
    """The first response tokens of a sample, which is in these rows: their texts and log-probs (nats), null where they
    were not sampled. Of a further row, the context that it begins with is left out."""
    if log.pieces is None or not log.max_tokens:
        return {}
    ids = [int(token) for row in sample.rows for token in row.response_ids.tolist()]
    behind = [batch.token_index(row[None])[len(made.spans[0]) :] for row, made in zip(rows, sample.rows, strict=True)]
    where = torch.cat(behind)[: log.max_tokens]
    sampled = batch["response_mask"][where].tolist()
    pieces = log.pieces(ids)
    fields: dict[str, Any] = {"tokens": pieces[: log.max_tokens]}
    if rest := "".join(pieces[log.max_tokens :]):
        fields["rest"] = rest
    for name, source in (("log_probs", "rollout_log_probs"), ("train_log_probs", "old_log_probs")):
        # If the ratio is taken against the sampler's log-probs, both fields hold these: nothing was recomputed.
        if source in batch and (name == "log_probs" or not torch.equal(batch[source], batch["rollout_log_probs"])):
            values = batch[source][where].tolist()
            fields[name] = [round(value, 4) if own else None for value, own in zip(values, sampled, strict=True)]
    return fields
