"""What an agent asks for and gets, whichever dialect it speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import AssistantMessage, Ended, Message, Tool

MAX_CHOICES = 8
"""Most answers to one request."""


class Refusal(Exception):  # noqa: N818
    """A request that is not answered, as OpenAI's API says it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        ended: Ended | None = None,
    ) -> None:
        """Args:
        message: for a person: the request, what is wrong, what to do.
        status: of HTTP; clients repeat 408, 409, 429 and from 500 on, and no other.
        kind: OpenAI's type of error.
        code: OpenAI's code; None: there is none.
        param: the field of the request; None: no single one.
        ended: the limit that the episode has reached; None: another request may be answered.
        """
        super().__init__(message)
        self.status = status
        self.ended = ended
        self.body: Mapping[str, object] = {"message": message, "type": kind, "param": param, "code": code}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    messages: tuple[Message, ...]
    """As chat templates take them; arguments of calls are objects."""
    tools: tuple[Tool, ...] = ()
    reads_calls: bool = True
    """Whether calls are looked for: not with `tool_choice: none`."""
    max_tokens: int | None = None
    """Most tokens of the answer; None: the run's limit, which is also the highest."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, in addition to the run's."""
    num_choices: int = 1
    overridden: tuple[str, ...] = ()
    """Settings of sampling that the run decides."""
    wants_log_probs: bool = False
    """Whether the text of every token is asked for."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer."""

    message: AssistantMessage
    """Its calls have ids."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    token_ids: NDArray[np.int64]
    """As sampled."""
    log_probs: NDArray[np.float32]
    pieces: tuple[str, ...]
    """Text of each token."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a request gets."""

    id: str
    """Unique in a run; the same when a run is repeated."""
    choices: tuple[Choice, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)
