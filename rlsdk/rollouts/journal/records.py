"""Samples as plain records, exact to the bit: JSON types, and the arrays that they name by number. Reading them cannot
run code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import (
    CheckpointError,
    Ended,
    Episode,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Receipt,
    RlsdkError,
    Span,
    ToolUse,
    Trajectory,
    Turn,
    VersionRun,
)
from rlsdk.interfaces.spelling import Setting
from rlsdk.rollouts.groups.begun import Begun
from rlsdk.rollouts.groups.group import Failure, Grade, Sample
from rlsdk.rollouts.journal.recorded import SampleKey, row_records
from rlsdk.rollouts.journal.segments import ARRAYS, DTYPES

_DTYPES = {name: np.dtype(name) for name in DTYPES.values()}
Arrays = list[NDArray[Any]]
"""Of a record: its other members name them by number."""


def record_of(sample: Sample, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """The record of a sample, without its text and without the data that its rollouter passed to the rewards.

    Args:
        sample: a graded sample.
        prompt_ids: prompt of its group: a first span with these tokens is omitted, unless the sample has a receipt,
            which can be verified by the record alone.
    """
    episode = {} if sample.episode is None else _episode(sample.episode)
    has_receipt = sample.episode is not None and sample.episode.receipt is not None
    arrays: Arrays = []
    rows = [_row(row, () if has_receipt else prompt_ids, arrays) for row in sample.rows]
    graded = {"grade": _grade(sample.grade, arrays), ARRAYS: arrays}
    lost = {"lost_tokens": sample.lost_tokens} if sample.lost_tokens else {}
    if len(rows) > 1 or episode:
        return {"rows": rows, **episode, **graded}
    # A sample of one row is written as that row.
    return {**(rows[0] if rows else {"spans": None, "reason": None}), **lost, **graded}


def samples_from(
    records: Mapping[SampleKey, Mapping[str, Any]],
    prompt_ids: Sequence[int],
    text_of: Callable[[Trajectory], str],
    vocabulary: int | None = None,
) -> dict[SampleKey, Sample]:
    """The samples of a group's records, by name of their requests and index.

    Args:
        records: as `Recorded.samples` has them for the group.
        prompt_ids: of the group.
        text_of: returns the text of a trajectory as the rewards saw it; a sample's is that of its last row.
        vocabulary: see `rows_from`.

    Raises:
        CheckpointError: a record is damaged.
    """
    samples = {}
    for key, record in records.items():
        rows = rows_from(record, prompt_ids, vocabulary)
        with _checked():
            episode = _episode_from(record, rows) if rows else None
            lost = int(record.get("lost_tokens", 0))
        text, grade = text_of(rows[-1]) if rows else "", grade_from(record)
        samples[key] = Sample(episode=episode, text=text, grade=grade, lost_tokens=lost)
    return samples


def rows_from(
    record: Mapping[str, Any], prompt_ids: Sequence[int], vocabulary: int | None = None
) -> tuple[Trajectory, ...]:
    """The rows of a record; none: its rollouter failed.

    Args:
        record: of `record_of`.
        prompt_ids: prompt of its group.
        vocabulary: number of token ids of the model; None: unknown.

    Raises:
        CheckpointError: the record is damaged: not what `record_of` makes, an id beyond the vocabulary, or a log-prob
            that is not finite.
    """
    with _checked():
        arrays = record.get(ARRAYS, ())
        return tuple(_row_from(row, prompt_ids, arrays, vocabulary) for row in row_records(record))


def turn_record(key: str, turn: Turn) -> dict[str, Any]:
    """The record of a turn of an unfinished sample, with the key of its call."""
    arrays: Arrays = []
    return {"key": key, "reason": turn.finish_reason.value, "span": _span(turn.span, arrays), ARRAYS: arrays}


def tool_record(call: int, use: ToolUse) -> dict[str, Any]:
    """The record of a call of a tool of an unfinished sample, with its number in the episode."""
    return {"call": call, "use": _plain(asdict(use))}


def begun_from(
    turns: Mapping[SampleKey, Sequence[Mapping[str, Any]]],
    tools: Mapping[SampleKey, Sequence[Mapping[str, Any]]],
    vocabulary: int | None = None,
) -> dict[SampleKey, Begun]:
    """What the unfinished samples of a group have, from their records; see `rows_from`.

    Raises:
        CheckpointError: a record is damaged.
    """
    with _checked():
        return {
            sample: Begun(
                turns={str(one["key"]): _turn_from(one, vocabulary) for one in turns.get(sample, ())},
                tools={int(one["call"]): ToolUse(**one["use"]) for one in tools.get(sample, ())},
            )
            for sample in {**turns, **tools}
        }


def _turn_from(record: Mapping[str, Any], vocabulary: int | None) -> Turn:
    span = _span_from(record["span"], record[ARRAYS], vocabulary)
    return Turn(span=span, finish_reason=FinishReason(record["reason"]))


def unfinished_record(request: GenerationRequest, output: GenerationOutput) -> dict[str, Any]:
    """The record of a stopped sample; it is identified by seed and index, which determine its tokens."""
    arrays: Arrays = []
    span = _span(Span.of(output), arrays)
    return {"seed": request.sampling.seed, "sample": output.sample_index, "span": span, ARRAYS: arrays}


def unfinished_from(record: Mapping[str, Any], vocabulary: int | None = None) -> GenerationOutput:
    """The output of a record, for a request that has no id yet; see `rows_from`.

    Raises:
        CheckpointError: the record is damaged.
    """
    with _checked():
        span = _span_from(record["span"], record[ARRAYS], vocabulary)
        if span.log_probs is None:
            raise ValueError("a stopped sample without log-probs")
        return GenerationOutput(
            request_id="",
            sample_index=int(record["sample"]),
            token_ids=span.token_ids,
            log_probs=span.log_probs,
            finish_reason=FinishReason.ABORT,
            versions=span.versions,
        )


def grade_from(record: Mapping[str, Any]) -> Grade:
    """The grade of a record.

    Raises:
        CheckpointError: the record is damaged, or of another version of rlsdk.
    """
    with _checked():
        values = {**record["grade"]}
        if "token_scores" in values:
            values["token_scores"] = _array(record[ARRAYS], values["token_scores"])
        values["failures"] = tuple(Failure(**failure) for failure in values.get("failures", ()))
        grade = Grade(**values)
        _check_grade(grade)
        return grade


def _check_grade(grade: Grade) -> None:
    numbers = [grade.score, *grade.terms.values(), *grade.metrics.values()]
    wrong = [number for number in numbers if isinstance(number, bool) or not isinstance(number, int | float)]
    tokens = grade.token_scores
    if wrong or any(map(math.isnan, numbers)):
        raise ValueError(f"a grade with the numbers {numbers}")
    if tokens is not None and np.isnan(tokens).any():
        raise ValueError("token scores that are not numbers")
    if not isinstance(grade.valid, bool) or not isinstance(grade.substituted, bool):
        raise ValueError(f"valid is {grade.valid!r}, substituted is {grade.substituted!r}")


def _grade(grade: Grade, arrays: Arrays) -> dict[str, Any]:
    """Only the fields that differ from an empty grade."""
    found = {"score": grade.score}
    for name, empty in _EMPTY_GRADE.items():
        value = getattr(grade, name)
        if isinstance(value, np.ndarray):
            found[name] = _added(arrays, value, value.dtype.newbyteorder("<").str)
        elif value is not empty and value != empty:
            found[name] = _plain(value)
    return found


def _episode(episode: Episode) -> dict[str, Any]:
    """What an episode has beside its rows; empty for a row alone. Its reward is in the grade."""
    found: dict[str, Any] = {}
    if episode.chains and len({*episode.chains}) > 1:
        found["chains"] = list(episode.chains)
    if episode.chain_rewards:
        found["chain_rewards"] = sorted(episode.chain_rewards.items())
    if any(scale != 1 for scale in episode.scales):
        found["scales"] = list(episode.scales)
    if episode.ended is not Ended.of(episode.rows[-1].finish_reason):
        found["ended"] = episode.ended.value
    if episode.info:
        found["info"] = dict(episode.info)
    if episode.receipt is not None:
        found["receipt"] = _plain(asdict(episode.receipt))
    if episode.tools:
        found["tools"] = [_plain(asdict(use)) for use in episode.tools]
    return {"episode": found} if found else {}


def _episode_from(record: Mapping[str, Any], rows: tuple[Trajectory, ...]) -> Episode:
    found = record.get("episode", {})
    plain = Episode.of(rows[-1])
    receipt = found.get("receipt")
    return replace(
        plain,
        rows=rows,
        chains=tuple(map(int, found.get("chains", ()))),
        scales=tuple(map(float, found.get("scales", ()))),
        chain_rewards={int(chain): float(reward) for chain, reward in found.get("chain_rewards", ())},
        ended=Ended(found.get("ended", plain.ended)),
        info={str(name): float(value) for name, value in found.get("info", {}).items()},
        tools=tuple(ToolUse(**use) for use in found.get("tools", ())),
        receipt=None if receipt is None else Receipt(**{**receipt, "digests": tuple(receipt["digests"])}),
    )


def _row(trajectory: Trajectory, prompt_ids: Sequence[int], arrays: Arrays) -> dict[str, Any]:
    info = {"info": dict(trajectory.info)} if trajectory.info else {}
    return {"spans": _spans(trajectory, prompt_ids, arrays), "reason": trajectory.finish_reason.value, **info}


def _row_from(
    record: Mapping[str, Any], prompt_ids: Sequence[int], arrays: Sequence[NDArray[Any]], vocabulary: int | None
) -> Trajectory:
    spans = [
        Span.given(prompt_ids) if span is None else _span_from(span, arrays, vocabulary) for span in record["spans"]
    ]
    info = {str(name): float(value) for name, value in record.get("info", {}).items()}
    return Trajectory(spans=tuple(spans), finish_reason=FinishReason(record["reason"]), info=info)


def _spans(trajectory: Trajectory, prompt_ids: Sequence[int], arrays: Arrays) -> list[dict[str, Any] | None]:
    first, *rest = trajectory.spans
    is_prompt = len(first) == len(prompt_ids) and first.token_ids.tolist() == list(prompt_ids)
    return [None if is_prompt else _span(first, arrays), *(_span(span, arrays) for span in rest)]


def _span(span: Span, arrays: Arrays) -> dict[str, Any]:
    found: dict[str, Any] = {"ids": _added(arrays, span.token_ids, "<i4")}
    if span.log_probs is not None:
        found["log_probs"] = _added(arrays, span.log_probs, "<f4")
        found["versions"] = [[run.version, run.num_tokens] for run in span.versions]
    return found


def _span_from(record: Mapping[str, Any], arrays: Sequence[NDArray[Any]], vocabulary: int | None) -> Span:
    ids = _array(arrays, record["ids"], "<i4").astype(np.int64)
    if len(ids) and (ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary)):
        most = "" if vocabulary is None else f" to {vocabulary - 1}"
        raise ValueError(f"token ids from {ids.min()} to {ids.max()}; the model knows 0{most}")
    if "log_probs" not in record:
        return Span(token_ids=ids)
    log_probs = _array(arrays, record["log_probs"], "<f4").astype(np.float32)
    runs = tuple(VersionRun(int(version), int(count)) for version, count in record["versions"])
    counts = [run.num_tokens for run in runs]
    if len(log_probs) != len(ids) or sum(counts) != len(ids) or min(counts, default=0) < 0:
        raise ValueError(f"{len(ids)} tokens with {len(log_probs)} log-probs and versions of {runs}")
    if not np.isfinite(log_probs).all():
        raise ValueError(f"log-prob {log_probs[~np.isfinite(log_probs)][0]} of a sampled token; expected a number")
    return Span(token_ids=ids, log_probs=log_probs, versions=runs)


def _plain(value: Any) -> Any:
    """Converts failures to JSON types; everything else already is one."""
    if isinstance(value, Failure):
        return {"kind": value.kind, "source": value.source, "message": value.message}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _added(arrays: Arrays, array: NDArray[Any], dtype: str) -> int:
    """The number of an array, which is added to those of the record."""
    arrays.append(np.ascontiguousarray(array, _DTYPES[dtype]))
    return len(arrays) - 1


def _array(arrays: Sequence[NDArray[Any]], number: Any, *dtypes: str) -> NDArray[Any]:
    """An array of a record, by its number.

    Raises:
        ValueError: it has none of this number, or of another dtype than these; none: any that records have.
    """
    expected = dtypes or tuple(DTYPES.values())
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(arrays):
        raise ValueError(f"array {number!r} of {len(arrays)}")
    if arrays[number].dtype.str not in expected:
        raise ValueError(f"an array of dtype {arrays[number].dtype.str!r}; expected one of {expected}")
    return arrays[number]


@contextmanager
def _checked() -> Iterator[None]:
    """Turns the error of a record that is not what rlsdk writes into a `CheckpointError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RlsdkError) as error:
        raise CheckpointError(
            f"a sample of the journal cannot be read ({type(error).__name__}: {error}): it is damaged, or of another "
            f"version of rlsdk. `{Setting('schedule.journal', 'none')}` continues without it: what was not "
            "trained on is generated again"
        ) from error


_EMPTY_GRADE = {field.name: getattr(Grade(), field.name) for field in fields(Grade) if field.name != "score"}
