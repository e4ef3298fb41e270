"""An adapter that is split like the weights beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Box, TrainSpec, fingerprint
from rlsdk.kit.model.adapter_files import initial_values
from rlsdk.kit.model.adapters import KeptReference, ModelAdapter, add_adapter, merged
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.sharded_adapter import RankAdapter
from rlsdk_megatron.adapter_parts import check_fusion, check_targets, low_parts
from rlsdk_megatron.checkpoint import Gathering, owned
from rlsdk_megatron.low_rank import LowRank, Switch
from rlsdk_megatron.parts import Held, Part, Shapes, all_parts


class SplitAdapter(RankAdapter):
    """One rank's part of an adapter, float32. With it the rank adds the adapter to its own boxes of a weight without
    communication."""

    def __init__(
        self, model: Any, adapter: ModelAdapter, beside: Sequence[LowRank], base: Sequence[Held], shapes: Shapes
    ) -> None:
        """`split_adapter` makes it.

        Args:
            model: the transformers model on the meta device, with the adapter.
            adapter: of it: names, shapes and files; its tensors have no values.
            beside: the modules of this rank that compute with it.
            base: the frozen weights of this rank.
            shapes: the split.
        """
        self.model, self.adapter, self.base, self.base_shapes = model, adapter, base, shapes.shapes
        self.shapes = {name: tuple(parameter.shape) for name, parameter in adapter.parameters.items()}
        self.held: list[Held] = [one for low in beside for one in _held_by(low)]
        self._places: dict[str, tuple[Box, Tensor]] = {
            part.name: (part.box, one.parameter) for one in self.held for part in one.parts
        }
        self.reference = KeptReference(Switch(beside), {name: tensor for name, (_, tensor) in self._places.items()})

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

    def adapted(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part, parameter in all_parts(self.base):
            if self.adapter.module_of(part.name) is not None:
                yield part.view(parameter), self.merged(part, parameter)

    def gather(self) -> dict[str, Tensor | None]:
        gathering = Gathering(self.held, self.shapes)
        return {name: gathering.fetch(name, 0, torch.float32) for name in self.shapes}

    def base_sums(self) -> dict[str, int]:
        mine, sums = owned(self.base, self.base_shapes), dict.fromkeys(self.base_shapes, 0)
        for part, parameter in all_parts(self.base):
            if (part.name, part.box) in mine:
                sums[part.name] += fingerprint(part.view(parameter), part.box)
        return sums


def split_adapter(
    spec: TrainSpec, stages: Sequence[Any], held: Sequence[Held], shapes: Shapes, device: torch.device, *, engine: bool
) -> SplitAdapter | None:
    """Puts the adapter of `spec` beside the linear layers of this rank's stages and freezes everything else; None if
    there is none.

    Args:
        spec: names the adapter; without an optimizer it is frozen.
        stages: not yet wrapped for training.
        held: their weights.
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
    return SplitAdapter(model, adapter, beside, held, shapes)


def _held_by(low: LowRank) -> Iterator[Held]:
    for at, parts in enumerate(low.lows):
        yield Held(getattr(low, f"a{at}"), [parts.a])
        if parts.b is not None:
            yield Held(getattr(low, f"b{at}"), [parts.b])


def _require_gradient(module: Any, inputs: object, found: Tensor) -> Tensor:
    return found.requires_grad_() if torch.is_grad_enabled() else found
