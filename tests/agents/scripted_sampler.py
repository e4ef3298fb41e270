"""A sampler that says what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from agent_cases import tokenizer_of

from rlsdk.agents.chats.chat_format import ChatFormat
from rlsdk.agents.sessions.session import Place
from rlsdk.interfaces import FinishReason, Span, Turn, VersionRun

END = "<|im_end|>"


def form_of(name: str = "json_in_tags") -> ChatFormat:
    return ChatFormat(tokenizer_of(name), needs_calls=False)


@dataclass
class Script:
    """Satisfies `Sampler`: says the texts one after another, the last one again and again."""

    texts: Sequence[str]
    tokenizer: Any = field(default_factory=lambda: tokenizer_of("json_in_tags"))
    max_model_tokens: int = 4096
    max_tokens: int = 256
    supports_stop: bool = True
    asked: list[tuple[list[int], int, Place]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """Until it is set, nothing is sampled."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(self.tokenizer.decode([token])) for token in ids]

    async def sample(self, ids: Sequence[int], *, max_tokens: int, stop: tuple[str, ...], place: Place) -> Turn:
        text = self.texts[min(len(self.asked), len(self.texts) - 1)]
        self.asked.append((list(ids), max_tokens, place))
        if self.gate is not None:
            await self.gate.wait()
        ends = [text.index(word) + len(word) for word in stop if word in text]
        text = text[: min(ends)] if ends else text
        tokens = self.tokenizer(text + ("" if ends else END), add_special_tokens=False)["input_ids"]
        reason = FinishReason.LENGTH if len(tokens) > max_tokens else FinishReason.STOP
        taken = np.asarray(tokens[:max_tokens], np.int64)
        log_probs = -np.arange(1, len(taken) + 1, dtype=np.float32) / 100
        return Turn(
            span=Span(token_ids=taken, log_probs=log_probs, versions=(VersionRun(len(self.asked), len(taken)),)),
            finish_reason=reason,
        )
