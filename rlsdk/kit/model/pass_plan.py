"""What a pass through a model reads and where its outputs go: worked out on the CPU, so that an accelerator gets all of
it in one copy and the host never waits for the accelerator to learn a size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlsdk.interfaces import Batch, Head
from rlsdk.kit.model.context_parallel import ContextSplit
from rlsdk.kit.model.device_copies import copy_together
from rlsdk.kit.model.packed import PackedRows
from rlsdk.kit.model.prefixes import Prefixes, distinct_prefixes

MIN_SAVED = 0.15
"""Share of a rectangle's positions that packing must save to be used, since it unpacks in every layer; measured on
CPU."""


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """One pass over a batch of at least one token."""

    input_ids: Tensor
    """`[1, U]` packed, or `[B, T]`. Of a pass that ranks split: this rank's stretch `[1, ceil(U / ranks)]`."""
    position_ids: Tensor | None
    """As `input_ids`; None for a rectangle."""
    rows: PackedRows | None
    """How attention unpacks a packed row; None for a rectangle."""
    states: Tensor
    """`[K]` int64: index, among this rank's hidden states, of each that the head reads. A prefix is read once for all
    rows that share it."""
    targets: Tensor | None
    """`[K]` int64: language models: the token whose log-prob is read from each."""
    index: Tensor | None
    """`[M]` int64: which of the `K`, or of the `ranks * room` joined ones, each output belongs to; None: `M` is `K`,
    in the same order."""
    places: Tensor | None
    """`[M]` int64: place of each output in the result, which is 0 elsewhere; None: `M` is the result's length."""
    num_results: int
    """Tokens of the batch, or rows for scores."""
    room: int = 0
    """Largest `K` of the ranks that split the pass."""

    @property
    def split(self) -> ContextSplit | None:
        """Ranks that split the pass."""
        return self.rows.split if self.rows else None

    @property
    def num_states(self) -> int:
        """States that the heads of all ranks read, with padding."""
        return len(self.states) if self.split is None else self.split.size * self.room

    def outputs(self, values: Tensor) -> Tensor:
        """`[M, ...]`: outputs of all ranks, from those of this rank's states `[K, ...]`. Collective if split."""
        joined = values if self.split is None else self.split.join(values, self.room)
        return joined if self.index is None else joined.index_select(0, self.index)

    def own(self, of_states: Tensor) -> Tensor:
        """`[K, ...]` of `[num_states, ...]`: those of this rank."""
        return of_states if self.split is None else self.split.own(of_states, len(self.states))

    def to(self, device: torch.device) -> PassPlan:
        """The plan on a device."""
        return self._with(copy_together(self._tensors(), device))

    def _tensors(self) -> dict[str, Tensor]:
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        rows = vars(self.rows) if self.rows else {}
        return own | {f"rows.{name}": value for name, value in rows.items() if isinstance(value, Tensor)}

    def _with(self, copies: Mapping[str, Tensor]) -> PassPlan:
        own: dict[str, Any] = {name: value for name, value in copies.items() if "." not in name}
        rows: dict[str, Any] = {
            name.removeprefix("rows."): value for name, value in copies.items() if name.startswith("rows.")
        }
        return replace(self, **own, rows=self.rows and replace(self.rows, **rows))


def send(batch: Batch, plan: PassPlan, device: torch.device) -> tuple[Batch, PassPlan]:
    """A micro-batch, from `Batch.with_places`, and its plan on a device, in one copy that the host does not wait
    for."""
    mine, its = batch.tensors(), {f"plan.{name}": tensor for name, tensor in plan._tensors().items()}
    copies = copy_together(mine | its, device)
    return batch.with_tensors(copies), plan._with({name.removeprefix("plan."): copies[name] for name in its})


def plan_pass(
    batch: Batch,
    head: Head,
    *,
    can_pack: bool,
    device: str,
    packed: bool | None = None,
    split: ContextSplit | None = None,
) -> PassPlan:
    """Plans a pass.

    Args:
        batch: `input_ids`, on the CPU; at least one token.
        head: says which hidden states are read.
        can_pack: whether the model can run packed rows.
        device: kind of device that the pass runs on.
        packed: whether to pack; None: the cheaper form.
        split: ranks that run a stretch of the pass each, which is then packed; None: this rank runs all of it.
    """
    prefixes = distinct_prefixes(batch)
    longest = batch.max_length
    # Nothing is read from a row's last token, which predicts no token of the row: it is left out.
    width = longest if head is Head.SCORE or longest == 1 else longest - 1
    if split or (packed is not False and can_pack):
        rows, index, read = _pack(batch, prefixes, need_last=width == longest)
        saved = batch.num_rows * width - len(read)
        if packed or split or device != "cpu" or saved > MIN_SAVED * batch.num_rows * width:
            ids, positions = batch["input_ids"][read], batch.position_ids[read]
            plan = _with_outputs(batch, head, prefixes, index, ids[None], positions[None], rows)
            return plan if split is None else _stretch(plan, split)
    ids = batch.padded("input_ids", length=longest)[:, :width]
    return _with_outputs(batch, head, prefixes, batch.row_of_token * width + batch.position_ids, ids, None, None)


