"""Following loaders: whatever cuts, joins and pads they make, each value is found where they put it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.interfaces import Box
from rlsdk.kit.tracing import trace_loaders


class Fused:
    """Two matrices in one, cut over ranks by rows, one padded; a third cut by columns; a vector kept whole."""

    def __init__(self, rows: int, columns: int, rank: int, size: int, pad: int) -> None:
        self.rank, self.size, self.rows = rank, size, rows
        self.joined = torch.zeros(2 * rows + pad, columns)
        self.side = torch.zeros(rows, columns)
        self.scale = torch.zeros(columns)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "scale":
                self.scale.data.copy_(tensor)
            elif name == "side":
                width = self.side.shape[1]
                self.side.copy_(tensor.narrow(1, self.rank * width, width))
            else:
                half = self.joined.narrow(0, 0 if name == "first" else self.rows, self.rows)
                half.copy_(tensor[self.rank * self.rows : (self.rank + 1) * self.rows])
        self.joined[2 * self.rows :].fill_(0)

    def tensors(self) -> list[Tensor]:
        return [self.joined, self.side, self.scale]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.data())
def test_writing_through_pieces_is_what_the_loader_does(
    rows: int, columns: int, size: int, pad: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    shapes = {
        "first": (rows * size, columns),
        "second": (rows * size, columns),
        "side": (rows, columns * size),
        "scale": (columns,),
    }
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    loaded, traced = Fused(rows, columns, rank, size, pad), Fused(rows, columns, rank, size, pad)
    loaded.load(iter(values.items()))
    pieces = trace_loaders(traced.load, shapes)
    assert not any(tensor.any() for tensor in traced.tensors())
    for name, parts in pieces.items():
        for piece in parts:
            piece.memory.copy_(values[name][piece.box.slices(Box.whole(shapes[name]))])
    for a, b in zip(loaded.tensors(), traced.tensors(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_followed_has_no_pieces() -> None:
    place = {name: torch.zeros(4, 4) for name in ("turned", "computed", "spread", "fine")}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "turned":
                place[name].copy_(tensor.t())
            elif name == "computed":
                place[name].copy_((tensor * 2).cpu() if not tensor.is_meta else torch.zeros(4, 4))
            elif name == "spread":
                place[name].copy_(tensor[:1])
            else:
                place[name].copy_(tensor)

    pieces = trace_loaders(load, dict.fromkeys(place, (4, 4)))
    assert {name: len(parts) for name, parts in pieces.items()} == {"turned": 0, "computed": 0, "spread": 0, "fine": 1}
