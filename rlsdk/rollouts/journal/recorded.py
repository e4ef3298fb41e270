"""Reads a journal: what a resume can use again, what a replay repeats, and what became of every group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlsdk.rollouts.journal.segments import (
    Header,
    Segment,
    damaged,
    has_records,
    read_all,
    read_headers,
    records,
    unreadable,
)

SampleKey = tuple[str, int]
"""Name and index of a sample within its group."""
Chosen = Sequence[tuple[Segment, Header | None]]
"""Segments that are read; None: nothing was written into it."""


@dataclass(kw_only=True)
class Recorded:
    """The journal's records of the steps after a checkpoint."""

    samples: dict[int, dict[SampleKey, Mapping[str, Any]]] = field(default_factory=dict)
    """Sample records by ordinal of the group."""
    turns: dict[int, dict[SampleKey, list[Mapping[str, Any]]]] = field(default_factory=dict)
    """Records of the turns of samples that were not finished, by ordinal of the group."""
    tools: dict[int, dict[SampleKey, list[Mapping[str, Any]]]] = field(default_factory=dict)
    """Records of calls of their tools, whose results depend on no weights."""
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups that each step trained on, by step."""
    updates: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of each step's updates, by step."""
    unfinished: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """Records of stopped samples, by seed of the request and index of the sample."""
    reached: int = 0
    """Newest step that groups were started for."""
    end: tuple[int, int] | None = None
    """Order and last checksum of the last segment that was read."""
    differs: Mapping[str, tuple[Any, Any]] | None = None
    """Parts of `made_by` that differ from those of records that are therefore not used: name -> (then, now). None: all
    are used."""
    is_foreign: bool = False
    """Whether the journal is of another run than the checkpoint, and therefore not used."""

    def no_newer(self, version: int) -> Recorded:
        """Returns only samples whose tokens are all of this version or older, without the planned steps."""
        kept = {
            ordinal: {key: record for key, record in group.items() if _newest(record) <= version}
            for ordinal, group in self.samples.items()
        }
        unfinished = {key: record for key, record in self.unfinished.items() if _newest_of(record) <= version}
        turns = {
            ordinal: {key: [one for one in found if _newest_of(one) <= version] for key, found in group.items()}
            for ordinal, group in self.turns.items()
        }
        return replace(self, samples=kept, turns=turns, unfinished=unfinished, trained={})


def read_journal(
    folder: Path,
    *,
    after: int,
    made_by: Mapping[str, Any] | None = None,
    run: str | None = None,
    since: int | None = None,
    needed: Callable[[int], bool] = lambda group: True,
) -> Recorded:
    """Reads the records of the steps after `after`. Of steps repeated after a resume only the repetition counts.

    Args:
        folder: folder of the journal.
        after: number of steps already done.
        made_by: what the samples must have been made by; None: anything. Records before the newest that were made by
            something else are of other weights, and not used either.
        run: identity of the run whose checkpoint is resumed; None: any run.
        since: only samples of later steps are needed, so segments that have none are not read. None: all are read.
        needed: whether samples of this group are needed, by ordinal.

    Raises:
        CheckpointError: a record or segment is damaged, missing or of another run.
    """
    recorded = Recorded(reached=after)
    chosen: Chosen = read_headers(folder)
    if run is not None:
        recorded.is_foreign = _is_foreign(folder, chosen, run)
        if recorded.is_foreign:
            return recorded
    if since is not None:
        chosen = chosen[first_needed(chosen, since) :]
    if made_by is not None:
        chosen, recorded.differs = _made_by(chosen, made_by)
    done = set[int]()
    for header, record, place in read_all(chosen):
        if place.number == 1 and header.begins and header.newest is not None and made_by is not None:
            recorded = recorded.no_newer(header.newest)
        try:
            _take(recorded, record, after, done, needed)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise unreadable(header.segment.path, place.number, error) from error
        recorded.reached = max(recorded.reached, header.reached)
        recorded.end = header.segment.order, place.checksum
    again = {group for groups in recorded.trained.values() for group in groups}
    for ordinal in done - again:
        recorded.samples.pop(ordinal, None)
        recorded.turns.pop(ordinal, None)
        recorded.tools.pop(ordinal, None)
    return recorded


