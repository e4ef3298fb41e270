"""Weights that a target serves as float8 with block scales: planned, moved unquantized, proven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import Tensor, dim0_sharded, random_tensors, shapes, sources, train_group

from rlsdk.interfaces import (
    BlockScales,
    Box,
    LayoutError,
    SyncReceipt,
    TensorMeta,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.kit.weights.block_scales import BlockQuantizer
from rlsdk.planning.reshard import summarize
from rlsdk.sharding import TRANSPORTS, GenericShardingManager, layout_hash, plan_reshard
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, tensor_layout, whole_boxes

Shapes = Mapping[str, tuple[int, ...]]


def quantized_target(
    tensors: Shapes, block: int = 3, taken_as: str = "float32", rank: int = 0, **place: Any
) -> WeightLayout:
    """Wants matrices as float8 with scales, and the rest in float32."""
    metas = [
        TensorMeta(
            name=name,
            shape=shape,
            dtype="float8_e4m3fn" if len(shape) == 2 else "float32",
            scales=BlockScales(name=f"{name}_scale_inv", block=(block, block), taken_as=taken_as)
            if len(shape) == 2
            else None,
        )
        for name, shape in tensors.items()
    ]
    return tensor_layout(metas, whole_boxes(tensors), rank=rank, process=place.get("process", f"rollout:{rank}"))


class QuantizingEngine(TensorRolloutEngine):
    """Quantizes what arrives, as engines do; keeps what it serves as `values` and `scales`."""

    truncates = ""
    """A tensor whose scales it makes of its first block only."""

    def __init__(self, layouts: Sequence[WeightLayout]) -> None:
        super().__init__(layouts)
        self.values: dict[str, Tensor] = {}

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        served, quantizers, came = {}, {}, set()
        for meta in self._layouts[0].tensors:
            served[meta.name] = torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))
            if meta.scales is not None:
                counts = [-(-n // b) for n, b in zip(meta.shape, meta.scales.block, strict=True)]
                served[meta.scales.name] = torch.zeros(counts)
                quantizers[meta.name] = BlockQuantizer(meta, served[meta.name], served[meta.scales.name])
        self.wire = {}
        for shard in shards:
            came.add(shard.name)
            self.wire[shard.name] = shard.tensor.dtype
            if shard.name in quantizers:
                quantizers[shard.name].take(shard)
            else:
                served[shard.name][shard.box.slices(Box.whole(tuple(served[shard.name].shape)))] = shard.tensor
        if self.truncates:
            served[self.truncates].view(torch.uint8).flatten()[-1] ^= 1
        self.values = served
        prints = {name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in served.items()}
        return SyncReceipt(version=version, num_tensors=len(came), num_bytes=0, fingerprints=prints)


def independently(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(float8, scales) of a whole matrix, padded to whole blocks: another way to write the rule."""
    rows, columns = values.shape
    padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    padded[:rows, :columns] = values.float()
    grid = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scales = grid.abs().amax((1, 3)).clamp(1e-4) / 448
    found = (grid * (1.0 / scales)[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return found.to(torch.float8_e4m3fn), scales


def manager_of(
    tensors: Mapping[str, Tensor], source: Sequence[WeightLayout], target: Sequence[WeightLayout], **more: Any
) -> tuple[GenericShardingManager, list[QuantizingEngine]]:
    engines = [QuantizingEngine([layout]) for layout in target]
    rollout = LocalGroup([RolloutHost(engine) for engine in engines])
    return GenericShardingManager(train_group(tensors, source), rollout, **more), engines


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(64, 400))
def test_any_split_of_the_sources_gives_what_one_process_would_quantize(
    data: st.DataObject, block: int, bucket_bytes: int
) -> None:
    tensors: Shapes = {**data.draw(shapes()), "wide": data.draw(st.tuples(st.integers(1, 13), st.integers(1, 13)))}
    source = data.draw(sources(tensors))
    target = quantized_target(tensors, block)
    state = random_tensors(tensors)
    manager, (engine,) = manager_of(state, source, [target], bucket_bytes=bucket_bytes)
    report = manager.sync(1)
    assert report.changed_tensors == report.num_tensors == len(tensors)
    for name, tensor in state.items():
        if tensor.dim() != 2:
            assert torch.equal(engine.values[name], tensor)
            continue
        values, scales = independently(tensor, block)
        assert torch.equal(engine.values[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(engine.values[f"{name}_scale_inv"], scales)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("taken_as", ["float32", "bfloat16"])
def test_weights_travel_unquantized_in_the_narrower_dtype(held: str, taken_as: str) -> None:
    tensors = {"w": (40, 24), "norm": (24,)}
    source, target = dim0_sharded(tensors, 3, held), quantized_target(tensors, 16, taken_as)
    plan = plan_reshard(source, [target], bucket_bytes=512, transports=TRANSPORTS)
    wire = "bfloat16" if "bfloat16" in (held, taken_as) else "float32"
    assert (plan.tensors["w"].dtype, plan.tensors["w"].scales) == (wire, None)
    width, norm_width = {"float32": 4, "bfloat16": 2}[wire], {"float32": 4, "bfloat16": 2}[held]
    assert plan.num_bytes == plan.moved_bytes == plan.lower_bound_bytes == 40 * 24 * width + 24 * norm_width
    state = random_tensors(tensors, held)
    manager, (engine,) = manager_of(state, source, [target], bucket_bytes=512)
    manager.sync(1)
    assert engine.wire["w"] == getattr(torch, wire)
    values, scales = independently(state["w"].to(getattr(torch, wire)), 16)
    assert torch.equal(engine.values["w"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(engine.values["w_scale_inv"], scales)


def test_replicas_that_quantize_and_replicas_that_do_not_are_proven_side_by_side() -> None:
    tensors = {"w": (10, 9), "norm": (9,)}
    state = random_tensors(tensors)
    plain = replace(
        quantized_target(tensors, rank=1),
        tensors=tuple(TensorMeta(name=n, shape=s, dtype="float32") for n, s in tensors.items()),
    )
    manager, engines = manager_of(state, dim0_sharded(tensors, 4), [quantized_target(tensors, 4), plain])
    report = manager.sync(1)
    assert torch.equal(engines[1].values["w"], state["w"])
    assert engines[0].values["w"].dtype == torch.float8_e4m3fn
    assert set(report.receipts[0].fingerprints) == {"w", "w_scale_inv", "norm"}
    with pytest.raises(WeightSyncError, match="no tensor changed"):
        manager.sync(2)
    manager.train.run("optim_step")
    assert manager.sync(3).changed_tensors == 2


@pytest.mark.parametrize("wrong", ["w", "w_scale_inv"])
def test_one_wrong_bit_of_a_value_or_a_scale_is_seen(wrong: str) -> None:
    tensors = {"w": (10, 9), "norm": (9,)}
    manager, (engine,) = manager_of(random_tensors(tensors), dim0_sharded(tensors, 2), [quantized_target(tensors, 4)])
    engine.truncates = wrong
    with pytest.raises(WeightSyncError, match=f"does not serve version 1 as it was trained: '{wrong}' of 3 tensors"):
        manager.sync(1)


def refused(target: WeightLayout, held: str = "float32") -> str:
    tensors = {"w": (10, 9), "norm": (9,)}
    with pytest.raises(LayoutError) as caught:
        plan_reshard(dim0_sharded(tensors, 2, held), [target], bucket_bytes=512, transports=TRANSPORTS)
    return str(caught.value)


def changed(**fields: Any) -> WeightLayout:
    layout = quantized_target({"w": (10, 9), "norm": (9,)}, 4)
    meta, norm = layout.tensors
    assert meta.scales is not None
    meta = replace(meta, dtype=fields.pop("dtype", meta.dtype), scales=replace(meta.scales, **fields))
    return replace(layout, tensors=(meta, norm))


def test_layouts_that_nobody_could_serve_are_refused() -> None:
    assert "expected float8_e4m3fn" in refused(changed(dtype="bfloat16"))
    assert "expected float8_e4m3fn" in refused(changed(dtype="float8_e5m2"))
    assert "expected one positive number for each dimension" in refused(changed(block=(4,)))
    assert "expected one positive number for each dimension" in refused(changed(block=(4, 0)))
    assert "is quantized of values in float8_e5m2" in refused(changed(taken_as="float8_e5m2"))
    assert "scales are made at the target" in refused(changed(name="norm"))
    assert "train in one of these" in refused(changed(), held="float8_e4m3fn")
    cut = replace(changed(), boxes=(("w", Box((0, 0), (6, 9))), ("norm", Box.whole((9,)))), worker="tp0")
    assert "tp0 serves offset [0, 0] of size [6, 9] with scales for blocks of [4, 4]" in refused(cut)
    whole_blocks = replace(changed(), boxes=(("w", Box((4, 0), (6, 9))), ("norm", Box.whole((9,)))))
    plan = plan_reshard(
        dim0_sharded({"w": (10, 9), "norm": (9,)}, 2), [whole_blocks], bucket_bytes=512, transports=TRANSPORTS
    )
    assert plan.num_bytes == (6 * 9 + 9) * 4


def test_a_layout_with_other_blocks_is_another_layout() -> None:
    assert layout_hash([changed()]) != layout_hash([changed(block=(5, 4))])


def test_the_plan_of_a_run_counts_what_is_quantized_and_what_waits_for_it() -> None:
    tensors = {"w": (40, 24), "v": (8, 8), "norm": (24,)}
    source, target = dim0_sharded(tensors, 3, "float32"), quantized_target(tensors, 16, "bfloat16")
    found = summarize(source, [target], bucket_bytes=512)
    assert (found.num_tensors, found.quantized_tensors) == (3, 2)
    assert found.quantizing_bytes == 40 * 24 * 2
    assert found.moved_bytes == (40 * 24 + 8 * 8) * 2 + 24 * 4
    assert summarize(source, [replace(target, tensors=source[0].tensors)], bucket_bytes=512).quantizing_bytes == 0


@pytest.mark.parametrize(
    ("shape", "ranks", "blocks"),
    [
        ((64, 24), 4, 0),  # cut at the edges of blocks: all maxima stay where they are
        (
            (72, 24),
            4,
            2 * 3 * 3,
        ),  # 18 rows each: all three edges are inside a row of three blocks, which two ranks have
        ((64, 24), 32, 32 * 3),  # two rows of eight on each rank: a block is on four
    ],
)
def test_only_maxima_of_blocks_that_are_cut_pass_through_the_controller(
    shape: tuple[int, int], ranks: int, blocks: int
) -> None:
    tensors = {"w": shape}
    state = random_tensors(tensors)
    manager, (engine,) = manager_of(state, dim0_sharded(tensors, ranks), [quantized_target(tensors, 8)])
    passed: list[int] = []
    for host in manager.train.hosts:  # type: ignore[attr-defined]

        def counted(pieces: Any, host: Any = host) -> Any:
            found = host.source.block_maxima(pieces)
            passed.extend(map(len, found))
            return found

        host.weight_block_maxima = counted
    manager.sync(1)
    assert sum(passed) == blocks
    values, scales = independently(state["w"], 8)
    assert torch.equal(engine.values["w"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(engine.values["w_scale_inv"], scales)
