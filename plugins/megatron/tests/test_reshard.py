"""From Megatron's layout to those that others serve from: bitwise, and no byte more than must move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import good, whole

from rlsdk.interfaces import Box, TensorMeta, WeightLayout
from rlsdk.sharding.plan.planner import plan_reshard
from rlsdk.sharding.transports.table import TRANSPORTS

SPLITS = [
    (2, "tp2"), (2, "pp2"), (2, "vpp2"), (2, "tied pp2"), (2, "odd vocabulary tp2"), (2, "mixture ep2"),
    (2, "mixture tp2"), (4, "tp2 pp2"), (4, "tp2 dp2"), (4, "tp4"),
]  # fmt: skip
TARGETS = ("whole", "rows of 3", "tensor parallel 1", "tensor parallel 2", "tensor parallel 4")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("world", "name"), SPLITS)
def test_what_arrives_is_what_was_trained_to_the_bit(world: int, name: str, target: str, results: Any) -> None:
    ranks = good(results[world, name])
    tensors = whole(ranks)
    wanted = layouts(tensors, target, head=16 if "mixture" in name else 32)
    plan = plan_reshard([rank["layout"] for rank in ranks], wanted, bucket_bytes=1 << 14, transports=TRANSPORTS)
    assert plan.moved_bytes == plan.lower_bound_bytes == plan.num_bytes
    held = [{(key, box): tensor for key, box, tensor in rank["shards"]} for rank in ranks]
    for layout, buckets in zip(wanted, plan.parts, strict=True):
        came = {key: torch.full_like(tensor, float("nan")) for key, tensor in tensors.items()}
        for bucket in buckets:
            for transfer in bucket.transfers:
                box, values = next(
                    (box, values)
                    for (key, box), values in held[bucket.source].items()
                    if key == transfer.name and box.intersect(transfer.box) == transfer.box
                )
                place = Box.whole(tuple(tensors[transfer.name].shape))
                came[transfer.name][transfer.box.slices(place)] = values[transfer.box.slices(box)]
        for key, box in layout.boxes:
            at = box.slices(Box.whole(tuple(tensors[key].shape)))
            assert torch.equal(came[key][at], tensors[key][at]), key


def layouts(tensors: dict[str, torch.Tensor], target: str, *, head: int) -> list[WeightLayout]:
    """One for each rank of a target."""
    count = 1 if target == "whole" else int(target.split()[-1])
    return [
        WeightLayout(
            rank=rank,
            node="elsewhere",
            device="cpu",
            process=f"elsewhere:{rank}",
            tensors=tuple(TensorMeta(name=n, shape=tuple(t.shape), dtype="float32") for n, t in tensors.items()),
            boxes=tuple(
                (name, box)
                for name, tensor in tensors.items()
                if (box := wanted_box(name, tuple(tensor.shape), target, rank, count, head)).numel
            ),
        )
        for rank in range(count)
    ]


def wanted_box(name: str, shape: tuple[int, ...], target: str, rank: int, count: int, head: int) -> Box:
    """Rows in even chunks; or what a rank of a tensor-parallel server wants: heads, columns, copies of small things,
    and a copy of a key-value head where there are more ranks than heads."""
    if target.startswith("rows"):
        chunk = -(-shape[0] // count)
        first = min(chunk * rank, shape[0])
        return Box((first, *(0 for _ in shape[1:])), (min(chunk, shape[0] - first), *shape[1:]))
    if ("k_proj" in name or "v_proj" in name) and shape[0] // head < count:
        first = rank * (shape[0] // head) // count * head
        return Box((first, *(0 for _ in shape[1:])), (head, *shape[1:]))
    axis = next((axis for axis, words in AXES.items() if any(word in name for word in words)), None)
    if axis is None:
        return Box.whole(shape)
    at, chunk = len(shape) - 1 if axis == "last" else 0, -(-shape[-1 if axis == "last" else 0] // count)
    first = min(chunk * rank, shape[at])
    size = min(chunk, shape[at] - first)
    return Box(
        tuple(first if d == at else 0 for d in range(len(shape))),
        tuple(size if d == at else n for d, n in enumerate(shape)),
    )


AXES = {
    "first": ("q_proj", "k_proj", "v_proj", "mlp.gate_proj", "mlp.up_proj", "embed_tokens", "lm_head", "experts"),
    "last": ("o_proj.weight", "mlp.down_proj"),
}