def _with_outputs(
    batch: Batch,
    head: Head,
    prefixes: Prefixes,
    at: Tensor,
    input_ids: Tensor,
    position_ids: Tensor | None,
    rows: PackedRows | None,
) -> PassPlan:
    """The plan of a pass whose hidden state of each token of the batch is at `at [N]`."""
    plan = PassPlan(
        input_ids=input_ids,
        position_ids=position_ids,
        rows=rows,
        states=at,
        targets=None,
        index=None,
        places=None,
        num_results=batch.num_tokens,
    )
    if head is Head.SCORE:
        return replace(plan, states=at[batch.offsets[1:] - 1], num_results=batch.num_rows)
    tokens = batch.position_ids > 0
    if head is Head.LM and "response_mask" in batch:
        tokens = tokens & batch["response_mask"]
    places = tokens.nonzero()[:, 0]
    if head is Head.VALUE:
        # The value at t is that of the state before token t: it is read from the hidden state at t - 1.
        return replace(plan, states=at[places - 1], places=places)
    # Computed once per prefix, for all rows that share it.
    asked = torch.zeros_like(prefixes.first, dtype=torch.bool).index_fill(0, prefixes.index[places], True)
    ends = prefixes.first[asked]
    index = (asked.cumsum(0) - 1)[prefixes.index[places]]
    return replace(plan, states=at[ends - 1], targets=batch["input_ids"][ends], index=index, places=places)


def _stretch(plan: PassPlan, split: ContextSplit) -> PassPlan:
    """This rank's part of a packed pass."""
    assert plan.rows is not None
    assert plan.position_ids is not None
    stretch = split.stretch(plan.rows.num_tokens)
    owner = torch.div(plan.states, stretch, rounding_mode="floor")
    counts = torch.bincount(owner, minlength=split.size)
    room, order = int(counts.max()), owner.argsort(stable=True)
    # Outputs are joined rank after rank, each padded to `room`.
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner[order]] + owner[order] * room
    joined = torch.empty_like(owner).scatter(0, order, place)
    mine = torch.split(order, counts.tolist())[split.rank]
    return replace(
        plan,
        input_ids=split.own_tokens(plan.input_ids),
        position_ids=split.own_tokens(plan.position_ids),
        rows=replace(plan.rows, split=split),
        states=plan.states[mine] - split.rank * stretch,
        targets=None if plan.targets is None else plan.targets[mine],
        index=joined if plan.index is None else joined[plan.index],
        room=room,
    )


def _pack(batch: Batch, prefixes: Prefixes, *, need_last: bool) -> tuple[PackedRows, Tensor, Tensor]:
    """(how to unpack, index of each token of the batch in the packed row, tokens of the packed row).

    Rows whose every prefix is also in another row are not unpacked at all.
    """
    row, position = batch.row_of_token, batch.position_ids
    run = torch.ones_like(row, dtype=torch.bool)
    if not need_last:
        run[(batch.offsets[1:] - 1)[batch.lengths > 0]] = False
    tokens = run.nonzero()[:, 0]
    read = row.new_full((prefixes.count,), len(row)).scatter_reduce(0, prefixes.index[tokens], tokens, "amin")
    have = read < len(row)
    # In the batch's order: the first row with a prefix may end with it and not run it, and a later row may run it.
    read, order = read[have].sort()
    slot = torch.zeros_like(prefixes.first).index_copy(
        0, have.nonzero()[order, 0], torch.arange(len(read), device=row.device)
    )
    index = slot[prefixes.index]
    kept = torch.zeros_like(batch.lengths, dtype=torch.bool).index_fill(0, row[read], True)
    if len(read) < len(tokens):
        tokens = (run & kept[row]).nonzero()[:, 0]
    lengths = torch.zeros_like(batch.lengths).index_add(0, row[tokens], torch.ones_like(tokens))[kept]
    shared = len(read) < len(tokens)
    place = torch.empty_like(row).scatter(0, tokens, torch.arange(len(tokens), device=row.device))
    rows = PackedRows(
        row=(kept.cumsum(0) - 1)[row[tokens]],
        position=position[tokens],
        offsets=F.pad(lengths.cumsum(0), (1, 0)).int(),
        token=index[tokens] if shared else None,
        home=place[read] if shared else None,
        max_length=int(lengths.max()),
    )
    return rows, index, read
