"""The one batch layout: its schema, and the packed container that carries it.

Shape legend, used in every docstring of the project:
`B` rows (one row is the tokens of a prompt and a response), `S` samples (each of one row, or of several where a
history was cut), `N` tokens of all rows together, `T` longest row, `G` samples per prompt, `V` vocabulary.

Batches are stored and sent packed: one flat `[N]` tensor per field, rows end to end, and `lengths [B]`. Their size
depends on the real tokens, not on the longest row. Right-padded `[B, T]` tensors are made on demand (`Batch.padded`).
Position t of a per-token field belongs to the token at t; what a model predicts for t is stored at t, so the first
position of every row holds 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlsdk.interfaces.batch_schema import SCHEMA, Per
from rlsdk.interfaces.errors import BatchError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_LONG_ROW = 256
"""Tokens."""


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Counts and positions of a batch's rows and tokens; each has the shape and meaning of the property of `Batch`."""

    num_tokens: int
    max_length: int
    offsets: Tensor
    row_of_token: Tensor
    position_ids: Tensor
    sample_of_row: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None and not isinstance(value, int)}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of unequal length, packed. Immutable by convention: methods return a new batch that shares tensors.

    Lives on the CPU between processes. Reading it from Ray's object store copies nothing (and is read-only).
    """

    lengths: Tensor
    """`[B]` int64, tokens in each row: a prompt has at least one."""
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token fields, flat `[N, ...]`, rows end to end."""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-row fields `[B, ...]`; `row_id` is always present."""
    meta: Mapping[str, float] = field(default_factory=dict)
    """Scalars that hold for the whole batch, and so for every part of it. `temperature` (default 1.0): logits are
    divided by it before log-probs and entropy are computed."""
    _places: ClassVar[_Places | None] = None
    """Set on instances by `with_places`. Not a field, so that no batch of other rows inherits it."""

    @classmethod
    def from_rows(cls, input_ids: Sequence[Sequence[int]], **rows: Tensor) -> Batch:
        """Packs token lists. `row_id` is 0..B-1 unless given."""
        import torch

        lengths = torch.tensor([len(ids) for ids in input_ids], dtype=torch.int64)
        flat = torch.tensor([token for ids in input_ids for token in ids], dtype=torch.int64)
        rows.setdefault("row_id", torch.arange(len(input_ids)))
        return cls(lengths=lengths, tokens={"input_ids": flat}, rows=rows)

    @property
    def num_rows(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def num_tokens(self) -> int:
        return self._places.num_tokens if self._places else int(self.lengths.sum())

    @property
    def max_length(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        if self._places:
            return self._places.max_length
        return int(self.lengths.max()) if self.num_rows else 0

    @property
    def offsets(self) -> Tensor:
        """`[B + 1]` int64: row b is `[offsets[b], offsets[b + 1])` of every flat tensor."""
        import torch

        return self._places.offsets if self._places else torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def row_of_token(self) -> Tensor:
        """`[N]` int64: the row that each token belongs to."""
        import torch

        if self._places:
            return self._places.row_of_token
        return torch.repeat_interleave(torch.arange(self.num_rows, device=self.lengths.device), self.lengths)

    @property
    def position_ids(self) -> Tensor:
        """`[N]` int64: 0-based position of each token in its row."""
        import torch

        if self._places:
            return self._places.position_ids
        start = torch.repeat_interleave(self.offsets[:-1], self.lengths)
        return torch.arange(self.num_tokens, device=self.lengths.device) - start

    def with_places(self) -> Batch:
        """The same batch, which keeps the counts and positions above instead of computing them when they are read. On
        an accelerator that would wait for the device; `to` keeps them for it."""
        if self._places:
            return self
        return self._like(
            _places=_Places(
                num_tokens=self.num_tokens,
                max_length=self.max_length,
                offsets=self.offsets,
                row_of_token=self.row_of_token,
                position_ids=self.position_ids,
                sample_of_row=self.sample_of_row if {"sample", "uid"} <= self.rows.keys() else None,
            )
        )

    @property
    def sample_of_row(self) -> Tensor:
        """`[B]` int64: the sample that each row belongs to, numbered from 0 in the order of their first rows.

        Raises:
            BatchError: the rows name samples, but not the prompt that each is of.
        """
        import torch

        rows = torch.arange(self.num_rows, device=self.lengths.device)
        if "sample" not in self.rows:
            return rows
        if "uid" not in self.rows:
            raise BatchError(
                "sample: counts the samples of a prompt, and the batch has no uid that says which prompt; keep `uid` "
                f"with it, or neither. The batch has {sorted([*self.tokens, *self.rows])}"
            )
        if self._places and self._places.sample_of_row is not None:
            return self._places.sample_of_row
        uids, samples = (torch.unique(self.rows[name], return_inverse=True) for name in ("uid", "sample"))
        known, index = torch.unique(uids[1] * len(samples[0]) + samples[1], return_inverse=True)
        if len(known) == self.num_rows:
            return rows
        first = torch.full_like(known, self.num_rows).scatter_reduce(0, index, rows, "amin")
        return first.argsort().argsort()[index]

    @property
    def num_bytes(self) -> int:
        tensors = [self.lengths, *self.tokens.values(), *self.rows.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def temperature(self) -> float:
        return float(self.meta.get("temperature", 1.0))

    def __getitem__(self, name: str) -> Tensor:
        """The flat or per-row tensor of that name.

        Raises:
            BatchError: no such field; names the nearest one.
        """
        if name in self.tokens:
            return self.tokens[name]
        if name in self.rows:
            return self.rows[name]
        have = [*self.tokens, *self.rows]
        raise BatchError(f"batch has no field {name!r}{nearest(name, have)}; it has {sorted(have)}")

    def __contains__(self, name: object) -> bool:
        return name in self.tokens or name in self.rows

    def with_tokens(self, **fields: Tensor) -> Batch:
        """Adds or replaces flat per-token fields."""
        return self._like(tokens={**self.tokens, **fields})

    def with_rows(self, **fields: Tensor) -> Batch:
        """Adds or replaces per-row fields."""
        kept = self._places
        if kept and fields.keys() & {"uid", "sample"}:
            kept = replace(kept, sample_of_row=None)
        return self._like(rows={**self.rows, **fields}, _places=kept)

    def with_meta(self, **values: float) -> Batch:
        return self._like(meta={**self.meta, **values})

    def keep(self, names: Iterable[str]) -> Batch:
        """Drops every field that is not named; `row_id` always stays."""
        wanted = {*names, "row_id"}
        return self._like(
            tokens={k: v for k, v in self.tokens.items() if k in wanted},
            rows={k: v for k, v in self.rows.items() if k in wanted},
        )

    def to(self, device: str | torch.device) -> Batch:
        """The batch on a device. A batch that leaves the CPU keeps its counts and positions (`with_places`)."""
        import torch

        stays = torch.device(device).type == self.lengths.device.type
        batch = self if stays else self.with_places()
        return batch.with_tensors({name: tensor.to(device) for name, tensor in batch.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that only `with_tensors` interprets: for code that copies them together."""
        kept = self._places.tensors() if self._places else {}
        return {
            "lengths": self.lengths,
            **{f"tokens.{name}": tensor for name, tensor in self.tokens.items()},
            **{f"rows.{name}": tensor for name, tensor in self.rows.items()},
            **{f"places.{name}": tensor for name, tensor in kept.items()},
        }

    def with_tensors(self, copies: Mapping[str, Tensor]) -> Batch:
        """The same batch with copies of its tensors, named as in `tensors`."""
        kept = self._places
        places: dict[str, Any] = {} if kept is None else {name: copies[f"places.{name}"] for name in kept.tensors()}
        return self._like(
            lengths=copies["lengths"],
            tokens={name: copies[f"tokens.{name}"] for name in self.tokens},
            rows={name: copies[f"rows.{name}"] for name in self.rows},
            _places=kept and replace(kept, **places),
        )

    def _like(self, _places: _Places | Literal["kept"] | None = "kept", **fields: Any) -> Batch:
        """A copy with other fields but the same rows, which keeps counts and positions."""
        copy = replace(self, **fields)
        object.__setattr__(copy, "_places", self._places if _places == "kept" else _places)
        return copy

    def token_index(self, rows: Tensor) -> Tensor:
        """`[n]` int64: positions in a flat tensor of the tokens of `rows` (indices, in that order)."""
        import torch

        lengths = self.lengths[rows]
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        shift = torch.repeat_interleave(self.offsets[:-1][rows] - (ends - lengths), lengths)
        return torch.arange(total, device=self.lengths.device) + shift

    def select(self, rows: Tensor | Sequence[int] | slice) -> Batch:
        """The rows at these indices, in this order. A slice (step 1) copies nothing."""
        import torch

        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.num_rows)
            if step == 1:
                offsets = self.offsets
                lo, hi = int(offsets[start]), int(offsets[max(stop, start)])
                return replace(
                    self,
                    lengths=self.lengths[start:stop],
                    tokens={k: v[lo:hi] for k, v in self.tokens.items()},
                    rows={k: v[start:stop] for k, v in self.rows.items()},
                )
            rows = range(start, stop, step)
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.lengths.device)
        lengths = self.lengths[index]
        if int(lengths.sum()) > _LONG_ROW * len(index):
            # Long rows: copying each as a block is several times as fast as an index of every token.
            starts = self.offsets[:-1][index].tolist()
            spans = list(zip(starts, lengths.tolist(), strict=True))
            tokens = {k: torch.cat([v.narrow(0, at, n) for at, n in spans]) for k, v in self.tokens.items()}
        else:
            at = self.token_index(index)
            tokens = {k: v[at] for k, v in self.tokens.items()}
        return replace(self, lengths=lengths, tokens=tokens, rows={k: v[index] for k, v in self.rows.items()})

    def padded(self, name: str, fill: float = 0, length: int | None = None) -> Tensor:
        """The right-padded rectangle `[B, T, ...]` of a per-token field (T = `length`, or the longest row)."""
        flat = self[name]
        width = self.max_length if length is None else length
        out = flat.new_full((self.num_rows, width, *flat.shape[1:]), fill)
        out[self.row_of_token, self.position_ids] = flat
        return out

    def pack(self, rectangle: Tensor) -> Tensor:
        """The flat `[N, ...]` form of a right-padded `[B, T, ...]` rectangle of this batch's rows."""
        return rectangle[self.row_of_token, self.position_ids]

    def row_sum(self, flat: Tensor) -> Tensor:
        """`[B]`: sum over each row of a flat `[N]` tensor, in its dtype; differentiable."""
        return flat.new_zeros(self.num_rows).index_add(0, self.row_of_token, flat)

    def validate(self, requires: Iterable[str] = ()) -> Batch:
        """Checks lengths, shapes, dtypes, row identity and the fields that the caller needs; returns self.

        Raises:
            BatchError: names the field, the shape or dtype it had and the one expected.
        """
        check_batch(self, requires)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as plain buffers, so that an object store shares them instead of copying."""
        return _from_arrays, (
            _to_array(self.lengths),
            {k: _to_array(v) for k, v in self.tokens.items()},
            {k: _to_array(v) for k, v in self.rows.items()},
            dict(self.meta),
        )


def concat(batches: Sequence[Batch]) -> Batch:
    """Joins batches end to end. All must have the same fields; `meta` is the first one's.

    Raises:
        BatchError: nothing to join, or the fields differ (names which).
    """
    import torch

    if not batches:
        raise BatchError("concat needs at least one batch; got none")
    first = batches[0]
    for other in batches[1:]:
        odd = (set(first.tokens) ^ set(other.tokens)) | (set(first.rows) ^ set(other.rows))
        if odd:
            raise BatchError(f"batches to join differ in fields {sorted(odd)}; every part must have all of them")
    if len(batches) == 1:
        return first
    return replace(
        first,
        lengths=torch.cat([b.lengths for b in batches]),
        tokens={k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens},
        rows={k: torch.cat([b.rows[k] for b in batches]) for k in first.rows},
    )


def rejoin(parts: Sequence[Batch], row_ids: Tensor) -> Batch:
    """Joins parts of a split batch back into the order of `row_ids [B]`.

    Raises:
        BatchError: a row is missing, duplicated or unknown.
    """
    import torch

    joined = concat(parts)
    have, want = joined.rows["row_id"], row_ids
    if not torch.equal(have.sort().values, want.sort().values):
        missing = sorted(set(want.tolist()) - set(have.tolist()))[:5]
        extra = sorted(set(have.tolist()) - set(want.tolist()))[:5]
        raise BatchError(
            f"rows came back changed: {len(have)} of {len(want)}, missing row_id {missing}, unasked {extra}, "
            f"{len(have) - len(set(have.tolist()))} twice"
        )
    if torch.equal(have, want):
        return joined
    order = torch.empty_like(want)
    order[want.argsort()] = have.argsort()
    return joined.select(order)


def check_batch(batch: Batch, requires: Iterable[str] = ()) -> None:
    """Raises `BatchError` where `batch` does not fit `SCHEMA` or lacks a field of `requires`."""
    num_rows, num_tokens = batch.num_rows, batch.num_tokens
    if batch.lengths.dim() != 1 or str(batch.lengths.dtype) != "torch.int64":
        raise BatchError(f"lengths: expected [B] int64, got {list(batch.lengths.shape)} {batch.lengths.dtype}")
    for fields, per, size in ((batch.tokens, Per.TOKEN, num_tokens), (batch.rows, Per.ROW, num_rows)):
        for name, tensor in fields.items():
            known = SCHEMA.get(name)
            if known and (known.per is Per.TOKEN) is not (per is Per.TOKEN):
                raise BatchError(f"{name}: is a per-{known.per} field, but was given per {per}")
            if tensor.dim() == 0 or tensor.shape[0] != size:
                unit = "N tokens" if per is Per.TOKEN else "B rows"
                raise BatchError(f"{name}: expected [{size}, ...] ({unit}), got {list(tensor.shape)}")
            if known and str(tensor.dtype) != f"torch.{known.dtype}":
                raise BatchError(f"{name}: expected dtype {known.dtype}, got {tensor.dtype}")
    for name in ("row_id", *requires):
        if name not in batch:
            have = [*batch.tokens, *batch.rows]
            raise BatchError(f"{name}: required here but missing{nearest(name, have)}; the batch has {sorted(have)}")
    distinct = len(set(batch.rows["row_id"].tolist()))
    if distinct != num_rows:
        raise BatchError(f"row_id: {num_rows} rows but {distinct} distinct identities")
    check_samples(batch)


def check_samples(batch: Batch) -> None:
    """Raises `BatchError` where a field of samples differs between the rows of one."""
    import torch

    index = batch.sample_of_row
    count = int(index.max()) + 1 if batch.num_rows else 0
    if count == batch.num_rows:
        return
    rows = torch.arange(batch.num_rows, device=index.device)
    first = torch.full_like(index[:count], batch.num_rows).scatter_reduce(0, index, rows, "amin")[index]
    for name, values in batch.rows.items():
        if name not in SCHEMA or SCHEMA[name].per is not Per.SAMPLE:
            continue
        differs = (values != values[first]) & ~(values.isnan() & values[first].isnan())
        if differs.any():
            row = int(differs.nonzero()[0])
            one, other = (int(batch.rows["row_id"][at]) for at in (int(first[row]), row))
            raise BatchError(
                f"{name}: rows of equal uid and sample are one sample, with one value; sample "
                f"{int(batch['sample'][row])} of uid {int(batch['uid'][row])} has {values[first][row].item()} in "
                f"row_id {one} and {values[row].item()} in row_id {other}. Number the samples of a uid"
            )


def _to_array(tensor: Tensor) -> Any:
    """A numpy view, tagged with the dtype if numpy has no such dtype."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        return ("bfloat16", plain.view(torch.int16).numpy())
    return plain.numpy()


@functools.cache
def _accept_read_only() -> None:
    """Triggers, silenced, torch's warning about read-only buffers, which it gives once per process. Buffers from the
    object store are read-only, and a Batch is never written in place."""
    import warnings

    import numpy as np
    import torch

    empty = np.zeros(1)
    empty.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(empty)


def _from_array(array: Any) -> Tensor:
    import torch

    tag = None
    if isinstance(array, tuple):
        tag, array = array
    _accept_read_only()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tag == "bfloat16" else tensor


def _from_arrays(lengths: Any, tokens: dict[str, Any], rows: dict[str, Any], meta: dict[str, float]) -> Batch:
    return Batch(
        lengths=_from_array(lengths),
        tokens={k: _from_array(v) for k, v in tokens.items()},
        rows={k: _from_array(v) for k, v in rows.items()},
        meta=meta,
    )
