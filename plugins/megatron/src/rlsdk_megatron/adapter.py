"""An adapter that is split like the weights beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import Box, ModelSpec, TrainSpec, fingerprint
from rlsdk.kit.model.adapter_files import initial_values, write_adapter
from rlsdk.kit.model.adapters import KeptReference, ModelAdapter, add_adapter, base_digest, count_moved, merged
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.ranks.error_agreement import raise_on_all_ranks
from rlsdk_megatron.adapter_parts import check_fusion, check_targets, low_parts
from rlsdk_megatron.checkpoint import Gathering, owned
from rlsdk_megatron.low_rank import LowRank, Switch
from rlsdk_megatron.parts import Held, Part, Shapes, all_parts


class SplitAdapter:
    """One rank's part of an adapter, float32. With it the rank adds the adapter to its own boxes of a weight without
    communication."""

    def __init__(self, model: Any, adapter: ModelAdapter, beside: Sequence[LowRank]) -> None:
        """`split_adapter` makes it.

        Args:
            model: the transformers model on the meta device, with the adapter.
            adapter: of it: names, shapes and files; its tensors have no values.
            beside: the modules of this rank that compute with it.
        """
        self.model, self.adapter = model, adapter
        self.shapes = {name: tuple(parameter.shape) for name, parameter in adapter.parameters.items()}
        self.held: list[Held] = [one for low in beside for one in _held_by(low)]
        self._places: dict[str, tuple[Box, Tensor]] = {
            part.name: (part.box, one.parameter) for one in self.held for part in one.parts
        }
        self.reference = KeptReference(Switch(beside), {name: tensor for name, (_, tensor) in self._places.items()})
        self._digest: str | None = None

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Gives A and B their first values."""
        first = dict(initial_values(self.adapter.spec, self.shapes, seed))
        for name, (box, tensor) in self._places.items():
            tensor.copy_(first[name][box.slices(Box.whole(self.shapes[name]))])

    def tensors(self) -> list[Tensor]:
        """All memory of this rank besides gradients and moments."""
        return [*(one.parameter.detach() for one in self.held), *self.reference.values.values()]

    def merged(self, part: Part, parameter: Tensor) -> Tensor:
        """A box of a weight, with the adapter added if the weight has one."""
        module, base = self.adapter.module_of(part.name), part.view(parameter)
        if module is None:
            return base
        (a_box, a), (b_box, b) = (self._places[f"{module}.lora_{kind}.weight"] for kind in "AB")
        (row, column), (rows, columns) = part.box.offset, part.box.size
        left, first = column - a_box.offset[1], row - b_box.offset[0]
        return merged(base, a[:, left : left + columns], b[first : first + rows], self.adapter.spec.scale)

    def moved_share(self, held: Sequence[Held]) -> float:
        """See `TrainEngine`. Every element of an adapted weight is on equally many ranks. Collective."""
        adapted = [pair for pair in all_parts(held) if self.adapter.module_of(pair[0].name) is not None]
        counts = torch.tensor(count_moved((part.view(p), self.merged(part, p)) for part, p in adapted))
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    def save(self, path: Path, spec: ModelSpec) -> None:
        """Writes PEFT's two files, on rank 0. Collective: every rank must call."""
        gathering = Gathering(self.held, self.shapes)
        tensors = {name: gathering.fetch(name, 0, torch.float32) for name in self.shapes}
        with raise_on_all_ranks(f"{path} cannot be written"):
            if dist.get_rank() == 0:
                whole = {name: values for name, values in tensors.items() if values is not None}
                write_adapter(path, self.model, self.adapter, whole, spec)

    def base_digest(self, held: Sequence[Held], shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Fingerprint of the frozen weights. Collective: every rank must call."""
        if self._digest is None:
            mine, sums = owned(held, shapes), dict.fromkeys(shapes, 0)
            for part, parameter in all_parts(held):
                if (part.name, part.box) in mine:
                    sums[part.name] += fingerprint(part.view(parameter), part.box)
            total = torch.tensor(list(sums.values()))
            dist.all_reduce(total)
            self._digest = base_digest(dict(zip(sums, total.tolist(), strict=True)), self.adapter.spec)
        return self._digest


def split_adapter(
    spec: TrainSpec, stages: Sequence[Any], shapes: Shapes, device: torch.device, *, engine: bool
) -> SplitAdapter | None:
    """Puts the adapter of `spec` beside the linear layers of this rank's stages and freezes everything else; None if
    there is none.

    Args:
        spec: names the adapter; without an optimizer it is frozen.
        stages: not yet wrapped for training.
        shapes: the split.
        device: of A and B, which have no values until `SplitAdapter.fill`.
        engine: layers are those of Transformer Engine, which is refused.

    Raises:
        ConfigError: as `add_adapter`, or a target that Megatron has no adapter for.
    """
    if spec.model.adapter is None:
        return None
    model = build_model(spec.model, empty=True)
    adapter = add_adapter(model, spec.model, trained=False)
    assert adapter is not None
    check_fusion(engine=engine)
    check_targets(adapter.layers)
    beside = []
    for stage in stages:
        stage.requires_grad_(False)
        for layer in stage.decoder.layers:
            for name, lows in low_parts(shapes, layer.layer_number - 1, adapter.spec.rank, adapter.layers):
                linear = layer.get_submodule(name)
                low = LowRank(linear, lows, adapter.spec.scale, device).requires_grad_(spec.optim is not None)
                low.attach(linear)
                beside.append(low)
        if stage.pre_process and spec.optim is not None and stage.config.recompute_granularity == "full":
            # A layer that is computed again has a gradient only if its input has one; frozen embeddings have none.
            stage.embedding.register_forward_hook(_require_gradient)
    return SplitAdapter(model, adapter, beside)


def _held_by(low: LowRank) -> Iterator[Held]:
    for at, parts in enumerate(low.lows):
        yield Held(getattr(low, f"a{at}"), [parts.a])
        if parts.b is not None:
            yield Held(getattr(low, f"b{at}"), [parts.b])


def _require_gradient(module: Any, inputs: object, found: Tensor) -> Tensor:
    return found.requires_grad_() if torch.is_grad_enabled() else found
