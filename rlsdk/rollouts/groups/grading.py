"""Grading of episodes: those that end together are decoded, submitted and delivered together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import ENVIRONMENT_REWARD, Episode, RewardSample
from rlsdk.rollouts.groups.group import Failure, Grade, GroupTask, Sample
from rlsdk.rollouts.groups.group_assembly import Deliver
from rlsdk.rollouts.groups.rollouter import TextCodec, Tokens, without_stop


class Codec(TextCodec, Protocol):
    """The part of the policy's tokenizer that the stream needs."""

    def decode_all(self, token_ids: Sequence[Tokens]) -> list[str]:
        """Many at once: much cheaper than one by one."""
        ...


class Grader(Protocol):
    """Grades samples elsewhere."""

    def submit(self, samples: Sequence[RewardSample]) -> Future[Sequence[Grade]]:
        """Submits samples; one grade per sample, however they are split into calls. Returns immediately."""
        ...


INAPPLICABLE = "inapplicable"
"""Kind of failure of a sample that nothing scored."""
_Waiting = tuple[GroupTask, Episode, Deliver]
"""An episode to grade, and the callback for its sample."""


class Grading:
    """Decodes and submits together what finished in one turn of the loop."""

    def __init__(
        self, grader: Grader | None, graders: Mapping[str, Grader], codec: Codec, *, brings_score: bool = False
    ) -> None:
        """`brings_score`: episodes bring their score; one without any, which no grader grades, is invalid."""
        nothing = Failure(kind=INAPPLICABLE, source=ENVIRONMENT_REWARD, message="the episode brought no score")
        self._ungraded = Grade(valid=False, failures=(nothing,)) if brings_score else Grade()
        self._grader = grader
        self._graders = graders
        self._codec = codec
        self._waiting: list[_Waiting] = []
        self.pending = 0
        """Number of added samples that have no grade yet."""

    def add(self, task: GroupTask, episode: Episode, deliver: Deliver) -> None:
        """Queues an episode; `deliver` is called with the graded sample or the error."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((task, episode, deliver))
        self.pending += 1

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            self._submit(waiting)
        except Exception as error:
            self.pending -= len(waiting)
            for _, _, deliver in waiting:
                deliver(error)

    def _submit(self, waiting: Sequence[_Waiting]) -> None:
        texts = self._codec.decode_all(
            [without_stop(row.response_ids, task.sampling.stop_token_ids)
             for task, episode, _ in waiting for row in episode.rows]
        )  # fmt: skip
        ends = np.cumsum([len(episode.rows) for _, episode, _ in waiting]).tolist()
        parts: dict[Grader | None, list[int]] = {}
        for at, (task, _, _) in enumerate(waiting):
            parts.setdefault(self._graders.get(task.id.source, self._grader), []).append(at)
        for grader, places in parts.items():
            rows = [texts[ends[at] - len(waiting[at][1].rows) : ends[at]] for at in places]
            self._grade(grader, [waiting[at] for at in places], rows)

    def _grade(self, grader: Grader | None, waiting: Sequence[_Waiting], rows: Sequence[Sequence[str]]) -> None:
        """Grades episodes, of whose rows these are the texts."""
        texts = [of_rows[-1] for of_rows in rows]
        if grader is None:
            self.pending -= len(waiting)
            for (_, episode, deliver), text in zip(waiting, texts, strict=True):
                deliver(Sample(episode=episode, text=text, grade=with_own_reward(self._ungraded, episode)))
            return
        samples = [
            RewardSample(
                prompt=task.prompt.text,
                response=of_rows[-1],
                answer=task.prompt.answer,
                row=task.prompt.row,
                truncated=episode.truncated,
                extra=_extra(episode, of_rows),
                response_ids=episode.rows[-1].response_ids,
            )
            for (task, episode, _), of_rows in zip(waiting, rows, strict=True)
        ]
        grades = asyncio.wrap_future(grader.submit(samples))
        grades.add_done_callback(lambda done: self._graded(done, waiting, texts))

    def _graded(self, done: asyncio.Future[Sequence[Grade]], waiting: Sequence[_Waiting], texts: Sequence[str]) -> None:
        self.pending -= len(waiting)
        _deliver(done, waiting, texts)


def _deliver(
    done: asyncio.Future[Sequence[Grade]],
    waiting: Sequence[_Waiting],
    texts: Sequence[str],
) -> None:
    """Gives each sample its grade, or all of them the error."""
    if done.cancelled():
        return
    error = done.exception()
    for at, (_, episode, deliver) in enumerate(waiting):
        if error is not None:
            deliver(error)
        else:
            grade = with_own_reward(done.result()[at], episode)
            deliver(Sample(episode=episode, text=texts[at], grade=grade))


def _extra(episode: Episode, texts: Sequence[str]) -> Mapping[str, Any]:
    """What the rewards get beside the text of the last row; `rows`: the texts of all, where there are several."""
    several = {"rows": list(texts)} if len(texts) > 1 else {}
    return {**episode.rows[-1].extra, **episode.extra, **several}


def with_own_reward(grade: Grade, episode: Episode) -> Grade:
    """The grade with what the episode itself brings: its score, and rewards of tokens.

    A sample that no reward applies to is valid with the episode's score; one whose rewards failed stays invalid.
    """
    if episode.token_rewards is not None:
        tokens = _of_all_rows(grade.token_scores, episode)
        given = np.concatenate([row.response_mask for row in episode.rows])
        own = np.where(given, np.asarray(episode.token_rewards, np.float64), 0.0)
        grade = replace(grade, token_scores=own if tokens is None else tokens + own)
    elif grade.token_scores is not None and len(episode.rows) > 1:
        grade = replace(grade, token_scores=_of_all_rows(grade.token_scores, episode))
    if episode.reward is None:
        return grade
    failures = tuple(failure for failure in grade.failures if failure.kind != INAPPLICABLE)
    terms = {**grade.terms, ENVIRONMENT_REWARD: episode.reward}
    if grade.has_failed and failures:
        return replace(grade, terms=terms)
    score = episode.reward if grade.has_failed else grade.score + episode.reward
    return replace(grade, score=score, valid=True, substituted=False, terms=terms, failures=failures)


def _of_all_rows(scores: NDArray[np.float64] | None, episode: Episode) -> NDArray[np.float64] | None:
    """Token scores of the last row, which is the one that rewards see, as those of all rows."""
    if scores is None or len(episode.rows) == 1:
        return scores
    before = sum(row.num_tokens - len(row.spans[0]) for row in episode.rows[:-1])
    return np.concatenate([np.zeros(before), scores])
