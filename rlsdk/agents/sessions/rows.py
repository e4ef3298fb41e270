"""What a session made, as an episode: rows, their chains, and the account of every sampled token."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.agents.sessions.row_tree import RowTree, TurnNode
from rlsdk.interfaces import Receipt, Span, Trajectory

AGENT, AUXILIARY, ABANDONED = "agent", "auxiliary", "abandoned"
OVER_LIMIT = "over_limit"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a session that are trained."""

    rows: tuple[Trajectory, ...]
    chains: tuple[int, ...]
    scales: tuple[float, ...]
    not_trained: dict[str, int]
    """Reason -> sampled tokens that are in no row."""
    digests: tuple[str, ...]

    def receipt(self, sampled: int, rendered_again: Counter[str], counts: Counter[str]) -> Receipt:
        """The account of the tokens; `sampled` is counted where they came from the engine."""
        return Receipt(
            sampled=sampled,
            trained=sum(row.num_sampled for row in self.rows),
            not_trained=self.not_trained,
            rendered_again=dict(rendered_again),
            counts=dict(counts),
            digests=self.digests,
        )


def rows_of(tree: RowTree, limits: EpisodeLimits, *, overlapped: bool) -> Rows:
    """The rows of a session.

    Every leaf of the tree ends a row. A turn of several rows is sampled in the first of them, and given in the others.

    Args:
        tree: what was sampled.
        limits: those on rows.
        overlapped: whether calls were sampled at the same time: then each root begins a chain of its own.
    """
    leaves = [node for node in tree.nodes if not node.children]
    roles = {leaf: _role(leaf, tree) for leaf in leaves}
    kept = [leaf for leaf in leaves if roles[leaf] in limits.train_roles]
    owners: dict[TurnNode, TurnNode] = {}
    for leaf in kept:
        for node in leaf.ancestors():
            owners.setdefault(node, leaf)
    kept.sort(key=lambda leaf: _first_owned(leaf, owners, tree))
    drawn, scale = _drawn(kept, limits.max_rows)
    not_trained: Counter[str] = Counter()
    for node in tree.nodes:
        if node not in owners:
            not_trained[_reason(node, roles)] += len(node.span)
        elif owners[node] not in drawn:
            not_trained[OVER_LIMIT] += len(node.span)
    rows = tuple(_row(leaf, owners) for leaf in drawn)
    return Rows(
        rows=rows,
        chains=_chains([leaf.root for leaf in drawn]) if overlapped else (),
        scales=(scale,) * len(rows) if scale != 1.0 else (),
        not_trained={reason: count for reason, count in not_trained.items() if count},
        digests=tuple(row.digest for row in rows),
    )


def _role(leaf: TurnNode, tree: RowTree) -> str:
    if _is_abandoned(leaf, tree.roots if leaf.parent is None else leaf.parent.children):
        return ABANDONED
    root = leaf.root
    helps = tree.nodes[0].root.has_tools and not root.has_tools
    return AUXILIARY if helps and root is not tree.nodes[0].root else AGENT


def _is_abandoned(leaf: TurnNode, siblings: Sequence[TurnNode]) -> bool:
    """Whether its answer was lost, or the agent asked again and went on from the later answer."""
    return not leaf.is_delivered or any(
        other.children and other.call > leaf.call and np.array_equal(other.given, leaf.given) for other in siblings
    )


def _reason(node: TurnNode, roles: dict[TurnNode, str]) -> str:
    """Why a turn is in no row: the role of the rows that end behind it."""
    waiting, found = [node], []
    while waiting:
        one = waiting.pop()
        waiting += one.children
        if not one.children:
            found.append(roles[one])
    return AUXILIARY if AUXILIARY in found else found[0]


def _first_owned(leaf: TurnNode, owners: dict[TurnNode, TurnNode], tree: RowTree) -> int:
    return min(at for at, node in enumerate(tree.nodes) if owners.get(node) is leaf)


def _drawn(leaves: list[TurnNode], most: int | None) -> tuple[list[TurnNode], float]:
    """At most so many rows, in order, and the scale that keeps the expected loss: k / m for m of k rows. The draw
    depends on the tokens alone."""
    if most is None or len(leaves) <= most:
        return leaves, 1.0
    state = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        state.update(np.asarray(leaf.ids(), np.int64).tobytes())
    chosen = random.Random(state.digest()).sample(range(len(leaves)), most)
    return [leaves[at] for at in sorted(chosen)], len(leaves) / most


def _chains(roots: Sequence[TurnNode]) -> tuple[int, ...]:
    numbers: dict[TurnNode, int] = {}
    return tuple(numbers.setdefault(root, len(numbers)) for root in roots)


def _row(leaf: TurnNode, owners: dict[TurnNode, TurnNode]) -> Trajectory:
    spans: list[Span] = []
    for node in reversed([*leaf.ancestors()]):
        if len(node.given):
            spans.append(Span.given(node.given.astype(np.int64)))
        spans.append(node.span if owners[node] is leaf else Span.given(node.span.token_ids))
    return Trajectory(spans=tuple(spans), finish_reason=leaf.finish_reason)


def info_of(rows: Rows, counts: Counter[str], rendered_again: Counter[str]) -> dict[str, Any]:
    """Numbers of an episode, each logged as the mean over a step."""
    return {
        "turns": counts["turns"],
        "rows": len(rows.rows),
        "tool_calls": counts["calls"],
        "malformed_calls": counts["malformed"],
        "rendered_again": sum(rendered_again.values()),
        "delivered_again": counts["delivered_again"],
        "tokens_not_trained": sum(rows.not_trained.values()),
    }
