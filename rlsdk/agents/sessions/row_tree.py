"""The rows of a session as a tree of turns, made of token ids alone.

A turn's parent is the turn whose prompt and answer are the beginning of its prompt. Each turn keeps the ids behind its
parent only, so memory grows with the tokens and not with their square.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import FinishReason, Span

Ids = NDArray[np.int32]


@dataclass(eq=False, kw_only=True, slots=True)
class TurnNode:
    """One answered call."""

    parent: TurnNode | None
    given: Ids
    """Prompt behind the parent's answer: the whole prompt, if there is no parent."""
    span: Span
    """As sampled."""
    finish_reason: FinishReason
    call: int
    """Number of the request, by the order in which requests came."""
    has_tools: bool
    is_delivered: bool = True
    message: str = ""
    """The answer as clients get it: JSON, because a session holds thousands."""
    children: tuple[TurnNode, ...] = ()

    @property
    def depth(self) -> int:
        """Sampled spans before it in its row."""
        return sum(1 for _ in self.ancestors()) - 1

    @property
    def root(self) -> TurnNode:
        return [*self.ancestors()][-1]

    def ancestors(self) -> Iterator[TurnNode]:
        """Itself, its parent, and so on."""
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def ids(self) -> list[int]:
        """Everything up to the end of its answer."""
        parts = [part for node in self.ancestors() for part in (node.span.token_ids, node.given)]
        ids: list[int] = np.concatenate(parts[::-1]).tolist()
        return ids


class RowTree:
    """The answered calls of one session."""

    def __init__(self) -> None:
        self.roots: list[TurnNode] = []
        self.nodes: list[TurnNode] = []
        """In the order in which they were added."""

    def parent_of(self, prompt_ids: Sequence[int] | Ids) -> tuple[TurnNode | None, Ids]:
        """The deepest turn whose ids are the beginning of a prompt, the latest of equal ones; and the ids behind it."""
        prompt = np.asarray(prompt_ids, np.int32)
        found, at = None, 0
        waiting: list[tuple[TurnNode, int]] = [(root, 0) for root in self.roots]
        while waiting:
            node, start = waiting.pop(0)
            end = _matched(prompt, start, node)
            if end is not None:
                if end >= at:
                    found, at = node, end
                waiting += [(child, end) for child in node.children]
        return found, prompt[at:].copy()  # a view would keep the whole prompt

    def add(self, node: TurnNode) -> None:
        if node.parent is None:
            self.roots.append(node)
        else:
            node.parent.children = (*node.parent.children, node)
        self.nodes.append(node)


def _matched(prompt: Ids, start: int, node: TurnNode) -> int | None:
    """Where a turn ends in a prompt, if it is there."""
    middle, end = start + len(node.given), start + len(node.given) + len(node.span)
    if end > len(prompt):
        return None
    same = np.array_equal(prompt[start:middle], node.given) and np.array_equal(prompt[middle:end], node.span.token_ids)
    return end if same else None
