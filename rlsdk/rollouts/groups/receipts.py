"""Receipts: every token that is trained was sampled by an engine, once, at a known version with a known log-prob."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rlsdk.interfaces import Batch, BatchError, Episode, Receipt, Span
from rlsdk.rollouts.groups.group import Group, Sample

SAMPLED, TRAINED = "sampled", "trained"
DROPPED = "dropped"
"""Reason: the rollouter did not put the tokens into a row."""
UNANSWERED = "unanswered"
"""Reason: the call was given up when its tokens came."""
FAILED = "failed"
"""Reason: the sample failed."""
DIVERGED = "diverged"
"""Reason: a process that was killed sampled the tokens, and the episode, played again, did not ask for them."""
REJECTED = "rejected"
"""Reason: the group was finished for the step, which did not train on it."""


class ReceiptError(BatchError):
    """An episode does not account for its tokens, which fails the sample."""

    kind = "receipt"
    """Kind of the failure in metrics."""


@dataclass
class _Turn:
    span: Span
    is_used: NDArray[np.bool_]
    """`[L]`: tokens that a row trains on."""


@dataclass
class TurnAccount:
    """What the engine sampled for one sample, turn by turn."""

    _turns: list[_Turn] = field(default_factory=list)
    num_unasked: int = 0
    """Tokens of turns of a killed process that were not asked for again."""

    @property
    def num_tokens(self) -> int:
        return self.num_unasked + sum(len(turn.span) for turn in self._turns)

    def add(self, span: Span) -> None:
        """Takes note of a turn that the engine sampled."""
        self._turns.append(_Turn(span, np.zeros(len(span), np.bool_)))

    def checked(self, episode: Episode) -> Episode:
        """The episode with its account. Tokens that are in no row get a reason; an episode whose rows have all of them
        needs no receipt.

        Raises:
            ReceiptError: a sampled span is no part of a turn of the engine, or was used before; or the episode's own
                receipt says otherwise.
        """
        for number, row in enumerate(episode.rows, 1):
            for span in row.spans:
                if span.sampled and len(span) and not self._use(span):
                    raise ReceiptError(
                        f"row {number} of the episode: {len(span)} sampled tokens are no part of what `generate` "
                        "returned, or were in a row before. Put `turn.span` into one trajectory, unchanged; give its "
                        "tokens to other rows by Span.given(turn.span.token_ids)"
                    )
        receipt = self._receipt(episode)
        return episode if receipt is None else replace(episode, receipt=receipt)

    def _use(self, span: Span) -> bool:
        """Marks the tokens of a span as used; False if there are none like them, with their log-probs and versions."""
        for turn in self._turns:
            for start in _places(span, turn.span):
                part = slice(start, start + len(span))
                if not turn.is_used[part].any() and _is_part(span, turn.span, start):
                    turn.is_used[part] = True
                    return True
        return False

    def _receipt(self, episode: Episode) -> Receipt | None:
        sampled, trained = self.num_tokens, sum(row.num_sampled for row in episode.rows)
        digests = tuple(row.digest for row in episode.rows)
        given = episode.receipt
        if given is None:
            if sampled == trained:
                return None
            gone = {DROPPED: sampled - trained - self.num_unasked, DIVERGED: self.num_unasked}
            not_trained = {reason: count for reason, count in gone.items() if count}
            return Receipt(sampled=sampled, trained=trained, not_trained=not_trained, digests=digests)
        lost = sampled - self.num_unasked - given.sampled
        if lost < 0 or given.digests not in ((), digests):
            raise ReceiptError(
                f"the episode's receipt has {given.sampled} sampled tokens and the digests {list(given.digests)}; the "
                f"engine sampled {sampled}, and its rows have the digests {list(digests)}"
            )
        gone = {UNANSWERED: lost, DIVERGED: self.num_unasked}
        not_trained = {**given.not_trained, **{reason: count for reason, count in gone.items() if count}}
        return replace(given, sampled=sampled, not_trained=not_trained, digests=digests)


def _places(span: Span, turn: Span) -> Iterable[int]:
    """Where a span may begin in a turn."""
    last = len(turn) - len(span)
    if last < 0:
        return ()
    found: list[int] = np.flatnonzero(turn.token_ids[: last + 1] == span.token_ids[0]).tolist()
    return found


def _is_part(span: Span, turn: Span, start: int) -> bool:
    """Whether ids, log-probs (to the bit) and versions are those of the turn from this place on."""
    part = slice(start, start + len(span))
    assert span.log_probs is not None
    assert turn.log_probs is not None
    return bool(
        np.array_equal(turn.token_ids[part], span.token_ids)
        and np.array_equal(turn.log_probs[part], span.log_probs)
        and np.array_equal(_versions(turn)[part], _versions(span))
    )


def _versions(span: Span) -> NDArray[np.int64]:
    return np.repeat([run.version for run in span.versions], [run.num_tokens for run in span.versions]).astype(np.int64)


def check_receipts(groups: Sequence[Group], batch: Batch) -> None:
    """Checks that a step trains on the tokens that its samples account for, and on no others.

    Raises:
        BatchError: a row is not the one of its receipt; or the batch has another number of sampled tokens than the
            samples, or one without a version or a finite log-prob.
    """
    for group in groups:
        for index, sample in enumerate(group.samples):
            if problem := receipt_problem(sample):
                raise BatchError(f"sample {index} of group {group.task.ordinal} is not trained on: {problem}")
    mask, expected = batch["response_mask"], sum(sample.num_sampled for group in groups for sample in group.samples)
    versions, log_probs = batch["token_versions"][mask], batch["rollout_log_probs"][mask]
    unknown = int(((versions < 0) | ~torch.isfinite(log_probs)).sum())
    if len(versions) != expected or unknown:
        raise BatchError(
            f"the step's rows have {len(versions)} sampled tokens, of which {unknown} have no known version or finite "
            f"log-prob; its samples have {expected}, and all of them must be known"
        )


def receipt_problem(sample: Sample) -> str:
    """What contradicts a sample's receipt; empty: nothing, or it has none."""
    receipt = None if sample.episode is None else sample.episode.receipt
    if receipt is None:
        return ""
    if receipt.trained != sample.num_sampled:
        return f"its receipt has {receipt.trained} trained tokens, its rows {sample.num_sampled}"
    digests = tuple(row.digest for row in sample.rows)
    changed = [at for at, digest in enumerate(digests, 1) if receipt.digests[at - 1 : at] not in ((), (digest,))]
    return f"rows {changed} are not those of its receipt: ids, log-probs or versions differ" if changed else ""


def token_account(samples: Iterable[Sample]) -> Mapping[str, int]:
    """Where the sampled tokens of samples went: `sampled`, `trained`, and the others by reason."""
    counts = Counter({SAMPLED: 0, TRAINED: 0})
    for sample in samples:
        receipt = None if sample.episode is None else sample.episode.receipt
        if receipt is None:
            counts.update({SAMPLED: sample.num_sampled + sample.lost_tokens, TRAINED: sample.num_sampled})
            counts[FAILED] += sample.lost_tokens
        else:
            counts.update({SAMPLED: receipt.sampled, TRAINED: receipt.trained, **receipt.not_trained})
    return {name: count for name, count in counts.items() if count or name in (SAMPLED, TRAINED)}


def step_account(groups: Iterable[Group], rejected: Iterable[Group]) -> Mapping[str, int]:
    """The token account of a step: that of its groups, and of those that were rejected for it."""
    counts = Counter(token_account(sample for group in groups for sample in group.samples))
    gone = token_account(sample for group in rejected for sample in group.samples)[SAMPLED]
    counts.update({SAMPLED: gone, **({REJECTED: gone} if gone else {})})
    return counts
