"""Following loaders: whatever cuts, joins and pads they make, each value is found where they put it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.interfaces import Box
from rlsdk.kit.weights.weight_tracing import trace_loaders


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


def test_experts_that_lie_in_one_tensor_are_followed_one_by_one() -> None:
    """As checkpoints have them: gate and up of all experts in one tensor; of which a rank loads some."""
    whole, mine = torch.randn(4, 6, 5), torch.zeros(2, 6, 5)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            for half, part in enumerate(tensor.chunk(2, dim=1)):
                for expert, values in enumerate(part.unbind()):
                    if expert >= 2:
                        mine[expert - 2].narrow(0, 3 * half, 3).copy_(values)

    pieces = trace_loaders(load, {"experts": (4, 6, 5)})["experts"]
    assert {piece.box for piece in pieces} == {Box((e, h, 0), (1, 3, 5)) for e in (2, 3) for h in (0, 3)}
    for piece in pieces:
        assert piece.memory.shape == piece.box.size
        piece.memory.copy_(whole[piece.box.slices(Box.whole((4, 6, 5)))])
    assert torch.equal(mine, whole[2:])


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


def test_what_a_loader_joins_before_it_copies_is_followed() -> None:
    """As latent attention is loaded: two projections become one, a rank takes some rows of it; biases are stacked."""
    first, second = torch.randn(3, 4), torch.randn(5, 4)
    low, high = torch.randn(6), torch.randn(6)
    values = {"first": first, "second": second, "low": low, "high": high}
    rows, biases = torch.zeros(5, 4), torch.zeros(2, 3)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(weights)
        rows.copy_(torch.cat([given["first"], given["second"]], dim=0).contiguous()[1:6])
        biases.copy_(torch.stack([given["low"], given["high"]])[:, 2:5].double().clone())

    pieces = trace_loaders(load, {name: tuple(tensor.shape) for name, tensor in values.items()})
    found = {name: [piece.box for piece in parts] for name, parts in pieces.items()}
    assert found == {
        "first": [Box((1, 0), (2, 4))],
        "second": [Box((0, 0), (3, 4))],
        "low": [Box((2,), (3,))],
        "high": [Box((2,), (3,))],
    }
    for name, parts in pieces.items():
        for piece in parts:
            piece.memory.copy_(values[name][piece.box.slices(Box.whole(tuple(values[name].shape)))])
    assert torch.equal(rows, torch.cat([first, second])[1:6])
    assert torch.equal(biases, torch.stack([low, high])[:, 2:5])


def test_what_a_loader_changes_before_it_copies_is_not_followed() -> None:
    place = {name: torch.zeros(4, 4) for name in ("raised", "product", "fine")}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "raised":
                tensor.add_(1)
            place[name].copy_(tensor * 2 if name == "product" else tensor.clone())

    pieces = trace_loaders(load, dict.fromkeys(place, (4, 4)))
    assert {name: len(parts) for name, parts in pieces.items()} == {"raised": 0, "product": 0, "fine": 1}
