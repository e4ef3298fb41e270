"""Adapters of SGLang: what they are named, and what a scheduler's slots hold of them. Tested: 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlsdk.interfaces import AdapterSpec, Box, ConfigError, ModelSpec, RolloutSpec, fingerprint
from rlsdk.kit.generation.serving import count_adapter_slots
from rlsdk.kit.model.adapters import adapter_shapes
from rlsdk.kit.model.hf import build_model, load_model_config
from rlsdk.kit.weights.weight_updates import Fingerprints
from rlsdk_sglang.config import SglangOptions

FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", ("q_proj", "k_proj", "v_proj"))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", ("gate_proj", "up_proj"))),
    **{name: (name, (name,)) for name in ("o_proj", "down_proj")},
}
"""Last part of a module's name -> SGLang's name of the layer, and the modules that it joins, in order."""
BY_INPUT = ("o_proj", "down_proj")
"""Modules whose inputs are split over devices; of the others the outputs are."""
NEEDED = {"k_proj": ("q_proj", "v_proj"), "q_proj": ("v_proj",), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)}
"""Modules without whose adapter SGLang drops the one of another in silence, or fails."""
LAYER = re.compile(r"^model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)$")


def name_of(number: int | None) -> str | None:
    """A new name for every version, as a name that exists cannot be loaded again. None: the model alone."""
    return None if number is None else f"rlsdk-{number}"


def adapter_slots(spec: RolloutSpec, options: SglangOptions) -> int:
    """Adapters that have memory. Raises `ConfigError` if these are too few."""
    return count_adapter_slots(spec, options.max_adapters, "rollout.sglang.max_adapters")


def adapter_modules(model: ModelSpec) -> list[str]:
    """Names of the modules that have an adapter."""
    assert model.adapter is not None
    return sorted({n.rpartition(".lora_")[0] for n in adapter_shapes(build_model(model, empty=True), model.adapter)})


def lora_arguments(spec: AdapterSpec, modules: Sequence[str], max_adapters: int, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of SGLang for this adapter."""
    arguments = {
        "enable_lora": True,
        "max_lora_rank": spec.rank,
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        # One more for the model without an adapter, which a probe reads.
        "max_loras_per_batch": max_adapters + 1,
    }
    return {**arguments, "lora_backend": "torch_native"} if on_cpu else arguments


def check_adapter(spec: RolloutSpec, options: SglangOptions, modules: Sequence[str]) -> None:
    """Checks that SGLang computes with an adapter of these modules.

    Raises:
        ConfigError: it would ignore one, or this form of the engine takes none.
    """
    hint = "give model.lora.sync merged"
    if options.url is not None:
        raise ConfigError(f"rollout.sglang.url: a server takes no adapters that are sent alone; {hint}")
    groups = load_model_config(spec.model).get_text_config().num_key_value_heads
    if spec.num_devices != spec.tp_size or groups % spec.tp_size:
        raise ConfigError(
            f"rollout: of several devices, SGLang takes adapters that are sent alone where rollout.tp_size is "
            f"all of them and divides the {groups} key-value heads; {hint}"
        )
    for module in modules:
        found = LAYER.match(module)
        if found is None or found[2] not in FUSED:
            raise ConfigError(
                f"model.lora.targets: SGLang computes adapters of {sorted(FUSED)} alone, and not of {module!r}; leave "
                f"it out, or {hint}"
            )
        beside = module.removesuffix(found[2])
        if lacking := [one for one in NEEDED.get(found[2], ()) if f"{beside}{one}" not in modules]:
            raise ConfigError(
                f"model.lora.targets: SGLang takes an adapter of {found[2]!r} only beside one of {lacking}; name "
                f"them, too, or {hint}"
            )


def peft_config(spec: AdapterSpec, modules: Sequence[str]) -> dict[str, Any]:
    """The adapter's configuration as PEFT writes it. SGLang's scale is alpha / rank whatever `use_rslora` says, so that
    alpha is given to fit."""
    return {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.scale * spec.rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
    }


def held(manager: Any, name: str, spec: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Fingerprints:
    """Fingerprints of the tensors of an adapter, over the slot that a scheduler computes with.

    Args:
        manager: SGLang's, of a scheduler's adapters.
        name: of the adapter.
        spec: its `rank` and `scale`.
        shapes: of its tensors, by canonical name.
    """
    (uid,) = [uid for uid, ref in manager.lora_refs.items() if ref.lora_name == name]
    if uid not in manager.memory_pool.uid_to_buffer_id:
        manager.fetch_new_loras({uid})
    if abs(manager.loras[uid].scaling - spec["scale"]) > 1e-6 * spec["scale"]:
        return {}
    pool, found = manager.memory_pool, dict[str, list[tuple[Sequence[int], Sequence[int], int]]]()
    slot, rank, size, mine = pool.get_buffer_id(uid), spec["rank"], pool.tp_size, pool.tp_rank
    for module in sorted({tensor.rpartition(".lora_")[0] for tensor in shapes}):
        matched = LAYER.match(module)
        assert matched is not None
        layer, (fused, parts) = int(matched[1]), FUSED[matched[2]]
        if module.rpartition(".")[2] not in parts or fused not in pool.A_buffer:
            continue
        at = parts.index(matched[2])
        low = [_rows(shapes, module.removesuffix(matched[2]), part) for part in parts[:at]]
        # Columns of A are split where the layer's inputs are, rows of B where its outputs are.
        (_, columns), (rows, _) = (shapes[f"{module}.lora_{kind}.weight"] for kind in "AB")
        by_input = matched[2] in BY_INPUT
        columns, rows = (columns // size, rows) if by_input else (columns, rows // size)
        first = sum(low) // (1 if by_input else size)
        a: Tensor = pool.A_buffer[fused][layer][slot, at * rank : (at + 1) * rank]
        b: Tensor = pool.B_buffer[fused][layer][slot, first : first + rows, :rank]
        box_a = Box((0, mine * columns if by_input else 0), (rank, columns))
        box_b = Box((0 if by_input else mine * rows, 0), (rows, rank))
        for kind, values, box in (("A", a, box_a), ("B", b, box_b)):
            if tuple(values.shape) == box.size:
                found[f"{module}.lora_{kind}.weight"] = [(box.offset, box.size, fingerprint(values.contiguous(), box))]
    return found


def _rows(shapes: Mapping[str, Sequence[int]], beside: str, part: str) -> int:
    """Rows of B of a module, or of those that SGLang puts in its place: keys have as many as values."""
    own = shapes.get(f"{beside}{part}.lora_B.weight") or shapes[f"{beside}v_proj.lora_B.weight"]
    return own[0]
