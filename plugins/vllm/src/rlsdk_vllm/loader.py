"""The plugin's model loader for vLLM: it keeps weights where they can be overwritten and read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from rlsdk.interfaces import Box, WeightSyncError, fingerprint
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk.kit.weights.weight_tracing import Piece, trace_loaders
from rlsdk_vllm.patching import patched

LOAD_FORMAT = "rlsdk"
CPU_DISPATCH = "dispatch_cpu_unquantized_gemm"
"""vLLM's function that chooses the CPU kernel of a linear layer."""
CPU_PACKING = "cpu_prepack_moe_weight"
"""vLLM's function that packs the weights of experts for its CPU kernel."""
PIECES = "rlsdk_pieces"
"""Attribute of a loaded model: canonical name -> its pieces."""
PACKED = "rlsdk_packed"
"""Attribute of a loaded model: its `Packed`."""


@register_model_loader(LOAD_FORMAT)
class TracedModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Finds where each canonical tensor is stored, then loads the checkpoint, or nothing if an update brings weights.

    `model_loader_extra_config` holds `shapes` (canonical name -> shape), `sources` (the tensors that files have
    instead; None: the canonical ones) and `load` (whether to read the checkpoint).
    """

    def download_model(self, model_config: Any) -> None:
        self._from_files().download_model(model_config)

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        packed: list[Packed] = []
        with patched(CPU_DISPATCH, plain_linear, layer_utils, vocab_parallel_embedding), recorded_packing(packed):
            model: nn.Module = super().load_model(*args, **kwargs)
        setattr(model, PACKED, packed)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        plan = self.load_config.model_loader_extra_config
        files = None if plan["sources"] is None else [Source.unpacked(values) for values in plan["sources"]]
        setattr(model, PIECES, trace_loaders(model.load_weights, plan["shapes"], files))
        if plan["load"]:
            self._from_files().load_weights(model, model_config)
        else:
            fill_with_noise(model)

    def _from_files(self) -> DefaultModelLoader:
        return DefaultModelLoader(
            dataclasses.replace(self.load_config, load_format="safetensors", model_loader_extra_config={})
        )


class Packed(NamedTuple):
    """Weights of experts on a CPU, and the packed copy that the kernel needs."""

    weights: torch.Tensor
    """Memory into which loaders and updates write."""
    served: torch.Tensor
    """Packed weights that the kernel reads, at fixed addresses."""
    pack: Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def recorded_packing(found: list[Packed]) -> Iterator[None]:
    """In this context, weights that vLLM packs are recorded with their origin."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:  # other versions keep it elsewhere; with them, models with experts are refused
        yield
        return
    original = vars(cpu_moe).get(CPU_PACKING)

    def record(weights: torch.Tensor, isa: str) -> torch.Tensor:
        assert original is not None
        served: torch.Tensor = original(weights, isa)
        found.append(Packed(weights.detach(), served, lambda values: original(values, isa)))
        return served

    with patched(CPU_PACKING, record, cpu_moe):
        yield


@torch.no_grad()
def fill_with_noise(model: nn.Module) -> None:
    """Fills every parameter and buffer with small random values. vLLM profiles and captures graphs before an update
    brings weights, and uninitialised memory may contain NaN: an expert router would send tokens to no expert, or out
    of bounds."""
    for tensor in model.state_dict().values():
        initialize_single_dummy_weight(tensor)


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """Replaces vLLM's choice of a CPU kernel, which would repack weights into memory that nothing else can access."""
    layer.cpu_linear = torch.nn.functional.linear


def served_pieces(model: nn.Module) -> dict[str, list[Piece]]:
    """The pieces of a model that is ready to serve."""
    pieces: dict[str, list[Piece]] = getattr(model, PIECES)
    return pieces


def packed_experts(model: nn.Module) -> list[Packed]:
    """Experts whose weights are covered by the pieces."""
    reached = _storages(served_pieces(model))
    packed: list[Packed] = getattr(model, PACKED, [])
    return [one for one in packed if _storage(one.weights) in reached]


def derived(model: nn.Module) -> dict[str, Any]:
    """Attention layers that compute with tensors derived from weights, by name: latent attention multiplies with the
    two halves of `kv_b_proj`, transposed. No loader updates those; `rebuild` recomputes them."""
    reached = _storages(served_pieces(model))
    return {
        name: module
        for name, module in model.named_modules()
        if is_deferred_attention_layer(module) and any(_storage(p) not in reached for p in _own(module))
    }


@torch.no_grad()
def rebuild(model: nn.Module, dtype: torch.dtype) -> None:
    """Recomputes derived tensors from the current weights, in place, as captured graphs read them.

    Raises:
        WeightSyncError: vLLM put them somewhere else.
    """
    for packed in packed_experts(model):
        packed.served.copy_(packed.pack(packed.weights))
    for name, module in derived(model).items():
        before = [parameter.data_ptr() for parameter in _own(module)]
        module.process_weights_after_loading(dtype)
        if [parameter.data_ptr() for parameter in _own(module)] != before:
            raise WeightSyncError(
                f"layer {name!r}: vLLM moved the tensors that it derives from weights during an update, and captured "
                "graphs would read the old ones; give rollout.vllm.enforce_eager true"
            )


@torch.no_grad()
def check(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises `WeightSyncError` if a derived tensor did not match the served weights; it is recomputed."""
    for packed in packed_experts(model):
        if _fingerprint(packed.served) != _fingerprint(packed.pack(packed.weights)):
            raise WeightSyncError("the packed experts that vLLM computes with do not match the served weights")
    for name, module in derived(model).items():
        before = list(map(_fingerprint, _own(module)))
        module.process_weights_after_loading(dtype)
        if list(map(_fingerprint, _own(module))) != before:
            raise WeightSyncError(f"layer {name!r}: tensors that vLLM derives do not match the served weights")


def faults(model: nn.Module) -> list[str]:
    """Reasons why the pieces are not everything that is served: parameters that the engine repacked, or that no
    canonical tensor maps to, except those that `rebuild` recomputes. Another worker may hold a tensor of which this one
    has nothing: the caller checks that over all workers."""
    pieces = served_pieces(model)
    reached = _storages(pieces) | {_storage(p) for module in derived(model).values() for p in _own(module)}
    found: list[str] = []
    packed = packed_experts(model)
    reached |= {_storage(one.served) for one in packed}
    live = {_storage(tensor) for tensor in [*(one.weights for one in packed), *model.buffers()]}
    for name, parameter in model.named_parameters():
        live.add(_storage(parameter))
        if parameter.numel() and _storage(parameter) not in reached:
            found.append(f"no canonical tensor maps to the engine's parameter {name!r}, or it was repacked")
    for name, parts in pieces.items():
        if any(_storage(piece.memory) not in live for piece in parts):
            found.append(f"the engine repacked canonical tensor {name!r} after loading it")
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear:
            found.append(f"layer {name!r} computes from a packed copy of its weights")
    return found


def _fingerprint(tensor: torch.Tensor) -> int:
    return fingerprint(tensor, Box.whole(tuple(tensor.shape)))


def _storages(pieces: dict[str, list[Piece]]) -> set[int]:
    return {_storage(piece.memory) for parts in pieces.values() for piece in parts}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Tensors of a module without those of its submodules."""
    return [parameter for parameter in module.parameters(recurse=False) if parameter.numel()]
