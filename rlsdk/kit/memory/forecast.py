"""Building blocks of engines' forecasts (`rlsdk.interfaces.ForecastFn`): layouts, passes, KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from rlsdk.interfaces import (
    Box,
    ConfigError,
    ModelSpec,
    RankContext,
    RolloutSpec,
    TensorMeta,
    TrainSpec,
    WeightLayout,
    Workload,
)
from rlsdk.kit.memory.kv_cache import bytes_per_token
from rlsdk.kit.memory.pass_memory import passes_bytes, rows_of_pass
from rlsdk.kit.model.adapters import adapter_shapes
from rlsdk.kit.model.hf import build_model, canonical_tensors, dtype_names, load_model_config, persistent_buffers


@dataclass(frozen=True)
class ModelTensors:
    """Canonical tensors of a model, derived from `config.json`."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    """As in `WeightLayout`."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of buffers, which keep their own."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelTensors:
        """Tensors of a transformers model, which may be on the meta device."""
        tensors, tied = canonical_tensors(model)
        dtypes = dtype_names(persistent_buffers(model))
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tied, dtypes)

    @classmethod
    def read(cls, spec: TrainSpec | RolloutSpec) -> ModelTensors:
        """Reads only the configuration of a model."""
        return cls.of(build_model(spec.model, empty=True))

    @property
    def numel(self) -> int:
        """Number of parameters; tied copies count once."""
        return sum(map(math.prod, self.shapes.values()))

    def replica_numel(self, spec: RolloutSpec) -> int:
        """Number of parameters per device of a replica: experts are split over all its devices, everything else over
        those of one copy of attention."""
        experts = sum(math.prod(shape) for name, shape in self.shapes.items() if ".experts." in name)
        return (self.numel - experts) // (spec.tp_size * spec.pp_size) + experts // spec.num_devices

    def layout(self, ctx: RankContext, dtype: str, boxes: Iterable[tuple[str, Box]] | None = None) -> WeightLayout:
        """Layout of a rank with these boxes; None: every tensor whole."""
        held = tuple((name, Box.whole(shape)) for name, shape in self.shapes.items()) if boxes is None else tuple(boxes)
        return WeightLayout(
            rank=ctx.rank,
            node=ctx.node,
            device=ctx.device,
            process="",
            tensors=tuple(
                TensorMeta(name=name, shape=self.shapes[name], dtype=self.dtypes.get(name, dtype))
                for name in dict.fromkeys(n for n, _ in held)
            ),
            boxes=held,
            tied=self.tied,
        )

    def layout_of_replica(self, ctx: RankContext, spec: RolloutSpec, *, on_host: bool = False) -> WeightLayout:
        """Layout of a rollout engine that receives every tensor whole, whatever it does with it; `on_host` as in
        `rlsdk.kit.generation.serving.whole_layout`."""
        place = replace(ctx, device="cpu") if on_host else ctx
        return replace(self.layout(place, spec.model.dtype), rank=0)


class NoRoomError(ConfigError):
    """A device has no room for what an engine needs at least."""


def adapter_numel(spec: ModelSpec) -> int:
    """Number of an adapter's parameters; 0 without one."""
    if spec.adapter is None:
        return 0
    return sum(map(math.prod, adapter_shapes(build_model(spec, empty=True), spec.adapter).values()))


@dataclass(frozen=True)
class Passes:
    """Peak memory of a rank's passes besides weights."""

    rows: int
    """Rows of the largest pass."""
    count: int
    """Number of passes in an update."""
    forward_bytes: int | None
    backward_bytes: int | None
    """Peak of forward and backward in bytes; 0 for a frozen model."""


def count_passes(
    spec: TrainSpec,
    workload: Workload,
    *,
    dp_size: int,
    cp_size: int = 1,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Passes:
    """Counts the passes of an engine that runs transformers' own code on whole rows on each rank.

    Args:
        spec: sets the split into micro-batches.
        workload: all rows have the largest length.
        dp_size: ranks that share an update's rows.
        cp_size: ranks that share the tokens of each row.
        dtype: that passes run in; None: the model's.
        device: that passes run on, as in `RankContext.device`.
    """
    mine = -(-workload.update_rows // dp_size)
    rows, count = rows_of_pass(spec, row_tokens=workload.row_tokens, num_rows=mine)
    gradients = (False, True) if spec.optim is not None else (False,)
    peaks = passes_bytes(
        spec.model,
        dtype=dtype,
        num_rows=rows,
        row_tokens=-(-workload.row_tokens // cp_size),
        gradients=gradients,
        activation_checkpointing=spec.activation_checkpointing,
        device=device,
    )
    return Passes(rows, count, peaks[0], peaks[1] if len(peaks) > 1 else 0)


def cache_bytes(
    ctx: RankContext,
    spec: RolloutSpec,
    workload: Workload,
    *,
    weights_bytes: int,
    sample_tokens: int,
    gpu_share: float,
    host_share: float,
) -> int | None:
    """Size of a rollout engine's KV cache on a device. On a GPU: what its share of the device leaves after weights. On
    a CPU: room for all running samples, up to a share of the memory, and for at least one.

    Args:
        ctx: of any replica.
        spec: how many samples run.
        workload: has the size of the memory.
        weights_bytes: on one device.
        sample_tokens: tokens that the engine allocates per sample.
        gpu_share: of a GPU's memory, weights included.
        host_share: of main memory.

    Returns:
        Bytes; None if the memory of the GPU is unknown.

    Raises:
        NoRoomError: a GPU has no room for one sample.
    """
    if ctx.device != "cpu":
        if workload.device_bytes is None:
            return None
        room = int(workload.device_bytes * gpu_share) - weights_bytes
        least = sample_tokens * bytes_per_token(load_model_config(spec.model), spec.model.dtype) // spec.tp_size
        if room < least:
            raise NoRoomError(
                f"rollout: its share of a device, {gpu_share:.0%} of {workload.device_bytes / 2**30:.1f} GiB, has no "
                f"room for one sample: weights take {weights_bytes / 2**30:.1f} GiB, and keys and values of "
                f"{sample_tokens:,} tokens {least / 2**30:.1f} GiB; raise rollout.tp_size"
            )
        return room
    one = sample_tokens * bytes_per_token(load_model_config(spec.model), spec.model.dtype)
    room = one * spec.max_running
    return max(room if workload.device_bytes is None else min(room, int(workload.device_bytes * host_share)), one)


def training(spec: TrainSpec | RolloutSpec, backend: str) -> TrainSpec:
    """Returns the specification if it is a `TrainSpec`; raises `ConfigError` otherwise."""
    if not isinstance(spec, TrainSpec):
        raise ConfigError(f"backend {backend!r} is a train backend; got a {type(spec).__name__}")
    return spec


def rollout(spec: TrainSpec | RolloutSpec, backend: str) -> RolloutSpec:
    """Returns the specification if it is a `RolloutSpec`; raises `ConfigError` otherwise."""
    if not isinstance(spec, RolloutSpec):
        raise ConfigError(f"backend {backend!r} is a rollout backend; got a {type(spec).__name__}")
    return spec
