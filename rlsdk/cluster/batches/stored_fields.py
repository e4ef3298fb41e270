"""Batch fields in the object store: each field is stored once, whole or as the rows that a node needs.

Models that read the same tokens in one step share one copy of them, and so do their optimizer steps: a field is known
by its tensor. A copy is dropped as soon as the tensor is.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.interfaces import Batch

Piece = tuple[Any, tuple[str, ...]]
"""Reference of a stored batch, and which of its fields are meant. Every stored batch has `row_id`."""
_WHOLE = b""


class StoredFields:
    """Puts what is not there yet. One for a cluster; its batches are not written in place."""

    def __init__(self, put: Callable[[Batch], Any]) -> None:
        """`put` stores a batch and returns its reference."""
        self._put = put
        self._known: Any = None
        self._lock = threading.Lock()

    def pieces(self, batch: Batch, rows: Tensor | None = None) -> tuple[Piece, ...]:
        """References that together hold every field of these rows, in the order of `rows`.

        Args:
            batch: lives in this process.
            rows: `[M]` int64 indices; None: all.
        """
        which = _WHOLE if rows is None else hashlib.blake2b(rows.numpy().tobytes(), digest_size=16).digest()
        fields = {**batch.tokens, **{name: tensor for name, tensor in batch.rows.items() if name != "row_id"}}
        keys = {name: (_writes(tensor), which) for name, tensor in fields.items()}
        with self._lock:
            known = self._same_rows(batch)
            found = {name: known.get(tensor, {}).get(keys[name]) for name, tensor in fields.items()}
            missing = [name for name, ref in found.items() if ref is None]
            if not missing and fields:
                return _by_reference(found)
            part = replace(batch.keep(missing), meta={})
            ref = self._put(part if rows is None else part.select(rows))
            for name in missing:
                found[name] = ref
                if keys[name][0] is not None:
                    known.setdefault(fields[name], {})[keys[name]] = ref
        return _by_reference(found) if fields else ((ref, ()),)

    def _same_rows(self, batch: Batch) -> Any:
        """Field -> (its write counter, rows) -> reference, of batches of these lengths and identities."""
        # Not at the top: a cluster starts while the program imports torch, and only one thread may do that.
        from torch.utils.weak import WeakIdKeyDictionary

        if self._known is None:
            self._known = WeakIdKeyDictionary()
        of_lengths = self._known.setdefault(batch.lengths, WeakIdKeyDictionary())
        return of_lengths.setdefault(batch["row_id"], WeakIdKeyDictionary())


def _by_reference(found: Mapping[str, Any]) -> tuple[Piece, ...]:
    names: dict[Any, list[str]] = {}
    for name, ref in found.items():
        names.setdefault(ref, []).append(name)
    return tuple((ref, tuple(of_ref)) for ref, of_ref in names.items())


def merged(parts: list[tuple[Batch, tuple[str, ...]]], meta: Mapping[str, float]) -> Batch:
    """One batch of the named fields of several that hold the same rows."""
    first, _ = parts[0]
    tokens: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {"row_id": first["row_id"]}
    for part, names in parts:
        tokens |= {name: part.tokens[name] for name in names if name in part.tokens}
        rows |= {name: part.rows[name] for name in names if name in part.rows}
    return replace(first, tokens=tokens, rows=rows, meta=dict(meta))


def _writes(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; None where torch does not count."""
    return None if tensor.is_inference() else int(tensor._version)
