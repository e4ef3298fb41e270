"""Requirements: properties that an engine reports (node, dtypes, forecast, parallel position), and its threads."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlsdk.interfaces import (
    Batch,
    Capability,
    Head,
    Parallel,
    RankContext,
    WeightLayout,
    Workload,
)
from rlsdk.testing.process.worlds import SEED, Seat
from rlsdk.testing.suites.forecasts import differences, senseless
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import read
from rlsdk.testing.train.case_runner import share
from rlsdk.testing.train.cases import Case, Weighted
from rlsdk.testing.train.lab import TrainLab, claimed_heads
from rlsdk.testing.train.requirements.parallelism import split_case
from rlsdk.testing.train.requirements.settings import three_batches

SPLITS = (
    Capability.DATA_PARALLEL,
    Capability.TENSOR_PARALLEL,
    Capability.PIPELINE_PARALLEL,
    Capability.CONTEXT_PARALLEL,
)
NODE = "localhost"
"""`RankContext.node` of every rank here."""


class PlacementRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("layout.place", since=(2, 0))
    def test_layout_place(self, lab: TrainLab, measured: Measured) -> None:
        """A layout has the node and device of the engine's context, the process as node:pid, and only tensors of which
        it has a box."""
        found = lab.play([read])
        layout = found.layout
        assert layout is not None
        measured.equal("another node", layout.node != NODE, 0)
        node, _, pid = layout.process.rpartition(":")
        measured.equal("process is not node:pid", not (node == NODE and pid.isdigit()), 0)
        measured.none("devices", [] if layout.device in {lab.suite.device, "cpu"} else [layout.device])
        boxed = {name for name, _ in layout.boxes}
        measured.none("tensors without a box", [meta.name for meta in layout.tensors if meta.name not in boxed])
        wrong = [meta.name for meta in layout.tensors if not _fits(layout, meta.name, meta.shape)]
        measured.none("boxes that do not lie in their tensor", wrong)

    @requirement("layout.kinds", since=(2, 0), basic=True)
    def test_layout_kinds(self, lab: TrainLab, measured: Measured) -> None:
        """For a model in bfloat16, with a head, with tied embeddings, and a frozen one, `shards` match `layout`: its
        boxes in order, with its dtype and sizes, and as views."""
        kinds: dict[str, dict[str, Any]] = {"frozen": {"optim": None}}
        if "bfloat16" in lab.spec.dtypes:
            kinds |= {"bfloat16": {"dtype": "bfloat16"}, "frozen, bfloat16": {"dtype": "bfloat16", "optim": None}}
        if (tied := lab.variant("tied")) is not None:
            kinds["tied"] = {"model": tied}
        kinds |= {name: {"head": head} for head, name in claimed_heads(lab)}
        for name, fields in kinds.items():
            measured.none(f"faults, {name}", lab.run(unlike_its_layout, lab.case(**fields), three_batches()[0]))

    @requirement("forecast", since=(2, 0), basic=True)
    def test_forecast(self, lab: TrainLab, measured: Measured) -> None:
        """The backend's forecast of a rank has the engine's layout; amounts of memory are None or not negative. (A
        backend without forecasts returns None.)"""
        forecast = lab.suite.registry().load_forecast(lab.spec)
        if forecast is None:
            return measured.record("forecasts", 0)
        models = {"the model": lab.model, "tied": lab.variant("tied")}
        cases: dict[str, dict[str, Any]] = {n: {"model": model} for n, model in models.items() if model is not None}
        for name, fields in {**cases, "frozen": {"optim": None}}.items():
            case = lab.case(**fields)
            ctx = RankContext(role="actor", device=lab.suite.device, seed=SEED)
            found = forecast([ctx], case.spec, Workload(row_tokens=128, update_rows=8, running_rows=0))
            measured.none(f"fields that make no sense, {name}", senseless(found, 1))
            layout = lab.play([read], **fields).layout
            assert layout is not None
            measured.none(f"differences from the layout, {name}", differences(found.layouts[0][0], layout))
        return None

    @requirement("parallel.positions", since=(2, 0))
    def test_positions(self, lab: TrainLab, measured: Measured) -> None:
        """`parallel` gives each rank's position: sizes multiply to the world size, every position occurs once, each
        group of ranks with the same rows has one that collects outputs, and nothing changes later."""
        alone = lab.run(positions, lab.case(), three_batches()[0])
        measured.none("faults of one rank", wrong_positions([alone]))
        for capability in SPLITS:
            if capability not in lab.spec.capabilities:
                continue
            case = split_case(lab, capability, default={} if capability is Capability.DATA_PARALLEL else None)
            found = lab.several.run(positions, case, three_batches()[0])
            measured.none(f"faults, {capability.value}", wrong_positions(found))
            size = getattr(found[0][0], f"{capability.value[0]}p_size")
            measured.equal(f"size, {capability.value}", size, lab.suite.world)

    @requirement("place.threads", since=(2, 0))
    def test_place_threads(self, lab: TrainLab, measured: Measured) -> None:
        """An engine uses at most `RankContext.num_threads` threads, because ranks on one machine share its cores."""
        measured.at_most("threads of torch, of one that it may use", lab.run(threads_of, lab.case()), 1)


def _fits(layout: WeightLayout, name: str, shape: tuple[int, ...]) -> bool:
    return all(
        len(box.size) == len(shape)
        and all(o + n <= size for o, n, size in zip(box.offset, box.size, shape, strict=True))
        for known, box in layout.boxes
        if known == name
    )


def unlike_its_layout(seat: Seat, case: Case, batch: Batch) -> list[str]:
    """Differences of an engine's shards from its layout, before and after a step."""
    engine, faults = seat.start(case.spec), []
    output = {Head.LM: "log_probs", Head.VALUE: "values", Head.SCORE: "scores"}[case.head]
    try:
        for turn in range(2):
            layout = engine.layout()
            dtypes = {meta.name: f"torch.{meta.dtype}" for meta in layout.tensors}
            first, again = list(engine.shards()), list(engine.shards())
            if [(shard.name, shard.box) for shard in first] != [tuple(box) for box in layout.boxes]:
                faults.append(f"shards out of the layout's order, turn {turn}")
            for shard, other in zip(first, again, strict=True):
                said = f"{shard.name}, turn {turn}"
                if str(shard.tensor.dtype) != dtypes[shard.name]:
                    faults.append(f"{said}: {shard.tensor.dtype}, the layout says {dtypes[shard.name]}")
                if tuple(shard.tensor.shape) != shard.box.size:
                    faults.append(f"{said}: shape {tuple(shard.tensor.shape)} in a box of {shard.box.size}")
                if shard.tensor.numel() and shard.tensor.data_ptr() != other.tensor.data_ptr():
                    faults.append(f"{said}: a copy")
            if case.optim is None:
                break
            engine.forward_backward(share(engine, batch), Weighted((output,)))
            engine.optim_step()
        return faults
    finally:
        engine.close()


