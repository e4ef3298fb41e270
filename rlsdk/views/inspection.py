"""The tokens of a run's journal as text: by step, by sample of a step, and one episode as a conversation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlsdk.interfaces import Span
from rlsdk.rollouts.groups.group import Sample
from rlsdk.rollouts.groups.receipts import SAMPLED, TRAINED
from rlsdk.rollouts.journal.inspection import InspectedSample, InspectedStep, Inspection

Decode = Callable[[Sequence[int]], str]


def whole_run(found: Inspection) -> Iterator[str]:
    """A line for each step, and the sums of all."""
    yield from _table(
        ("step", "groups", "samples", "rows", "sampled", "trained", "not trained", "versions"),
        [_step_cells(step) for step in found.steps],
    )
    total = Counter[str]()
    for step in found.steps:
        total.update(step.tokens)
    left = f" + {total[SAMPLED] - total[TRAINED]} not trained ({reasons})" if (reasons := _not_trained(total)) else ""
    yield f"{total[SAMPLED]} tokens sampled = {total[TRAINED]} trained{left}"
    if found.num_waiting:
        yield f"{found.num_waiting} more were sampled for groups that no step has trained on yet"
    yield from _verdict([*found.problems, *(f"step {s.step}: {each}" for s in found.steps for each in s.problems)])


def one_step(step: InspectedStep) -> Iterator[str]:
    """A line for each sample of a step."""
    yield from _table(
        ("episode", "rows", "sampled", "trained", "not trained", "versions", "score", "ended"),
        [_sample_cells(sample) for sample in step.samples],
    )
    yield from _verdict(step.problems)


def one_episode(sample: Sample, decode: Decode) -> Iterator[str]:
    """An episode span by span, with what it accounts for."""
    trained_in = {}
    for number, row in enumerate(sample.rows, 1):
        yield f"row {number} of {len(sample.rows)}  {row.num_tokens} tokens, {row.num_sampled} trained  {row.digest}"
        for span in row.spans:
            head = _of_span(span)
            key = tuple(span.token_ids.tolist())
            if span.sampled:
                trained_in[key] = number
            elif key in trained_in:
                head += f", trained in row {trained_in[key]}"
            yield f"  {head}"
            yield from (f"    {line}" for line in decode(span.token_ids.tolist()).splitlines() or [""])
    for use in () if sample.episode is None else sample.episode.tools:
        took = "" if use.seconds is None else f"  {use.seconds:.3f} s"
        said = json.dumps(dict(use.arguments), ensure_ascii=False)
        yield f"turn {use.turn + 1}: {use.name} {said}{' FAILED' if use.failed else ''}{took}"
        yield from (f"    {line}" for line in use.result.splitlines())
    receipt = None if sample.episode is None else sample.episode.receipt
    if receipt is not None:
        reasons = "".join(f" + {count} {reason}" for reason, count in receipt.not_trained.items())
        yield f"receipt  {receipt.sampled} sampled = {receipt.trained} trained{reasons}"
        for name, counts in (("rendered again", receipt.rendered_again), ("calls", receipt.counts)):
            if counts := {key: count for key, count in counts.items() if count}:
                yield f"{name}  " + ", ".join(f"{key} {count}" for key, count in counts.items())
    if sample.lost_tokens:
        yield f"failed, with {sample.lost_tokens} tokens sampled"
    terms = ", ".join(f"{name} {value:g}" for name, value in sample.grade.terms.items())
    ended = "failed" if sample.episode is None else sample.episode.ended.value
    yield f"score  {sample.total:g}" + (f" ({terms})" if terms else "") + f"; ended: {ended}"
    yield from (f"{failure.source}: {failure.message}" for failure in sample.grade.failures)


def _of_span(span: Span) -> str:
    if not span.sampled:
        return f"given, {len(span)} tokens"
    versions = sorted({run.version for run in span.versions if run.num_tokens})
    assert span.log_probs is not None
    mean = float(span.log_probs.mean()) if len(span) else 0.0
    return f"sampled, {len(span)} tokens, version {', '.join(map(str, versions))}, mean log-prob {mean:.3f}"


def _step_cells(step: InspectedStep) -> tuple[str, ...]:
    runs = [sample.versions for sample in step.samples if sample.versions is not None]
    versions = (min(first for first, _ in runs), max(last for _, last in runs)) if runs else None
    return (
        str(step.step), str(len(step.groups)), str(len(step.samples)), str(sum(s.num_rows for s in step.samples)),
        str(step.tokens[SAMPLED]), str(step.tokens[TRAINED]), _not_trained(step.tokens), _range(versions),
    )  # fmt: skip


def _sample_cells(sample: InspectedSample) -> tuple[str, ...]:
    score = "none" if sample.score is None else f"{sample.score:g}"
    return (
        f"{sample.group}/{sample.index}", str(sample.num_rows), str(sample.tokens[SAMPLED]),
        str(sample.tokens[TRAINED]), _not_trained(sample.tokens), _range(sample.versions), score, sample.ended,
    )  # fmt: skip


def _not_trained(tokens: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in tokens.items() if count and name not in (SAMPLED, TRAINED))


def _range(versions: tuple[int, int] | None) -> str:
    if versions is None:
        return ""
    return str(versions[0]) if versions[0] == versions[1] else f"{versions[0]} to {versions[1]}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _verdict(problems: Sequence[str]) -> Iterator[str]:
    yield from problems or ["verified: every trained token was sampled once, at a known version, with its log-prob"]