def account(folder: Path) -> dict[int, str]:
    """State of every group that was started: `trained in step K`, `rejected in step K`, or `waiting`."""
    fate: dict[int, str] = {}
    for record in records(folder):
        match record["event"]:
            case "start":
                fate |= {int(group): "waiting" for group in record["groups"] if int(group) not in fate}
            case "update":
                step = int(record["step"])
                fate |= {int(group): f"trained in step {step}" for group in record["groups"]}
                fate |= {int(group): f"rejected in step {step}" for group in record["rejected"]}
    return fate


def first_needed(chosen: Chosen, since: int) -> int:
    """Position of the first segment that may have samples of steps after `since`."""
    known = [(at, header) for at, (_, header) in enumerate(chosen) if header is not None]
    first = 0
    for _, (at, following) in pairwise(known):
        if following.reached > since:
            break
        first = at
    return first


def _is_foreign(folder: Path, chosen: Chosen, run: str) -> bool:
    """Whether all segments are of another run.

    Raises:
        CheckpointError: some are.
    """
    others = [segment.path for segment, header in chosen if header is not None and header.run != run]
    if others and len(others) < sum(header is not None for _, header in chosen):
        raise damaged(folder, f"{others[0]} is of another run than the checkpoint and the other segments")
    return bool(others)


def _made_by(chosen: Chosen, made_by: Mapping[str, Any]) -> tuple[Chosen, Mapping[str, tuple[Any, Any]] | None]:
    """The newest segments whose records were made by `made_by`; and what differs in the newest of the others, if
    records are not used because of it."""
    first = len(chosen)
    for at in range(len(chosen) - 1, -1, -1):
        header = chosen[at][1]
        if header is not None and header.made_by != made_by:
            then = header.made_by
            names = sorted(name for name in then.keys() | made_by.keys() if then.get(name) != made_by.get(name))
            lost = any(has_records(segment) for segment, header in chosen[: at + 1] if header is not None)
            return chosen[first:], {name: (then.get(name), made_by.get(name)) for name in names} if lost else None
        first = at if header is not None else first
    return chosen[first:], None


def _take(
    found: Recorded, record: Mapping[str, Any], after: int, done: set[int], needed: Callable[[int], bool]
) -> None:
    """Adds one record, whose form it checks as far as reading the journal needs it."""
    match record["event"]:
        case "start":
            found.reached = max(found.reached, int(record["step"]))
        case "sample" if needed(group := int(record["group"])):
            _newest(record)
            key = str(record["name"]), int(record["sample"])
            found.samples.setdefault(group, {})[key] = record
            found.turns.get(group, {}).pop(key, None)
            found.tools.get(group, {}).pop(key, None)
        case "turn" if needed(group := int(record["group"])):
            _newest_of(record)
            key = str(record["name"]), int(record["sample"])
            found.turns.setdefault(group, {}).setdefault(key, []).append(record)
        case "tool" if needed(group := int(record["group"])):
            key = str(record["name"]), int(record["sample"])
            found.tools.setdefault(group, {}).setdefault(key, []).append(record)
        case "unfinished":
            _newest_of(record)
            found.unfinished[int(record["seed"]), int(record["sample"])] = record
        case "train" if int(record["step"]) > after:
            found.trained[int(record["step"])] = tuple(map(int, record["groups"]))
        case "train":
            done.update(map(int, record["groups"]))
        case "update" if int(record["step"]) > after:
            found.updates[int(record["step"])] = {str(name): float(value) for name, value in record["figures"].items()}


def row_records(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The record of each row of a sample's record; none: its rollouter failed.

    Raises:
        KeyError: it is not the record of a sample.
    """
    if "rows" in record:
        rows: Sequence[Mapping[str, Any]] = record["rows"]
        return rows
    return () if record["spans"] is None else (record,)


def _newest_of(record: Mapping[str, Any]) -> int:
    """As `_newest`, of a record of one span."""
    return _newest({"spans": [record["span"]]})


def _newest(record: Mapping[str, Any]) -> int:
    spans = [span for row in row_records(record) for span in row["spans"] if span is not None]
    runs = [run for span in spans for run in span.get("versions", ())]
    return max((int(version) for version, _ in runs), default=-1)