def positions(seat: Seat, case: Case, batch: Batch) -> list[Parallel]:
    """A rank's position, before and after a step."""
    engine = seat.start(case.spec)
    try:
        before = engine.parallel
        engine.forward_backward(share(engine, batch), case.objective)
        engine.optim_step()
        return [before, engine.parallel]
    finally:
        engine.close()


def wrong_positions(ranks: list[list[Parallel]]) -> list[str]:
    axes = ("dp", "tp", "pp", "cp")
    faults = [f"rank {at} moved" for at, (before, after) in enumerate(ranks) if before != after]
    places = [before for before, _ in ranks]
    for at, place in enumerate(places):
        sizes = [getattr(place, f"{axis}_size") for axis in axes]
        if math.prod(sizes) != len(places):
            faults.append(f"rank {at}: sizes {sizes} of a world of {len(places)}")
        faults += [
            f"rank {at}: {axis}_rank {getattr(place, f'{axis}_rank')} of {getattr(place, f'{axis}_size')}"
            for axis in (*axes, "ep")
            if not 0 <= getattr(place, f"{axis}_rank") < getattr(place, f"{axis}_size")
        ]
    taken = {tuple(getattr(place, f"{axis}_rank") for axis in axes) for place in places}
    faults += ["two ranks at one position"] if len(taken) < len(places) else []
    collecting = sorted(place.dp_rank for place in places if place.is_collector)
    return faults + ([f"ranks that collect: {collecting}"] if collecting != list(range(places[0].dp_size)) else [])


def threads_of(seat: Seat, case: Case) -> int:
    """Largest number of threads that torch uses for an operation while an engine with one thread is built and
    stepped."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine = seat.start(case.spec)
        try:
            most = torch.get_num_threads()
            engine.forward_backward(share(engine, three_batches()[0]), case.objective)
            engine.optim_step()
            return max(most, torch.get_num_threads())
        finally:
            engine.close()
    finally:
        torch.set_num_threads(before)
