"""Linear layers with float8 weights and block scales, computed with the dequantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlsdk.interfaces import BlockScales, Box, ConfigError, RolloutSpec, TensorMeta
from rlsdk.kit.weights.block_scales import (
    DTYPE_NAME,
    SCALES_SUFFIX,
    BlockQuantizer,
    block_maxima,
    dequantize,
    quantize,
    scales_of,
)
from rlsdk.reference.options import TransformersOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTERS = ("gate", "router")
"""Expert routers: their few weights matter too much to be quantized."""


class BlockLinear(nn.Linear):
    """As `nn.Linear`; `weight` is float8, and `weight_scale_inv` has a scale for each of its blocks."""

    weight_scale_inv: nn.Parameter
    block: tuple[int, int]
    computed_as: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        weight = dequantize(self.weight, self.weight_scale_inv, self.block, self.computed_as)
        return nn.functional.linear(input, weight, self.bias)


def block_scales(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], spec: RolloutSpec
) -> dict[str, BlockScales]:
    """Canonical name -> scales, of the weights that the backend `transformers` quantizes under these options.

    Args:
        model: its parameters may be empty.
        shapes: of the canonical tensors.
        spec: its options may be None.

    Raises:
        ConfigError: the block size is invalid, or the model has nothing to quantize.
    """
    options = spec.options if isinstance(spec.options, TransformersOptions) else TransformersOptions()
    if options.weights == "model":
        return {}
    size = options.block_size
    if size < 1:
        raise ConfigError(f"rollout.transformers.block_size is {size}: expected 1 or more; 128 is what engines use")
    output = model.get_output_embeddings()
    found = {}
    for module, linear in model.named_modules():
        name = f"{module}.weight"
        quantized = type(linear) is nn.Linear and linear is not output and name in shapes
        if quantized and module.rpartition(".")[2] not in ROUTERS:
            scales = f"{name}{SCALES_SUFFIX}"
            found[name] = BlockScales(name=scales, block=(size, size), taken_as=spec.model.dtype)
    if not found:
        raise ConfigError(
            f"rollout.transformers.weights is 'fp8_block', but {type(model).__name__} has no linear layers of its own "
            "to quantize; choose 'model'"
        )
    return found


@torch.no_grad()
def quantize_linears(model: nn.Module, scales: Mapping[str, BlockScales]) -> None:
    """Makes `BlockLinear` of the modules whose weights have scales, one at a time."""
    for name, said in scales.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, nn.Linear)
        weight = module.weight.detach()
        whole, block = Box.whole(tuple(weight.shape)), (said.block[0], said.block[1])
        found = scales_of(block_maxima(weight, whole, block))
        module.weight = nn.Parameter(quantize(weight, found, whole, block), requires_grad=False)
        module.__class__ = BlockLinear
        assert isinstance(module, BlockLinear)
        module.weight_scale_inv = nn.Parameter(found, requires_grad=False)
        module.block, module.computed_as = block, weight.dtype


def quantizers(parameters: Mapping[str, Tensor], scales: Mapping[str, BlockScales]) -> dict[str, BlockQuantizer]:
    """One for each tensor with scales, for one update."""
    return {
        name: BlockQuantizer(
            TensorMeta(name=name, shape=tuple(parameters[name].shape), dtype=DTYPE_NAME, scales=said),
            parameters[name].detach(),
            parameters[said.name].detach(),
        )
        for name, said in scales.items()
    }
