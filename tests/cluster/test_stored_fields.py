"""What is written to the object store, and what a node is sent: with a dictionary in place of Ray's store."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from rlsdk.cluster.batches.batch_ref import BatchRef
from rlsdk.cluster.batches.stored_fields import StoredFields
from rlsdk.cluster.calls.messages import Call
from rlsdk.cluster.group import Member, WorkerGroup
from rlsdk.interfaces import Batch, Parallel, RankContext


class Store:
    """What was put, and how many bytes that was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[str, Batch] = {}
        self.fields = StoredFields(self.put)
        monkeypatch.setattr(ray, "get", lambda refs: [self.held[ref] for ref in refs])

    def put(self, batch: Batch) -> str:
        self.held[f"ref{len(self.held)}"] = pickle.loads(pickle.dumps(batch))
        return f"ref{len(self.held) - 1}"

    def names(self) -> list[list[str]]:
        """Fields of every object."""
        return [[*batch.tokens, *batch.rows] for batch in self.held.values()]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


class SilentWorker:
    """Keeps the calls that it is sent."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.calls: list[Call] = []
        self.info = None

    def known(self) -> Any:
        return SimpleNamespace(node_id=self.node)

    def call(self, call: Call, *, concurrent: bool) -> str:
        self.calls.append(call)
        return "answer"


def group_on(store: Store, nodes: Sequence[str], *, tp_size: int = 1) -> WorkerGroup:
    from rlsdk.trainer.roles.hosts import TrainHost  # torch's engines come with it

    size = len(nodes)
    members = [
        Member(
            worker=SilentWorker(node),  # type: ignore[arg-type]
            ctx=RankContext(role="actor", rank=rank, world_size=size, local_rank=0),
            parallel=Parallel(
                dp_rank=rank // tp_size, dp_size=size // tp_size, tp_rank=rank % tp_size, tp_size=tp_size
            ),
        )
        for rank, node in enumerate(nodes)
    ]
    from rlsdk.cluster.calls.dispatch import methods_of

    return WorkerGroup(
        "actor", members, methods_of(TrainHost), put=lambda batch: BatchRef.of(batch, store.fields), timeout_s=1
    )


def received(group: WorkerGroup, at: int = -1) -> list[Batch]:
    """The batch of a call, by rank, as the worker loads it."""
    return [member.worker.calls[at].args[0].load() for member in group.members]  # type: ignore[attr-defined]


def batch_of(rows: int, **fields: Any) -> Batch:
    lengths = [1 + row % 5 for row in range(rows)]
    ids = torch.arange(100, 100 + rows)
    batch = Batch.from_rows([[row] * length for row, length in enumerate(lengths)], row_id=ids)
    return batch.with_tokens(response_mask=torch.ones(batch.num_tokens).bool(), **fields).with_meta(temperature=0.5)


def same(found: Batch, wanted: Batch) -> bool:
    def equal(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    return equal(found.tokens, wanted.tokens) and equal(found.rows, wanted.rows) and found.meta == wanted.meta


def rows_of(batch: Batch, part: Batch) -> Batch:
    return batch.select(part["row_id"] - 100)


def test_tokens_are_stored_once_for_all_forwards_and_all_updates_of_a_step(store: Store) -> None:
    group, batch = group_on(store, ["n0"] * 4), batch_of(40)
    for _ in ("actor", "reference"):
        group.submit("forward", BatchRef.of(batch.keep(("input_ids", "response_mask")), store.fields), {})
    later = batch.with_tokens(advantages=torch.rand(batch.num_tokens))
    whole = BatchRef.of(later, store.fields)
    for at in range(3):
        group.submit("update", whole.select(range(at, 40, 3)), object())
    assert store.names() == [["input_ids", "response_mask", "row_id"], ["advantages", "row_id"]]
    for part in received(group):
        assert same(part, rows_of(later, part))
    assert sorted(int(row) for part in received(group) for row in part["row_id"]) == list(range(102, 140, 3))


def test_a_node_is_stored_the_rows_of_its_own_ranks_and_no_others(store: Store) -> None:
    group, batch = group_on(store, ["n0", "n0", "n1", "n1"]), batch_of(41)
    for _ in ("actor", "reference"):
        group.submit("forward", BatchRef.of(batch, store.fields), {})
    parts = received(group)
    assert len(store.held) == 2, "an object a node, and the second forward finds them there"
    assert sum(held.num_tokens for held in store.held.values()) == batch.num_tokens
    assert [held["row_id"].tolist() for held in store.held.values()] == [
        [*parts[0]["row_id"].tolist(), *parts[1]["row_id"].tolist()],
        [*parts[2]["row_id"].tolist(), *parts[3]["row_id"].tolist()],
    ], "each rank's rows are neighbours: read in place"
    assert all(same(part, rows_of(batch, part)) for part in parts)


def test_rows_say_whether_they_are_stored_for_one_node_or_for_all(store: Store) -> None:
    """A worker that relays stores those of its node again, and leaves those of the whole batch where they are."""
    whole = BatchRef.of(batch_of(8), store.fields)
    cut = [[0, 1, 2, 3], [4, 5, 6, 7]]
    here = whole.shares(cut, [frozenset({"n0"}), frozenset({"n0"})])
    apart = whole.shares(cut, [frozenset({"n0"}), frozenset({"n1"})])
    assert [rows.of_node for share in here for rows in share.values()] == [False, False]
    assert [rows.of_node for share in apart for rows in share.values()] == [True, True]
    assert not whole.select(range(2, 6)).stored().of_node


def test_selected_rows_reach_the_nodes_that_need_them(store: Store) -> None:
    group, batch = group_on(store, ["n0", "n1"]), batch_of(30)
    group.submit("update", BatchRef.of(batch, store.fields).select([7, 3, 29, 11]), object())
    parts = received(group)
    assert sum(held.num_rows for held in store.held.values()) == 4
    assert sorted(int(row) for part in parts for row in part["row_id"]) == [103, 107, 111, 129]
    assert all(same(part, rows_of(batch, part)) for part in parts)


def test_model_parallel_ranks_of_two_nodes_share_one_object(store: Store) -> None:
    group, batch = group_on(store, ["n0", "n1", "n0", "n1"], tp_size=2), batch_of(20)
    group.submit("forward", batch, {})
    first, second, third, fourth = received(group)
    assert same(first, second)
    assert same(third, fourth)
    assert len(store.held) == 1, "both nodes need the same rows"


def test_groups_stay_whole_on_a_rank(store: Store) -> None:
    group = group_on(store, ["n0", "n1"])
    batch = batch_of(24).with_rows(uid=torch.arange(24) // 4)
    group.submit("update", BatchRef.of(batch, store.fields), SimpleNamespace(whole_groups=True))
    left, right = (set(part["uid"].tolist()) for part in received(group))
    assert left.isdisjoint(right)
    assert left | right == set(range(6))


def test_a_field_that_was_written_in_place_is_stored_anew(store: Store) -> None:
    advantages = torch.zeros(batch_of(4).num_tokens)
    batch = batch_of(4, advantages=advantages)
    store.fields.pieces(batch)
    advantages += 1
    assert torch.equal(BatchRef.of(batch, store.fields).stored().load()["advantages"], advantages)
    assert store.names()[1] == ["advantages", "row_id"]


def test_what_a_step_stored_is_let_go_with_its_tensors(store: Store) -> None:
    batch = batch_of(4)
    store.fields.pieces(batch)
    assert len(store.fields._known) == 1
    del batch
    gc.collect()
    assert len(store.fields._known) == 0


def test_equal_tokens_of_other_rows_are_not_mistaken_for_them(store: Store) -> None:
    batch = batch_of(6)
    store.fields.pieces(batch)
    renamed = batch.with_rows(row_id=torch.arange(6))
    assert BatchRef.of(renamed, store.fields).stored().load()["row_id"].tolist() == list(range(6))
    regrouped = Batch(lengths=batch.lengths.flip(0), tokens=batch.tokens, rows=batch.rows)
    assert torch.equal(BatchRef.of(regrouped, store.fields).stored().load().lengths, batch.lengths.flip(0))
