"""Adapters in vLLM's workers: put in from memory, and read back from the slots that the model computes with.

Tested version: 0.32 (its CPU build).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from rlsdk.interfaces import AdapterSpec, Box, ConfigError, RolloutSpec, fingerprint
from rlsdk.kit.generation.serving import count_adapter_slots
from rlsdk.kit.weights.weight_updates import Fingerprints
from rlsdk_vllm.config import VllmOptions

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes slots."""
PREFIX = "base_model.model."
"""What names in PEFT's files begin with."""


def adapter_slots(spec: RolloutSpec, options: VllmOptions) -> int:
    """Adapters that have memory. Raises `ConfigError` if these are too few."""
    return count_adapter_slots(spec, options.max_adapters, "rollout.vllm.max_adapters")


def lora_arguments(spec: AdapterSpec, max_adapters: int, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM for this adapter.

    Raises:
        ConfigError: vLLM has no slots of this rank.
    """
    if spec.rank > RANKS[-1]:
        raise ConfigError(
            f"model.lora.rank {spec.rank}: vLLM serves ranks up to {RANKS[-1]}; give a lower one, or model.lora.sync "
            "merged"
        )
    # On a CPU a request without an adapter, such as a probe, is computed with the last slot where it shares a pass with
    # others: that one stays empty, as the first free slot is taken and `max_adapters` are never exceeded.
    slots = max_adapters + on_cpu
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= spec.rank),
        "max_loras": slots,
        # vLLM would drop an adapter of a running request in favour of a newer one.
        "max_cpu_loras": slots,
    }


def lora_request(number: int | None) -> Any:
    """What a vLLM request says of its adapter. The name is part of the key of the prefix cache, so that it is new with
    every version; the path is never read, because the adapter is already there."""
    from vllm.lora.request import LoRARequest

    return None if number is None else LoRARequest(f"rlsdk-{number}", number, "memory")


def unbound(manager: Any, modules: Sequence[str]) -> list[str]:
    """Modules for which vLLM accepts an adapter that nothing would compute with."""
    places = _places(manager)
    return [name for name in modules if _served_name(manager, name) not in places]


def put(manager: Any, number: int, values: bytes, spec: Mapping[str, Any], keep: Sequence[int]) -> Fingerprints:
    """Puts an adapter into a free slot, and reads it back.

    Args:
        manager: vLLM's manager of a worker's adapters.
        number: its id, a new one for every version.
        values: A and B by canonical name, whole, as safetensors.
        spec: `rank`, `alpha` and whether `rslora`.
        keep: ids of adapters that stay; all others are dropped.

    Returns:
        Fingerprint of every tensor whose slot holds exactly these values, B multiplied by the scale.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    for known in set(manager.list_adapters()) - set(keep):
        manager.remove_adapter(known)
    dtype = manager.lora_config.lora_dtype
    tensors = {name: tensor.to(dtype) for name, tensor in load(values).items()}
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
    helper = PEFTHelper(r=spec["rank"], lora_alpha=spec["alpha"], target_modules=modules, use_rslora=spec["rslora"])
    model = LoRAModel.from_lora_tensors(
        number,
        {f"{PREFIX}{name}": tensor.clone() for name, tensor in tensors.items()},  # vLLM scales B in place
        helper,
        device="cpu",
        dtype=dtype,
        weights_mapper=_mapper(manager),
    )
    manager.add_adapter(model)
    manager.activate_adapter(number)
    slot = manager.lora_index_to_id.index(number)
    places, found = _places(manager), dict[str, list[tuple[Sequence[int], Sequence[int], int]]]()
    for module in modules:
        place = places.get(_served_name(manager, module))
        a, b = (f"{module}.lora_{kind}.weight" for kind in "AB")
        scaled = tensors[b].clone().mul_(helper.vllm_lora_scaling_factor)
        if place is not None and _is_in_slot(*place, slot, tensors[a], scaled):
            for name in (a, b):
                box = Box.whole(tuple(tensors[name].shape))
                found[name] = [(box.offset, box.size, fingerprint(tensors[name], box))]
    return found


def _is_in_slot(layer: Any, at: int, slot: int, a: Tensor, b: Tensor) -> bool:
    """Whether a layer computes with exactly this worker's part of A and scaled B in one of its slices."""
    if layer.tp_size > 1:
        count = len(layer.lora_a_stacked)
        a, b = _part(layer.slice_lora_a, a, at, count), _part(layer.slice_lora_b, b, at, count)
    held_a, held_b = layer.lora_a_stacked[at][slot, 0], layer.lora_b_stacked[at][slot, 0]
    return all(
        torch.equal(held[: part.shape[0], : part.shape[1]].cpu(), part) and _is_zero_beyond(held, part)
        for held, part in ((held_a, a), (held_b, b))
    )


def _is_zero_beyond(held: Tensor, part: Tensor) -> bool:
    rows, columns = part.shape
    return not bool(held[rows:].any()) and not bool(held[:, columns:].any())


def _part(cut: Any, tensor: Tensor, at: int, count: int) -> Tensor:
    """This worker's part of a tensor that belongs to one of a layer's slices."""
    if count == 1:
        return cut(tensor)  # type: ignore[no-any-return]
    return cut([tensor if one == at else None for one in range(count)])[at]  # type: ignore[no-any-return]


def _places(manager: Any) -> dict[str, tuple[Any, int]]:
    """vLLM's name of each part of a layer -> the layer, and which of its slices it is."""
    found: dict[str, tuple[Any, int]] = {}
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if len(parts) == len(getattr(layer, "lora_a_stacked", ())):
            found |= {part: (layer, at) for at, part in enumerate(parts)}
    return found


def _served_name(manager: Any, module: str) -> str:
    """vLLM's name of a canonical module."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    return str(parse_fine_tuned_lora_name(f"{PREFIX}{module}.lora_A.weight", _mapper(manager))[0])


def _mapper(manager: Any) -> Any:
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
