"""The model loader under which vLLM builds its models here: weights stay where they can be rewritten and read back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rlsdk.kit.tracing import Piece, trace_loaders
from rlsdk_vllm.replacing import replaced

LOAD_FORMAT = "rlsdk"
CPU_DISPATCH = "dispatch_cpu_unquantized_gemm"
"""vLLM's function that chooses how a linear layer computes on a CPU."""
PIECES = "rlsdk_pieces"
"""Attribute of a loaded model: canonical name -> its pieces."""


@register_model_loader(LOAD_FORMAT)
class TracedModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Learns where each canonical tensor lies, then loads the checkpoint, or nothing when an update is to bring it.

    `model_loader_extra_config` holds `shapes` (canonical name -> shape) and `load` (whether to read the checkpoint).
    """

    def download_model(self, model_config: Any) -> None:
        self._from_files().download_model(model_config)

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        with replaced(CPU_DISPATCH, plain_linear, layer_utils, vocab_parallel_embedding):
            model: nn.Module = super().load_model(*args, **kwargs)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        plan = self.load_config.model_loader_extra_config
        setattr(model, PIECES, trace_loaders(model.load_weights, plan["shapes"]))
        if plan["load"]:
            self._from_files().load_weights(model, model_config)

    def _from_files(self) -> DefaultModelLoader:
        return DefaultModelLoader(
            dataclasses.replace(self.load_config, load_format="safetensors", model_loader_extra_config={})
        )


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """Stands in for vLLM's choice of a CPU kernel, which repacks weights into memory that nobody else can see."""
    layer.cpu_linear = torch.nn.functional.linear


def served_pieces(model: nn.Module) -> dict[str, list[Piece]]:
    """The pieces of a model that is ready to serve."""
    pieces: dict[str, list[Piece]] = getattr(model, PIECES)
    return pieces


def faults(model: nn.Module) -> list[str]:
    """Why the pieces are not all of what is served: parameters that the engine repacked or that no canonical tensor
    reaches. A tensor of which this worker holds nothing may be another's: who asks all workers looks for that."""
    pieces = served_pieces(model)
    found: list[str] = []
    reached = {piece.memory.untyped_storage().data_ptr() for parts in pieces.values() for piece in parts}
    live: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        live[parameter.untyped_storage().data_ptr()] = name
        if parameter.numel() and parameter.untyped_storage().data_ptr() not in reached:
            found.append(f"parameter {name!r} of the engine is reached by no canonical tensor, or was repacked")
    for name, parts in pieces.items():
        if any(piece.memory.untyped_storage().data_ptr() not in live for piece in parts):
            found.append(f"the engine repacked canonical tensor {name!r} after loading it")
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear:
            found.append(f"layer {name!r} computes from a packed copy of its weights")
    return found
