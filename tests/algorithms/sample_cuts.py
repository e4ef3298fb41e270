"""Steps whose samples are cut into several rows, beside the same steps uncut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from algorithm_cases import steps
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.interfaces import Batch

CONTEXTS = ("none", "history", "other")
"""What a further row begins with: nothing, everything before it, or other tokens."""


@dataclass(frozen=True, kw_only=True)
class CutStep:
    """A step in two forms."""

    whole: Batch
    """Each sample is one row."""
    cut: Batch
    """Some samples are several rows; what they repeat as context is off the mask."""
    source: Tensor
    """`[N]` of `cut`: the token of `whole` that each one is; -1 for context."""

    def of_whole(self, flat: Tensor) -> Tensor:
        """A field `[N]` of `cut` in the order of `whole`."""
        owned = self.source >= 0
        return flat.new_zeros(self.whole.num_tokens).index_put((self.source[owned],), flat[owned])

    def of_samples(self, per_row: Tensor) -> Tensor:
        """A field `[B]` of `cut`, as the rows of `whole` have it; every row of a sample must have the same."""
        owner = self.whole.row_of_token[self.source.clamp(min=0)]
        owned = self.source >= 0
        found = per_row.new_zeros(self.whole.num_rows).index_put((owner[owned],), per_row[self.cut.row_of_token][owned])
        assert torch.equal(found[owner[owned]], per_row[self.cut.row_of_token][owned])
        return found

    def shuffled(self, order: Tensor) -> CutStep:
        """The rows of `cut` in another order, `[B]`."""
        return replace(self, cut=self.cut.select(order), source=self.source[self.cut.token_index(order)])


def cut_rows(whole: Batch, rng: np.random.Generator) -> CutStep:
    """Cuts every row of a batch at up to three places."""
    pieces: list[tuple[int, list[int]]] = []
    for row, (start, stop) in enumerate(zip(whole.offsets[:-1].tolist(), whole.offsets[1:].tolist(), strict=True)):
        inner = rng.permutation(np.arange(start + 1, stop))[: rng.integers(0, 4)]
        ends = [start, *sorted(inner.tolist()), stop]
        for begin, end in pairwise(ends):
            kind = "none" if begin == start else rng.choice(CONTEXTS)
            context = {"none": 0, "history": begin - start, "other": int(rng.integers(1, 4))}[str(kind)]
            pieces.append((row, [-1] * context + list(range(begin, end))))
    owner = torch.tensor([row for row, _ in pieces])
    source = torch.tensor([token for _, tokens in pieces for token in tokens])
    cut = Batch.from_rows([[0] * len(tokens) for _, tokens in pieces], row_id=torch.arange(len(pieces)) * 3 + 1)
    fields = {name: _spread(values, source) for name, values in whole.tokens.items()}
    rows = {name: values[owner] for name, values in whole.rows.items() if name != "row_id"}
    number = [whole["uid"][:row].tolist().count(uid) for row, uid in enumerate(whole["uid"].tolist())]
    rows["sample"] = torch.tensor(number)[owner]
    return CutStep(whole=whole, cut=cut.with_tokens(**fields).with_rows(**rows), source=source)


def _spread(values: Tensor, source: Tensor) -> Tensor:
    """The values of these tokens; NaN (or 0, False) on context."""
    found = values[source.clamp(min=0)]
    found[source < 0] = torch.nan if found.is_floating_point() else 0
    return found


@st.composite
def cut_steps(draw: st.DrawFn) -> CutStep:
    """`steps`, cut."""
    return cut_rows(draw(steps()), np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
