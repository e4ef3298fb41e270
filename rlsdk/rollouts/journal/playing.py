"""Episodes of a journal, played again with the turns that were sampled: the first call that differs is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from rlsdk.interfaces import ENVIRONMENT_REWARD, Episode, RlsdkError, ToolUse, Trajectory, Turn
from rlsdk.rollouts.client.client import GenerationClient
from rlsdk.rollouts.groups.begun import Begun
from rlsdk.rollouts.groups.group import GroupTask, Sample
from rlsdk.rollouts.groups.rollouter import Call, GroupRequests, SampleGenerate, TextCodec
from rlsdk.rollouts.journal.records import begun_from, samples_from
from rlsdk.rollouts.journal.segments import records

MOST_SHOWN = 160
"""Most characters of a text in a message."""
_EPISODE = ("", 0)


class DivergedError(RlsdkError):
    """An episode that is played again asks for something that its journal does not have."""


@dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """A sample of a journal, with every turn that was sampled for it."""

    group: int
    """Ordinal."""
    index: int
    """Of the sample in its group."""
    record: Mapping[str, Any]
    turns: Sequence[Mapping[str, Any]]

    def sample(self, prompt_ids: Sequence[int]) -> Sample:
        """The sample, without its text; `prompt_ids` are those of its group.

        Raises:
            CheckpointError: its record is damaged.
        """
        return samples_from({_EPISODE: self.record}, prompt_ids, lambda row: "")[_EPISODE]

    def begun(self) -> Begun:
        """Its turns, by key of the call.

        Raises:
            CheckpointError: a record is damaged.
        """
        return begun_from({_EPISODE: self.turns}, {})[_EPISODE]


def recorded_episodes(folder: Path) -> list[RecordedEpisode]:
    """The samples of a journal that were made by more than one call, in order; not those that failed.

    Raises:
        CheckpointError: the journal is damaged.
    """
    samples: dict[tuple[int, int], Mapping[str, Any]] = {}
    turns: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for record in records(folder):
        if record["event"] in ("sample", "turn") and not record["name"]:
            key = int(record["group"]), int(record["sample"])
            if record["event"] == "sample":
                samples[key] = record
            else:
                turns.setdefault(key, {})[str(record["key"])] = record
    return [
        RecordedEpisode(group=key[0], index=key[1], record=record, turns=list(turns[key].values()))
        for key, record in sorted(samples.items())
        if key in turns and ("rows" in record or record["spans"] is not None)
    ]


class ReplayedGenerate(SampleGenerate):
    """Satisfies `Generate` with the turns of a journal."""

    def __init__(
        self, task: GroupTask, codec: TextCodec, max_model_tokens: int, recorded: RecordedEpisode, sample: Sample
    ) -> None:
        begun = recorded.begun()
        nothing = cast(GenerationClient, None)  # no call reaches it
        requests = GroupRequests(task, nothing, codec, max_model_tokens, begun={recorded.index: begun})
        super().__init__(requests, recorded.index)
        self._contexts = [context for row in sample.rows for context in _contexts(row)]
        self._asked: list[tuple[int, ...]] = []

    async def __call__(self, token_ids: Sequence[int], **limits: Any) -> Turn:
        """See `SampleGenerate`.

        Raises:
            DivergedError: the journal has no such call.
        """
        turn = await super().__call__(token_ids, **limits)
        self._asked.append(tuple(token_ids))
        return turn

    async def _sampled(self, key: str, call: Call) -> Turn:
        left = [context for context in self._contexts if context not in self._asked]
        where = f"turn {len(self._asked) + 1}"
        if not left:
            raise DivergedError(f"{where}: expected the end of the episode, came {self._shown(call.token_ids)}")
        common, expected = max((_common(context, call.token_ids), context) for context in left)
        if expected == call.token_ids:
            raise DivergedError(f"{where}: expected the limits and the draw of the recorded call, came others")
        raise DivergedError(
            f"{where}: expected {self._shown(expected[common:])}, came {self._shown(call.token_ids[common:])}, after "
            f"{common} equal tokens"
        )

    def _shown(self, ids: Sequence[int]) -> str:
        return _short(self.decode(list(ids))) if ids else "nothing"


def difference(sample: Sample, made: Episode, generate: ReplayedGenerate) -> str:
    """What differs between a sample of a journal and the episode that was played again; empty: nothing."""
    recorded = sample.episode
    assert recorded is not None
    for at in range(max(len(recorded.tools), len(made.tools))):
        expected, came = (_use(episode.tools[at : at + 1]) for episode in (recorded, made))
        if expected != came:
            return f"call {at + 1} of a tool: expected {expected}, came {came}"
    if generate.num_unasked:
        return f"expected turns of {generate.num_unasked} more tokens, came the end of the episode"
    for number, (expected_row, row) in enumerate(zip(recorded.rows, made.rows, strict=False), 1):
        if expected_row.digest != row.digest:
            return f"row {number}: expected {expected_row.digest}, came {row.digest} (digests of its tokens)"
    if len(recorded.rows) != len(made.rows):
        return f"expected {len(recorded.rows)} rows, came {len(made.rows)}"
    own = sample.grade.terms.get(ENVIRONMENT_REWARD)
    return "" if own == made.reward else f"expected the score {own}, came {made.reward}"


def _contexts(row: Trajectory) -> list[tuple[int, ...]]:
    """What stands before each sampled span of a row."""
    found, ids = [], list[int]()
    for span in row.spans:
        if span.sampled:
            found.append(tuple(ids))
        ids += span.token_ids.tolist()
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal tokens at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _use(uses: Sequence[ToolUse]) -> str:
    if not uses:
        return "none"
    (use,) = uses
    return f"{use.name}({_short(str(dict(use.arguments)))}) -> {_short(use.result)}{' (failed)' if use.failed else ''}"


def _short(text: str) -> str:
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")
