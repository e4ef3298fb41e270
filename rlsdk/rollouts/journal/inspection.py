"""What a journal says of every sampled token: verified anew from the records of its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsdk.interfaces import CheckpointError, Trajectory
from rlsdk.interfaces.spelling import Setting
from rlsdk.rollouts.groups.group import Sample
from rlsdk.rollouts.groups.receipts import REJECTED, SAMPLED, receipt_problem, token_account
from rlsdk.rollouts.journal.recorded import SampleKey
from rlsdk.rollouts.journal.records import samples_from
from rlsdk.rollouts.journal.segments import read_headers, records

_PROMPT = (0,)
"""In place of a prompt that a record omits; records with a receipt omit none."""


@dataclass(frozen=True, kw_only=True)
class InspectedSample:
    """One sample, without its tokens."""

    group: int
    index: int
    num_rows: int
    tokens: Mapping[str, int]
    """As `token_account` has it."""
    versions: tuple[int, int] | None
    """Oldest and newest policy version of its sampled tokens; None: it has none."""
    score: float | None
    """None: it is not valid."""
    ended: str
    problem: str
    """What contradicts its receipt; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class InspectedStep:
    """One training step."""

    step: int
    groups: tuple[int, ...]
    samples: tuple[InspectedSample, ...]
    tokens: Mapping[str, int]
    """Recounted from the samples."""
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A whole journal."""

    steps: tuple[InspectedStep, ...]
    num_waiting: int
    """Sampled tokens of groups that no step has trained on or rejected."""
    problems: tuple[str, ...]
    """Of the whole: groups that were trained twice."""

    @property
    def is_sound(self) -> bool:
        return not self.problems and not any(step.problems for step in self.steps)


@dataclass
class _Found:
    samples: dict[int, dict[SampleKey, InspectedSample]] = field(default_factory=dict)
    updates: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The last update of every step: a step that was repeated after a resume counts once."""


def inspect_journal(folder: Path) -> Inspection:
    """Reads a journal, and counts its tokens: of all steps whose samples it still has.

    Raises:
        CheckpointError: it is damaged.
    """
    found = _Found()
    for record in records(folder):
        if record["event"] == "sample":
            key = str(record["name"]), int(record["sample"])
            sample = samples_from({key: record}, _PROMPT, _no_text)[key]
            found.samples.setdefault(int(record["group"]), {})[key] = _inspected(int(record["group"]), key[1], sample)
        elif record["event"] == "update":
            found.updates[int(record["step"])] = record
    first = _first_whole_step(folder)
    steps = tuple(_step(found, record) for step, record in sorted(found.updates.items()) if step >= first)
    gone = {int(group) for record in found.updates.values() for group in (*record["groups"], *record["rejected"])}
    waiting = [one for group, samples in found.samples.items() if group not in gone for one in samples.values()]
    return Inspection(
        steps=steps,
        num_waiting=sum(one.tokens[SAMPLED] for one in waiting),
        problems=tuple(_twice(found.updates.values())),
    )


def _first_whole_step(folder: Path) -> int:
    """The first step whose samples are all there, where older segments were removed."""
    header = next((header for _, header in read_headers(folder) if header is not None), None)
    return 0 if header is None or not header.segment.order else header.reached + 1


def recorded_sample(folder: Path, group: int, index: int) -> Sample:
    """A sample of a journal, without its text. A prompt that the record omits is one token, 0.

    Raises:
        CheckpointError: the journal is damaged, or has no such sample.
    """
    found: Mapping[str, Any] | None = None
    known = set[tuple[int, int]]()
    for record in records(folder):
        if record["event"] == "sample" and not record["name"]:
            known.add((int(record["group"]), int(record["sample"])))
            found = record if (int(record["group"]), int(record["sample"])) == (group, index) else found
    if found is None:
        groups = sorted({each for each, _ in known})
        some = f"groups {groups[0]} to {groups[-1]}" if groups else "no group"
        own = sorted(at for each, at in known if each == group)
        raise CheckpointError(
            f"{folder} has no sample {index} of group {group}; it has {some}{f', of this one {own}' if own else ''}. "
            f"`{Setting('schedule.journal', 'all')}` keeps every sample of a run"
        )
    return samples_from({("", index): found}, _PROMPT, _no_text)["", index]


def _inspected(group: int, index: int, sample: Sample) -> InspectedSample:
    versions = [run.version for row in sample.rows for run in row.versions if run.num_tokens]
    unknown = [version for version in versions if version < 0]
    return InspectedSample(
        group=group,
        index=index,
        num_rows=len(sample.rows),
        tokens=token_account([sample]),
        versions=(min(versions), max(versions)) if versions else None,
        score=sample.total if sample.grade.valid else None,
        ended="failed" if sample.episode is None else sample.episode.ended.value,
        problem=f"tokens of the unknown version {unknown[0]}" if unknown else receipt_problem(sample),
    )


def _step(found: _Found, record: Mapping[str, Any]) -> InspectedStep:
    groups, rejected = ([int(group) for group in record[name]] for name in ("groups", "rejected"))
    trained = [one for group in groups for (name, _), one in sorted(found.samples.get(group, {}).items()) if not name]
    let_go = [one for group in rejected for (name, _), one in found.samples.get(group, {}).items() if not name]
    tokens = Counter[str]()
    for one in trained:
        tokens.update(one.tokens)
    gone = sum(one.tokens[SAMPLED] for one in let_go)
    tokens.update({SAMPLED: gone, **({REJECTED: gone} if gone else {})})
    problems = [f"group {one.group}, sample {one.index}: {one.problem}" for one in trained if one.problem]
    if missing := [group for group in groups if group not in found.samples]:
        problems.append(f"trained on groups {missing}, of which the journal has no sample")
    if "tokens" in record and dict(record["tokens"]) != dict(tokens):
        problems.append(f"trained on {dict(record['tokens'])} tokens; its samples have {dict(tokens)}")
    return InspectedStep(
        step=int(record["step"]), groups=tuple(groups), samples=tuple(trained), tokens=tokens, problems=tuple(problems)
    )


def _twice(updates: Any) -> Sequence[str]:
    steps: dict[int, list[int]] = {}
    for record in updates:
        for group in record["groups"]:
            steps.setdefault(int(group), []).append(int(record["step"]))
    return [f"group {group} was trained in steps {sorted(found)}" for group, found in steps.items() if len(found) > 1]


def _no_text(row: Trajectory) -> str:
    return ""
