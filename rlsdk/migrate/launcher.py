"""The file of `accelerate launch --config_file`: which engine shards the model, over how many processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.config.loading.yaml_text import read_yaml
from rlsdk.interfaces import BackendKind
from rlsdk.migrate.common import SHARDED
from rlsdk.migrate.draft import Draft, Fate, Setting
from rlsdk.registry import FIRST_PARTY

FILE = "accelerate.config_file"
"""Setting that names the file."""
OPTIONS: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    "deepspeed_config.zero_stage": ("train.deepspeed.zero_stage", {1: 1, 2: 2, 3: 3}),
    "deepspeed_config.offload_optimizer_device": ("train.deepspeed.offload_optimizer", {"none": False, "cpu": True}),
    "deepspeed_config.offload_param_device": ("train.deepspeed.offload_param", {"none": False, "cpu": True}),
    "fsdp_config.fsdp_offload_params": ("train.fsdp.cpu_offload", {False: False, True: True}),
    "fsdp_config.fsdp_reshard_after_forward": ("train.fsdp.reshard_after_forward", {False: False, True: True}),
}
"""Name in the file -> option of the backend of that name, and the values that both have."""
SPLITS_ROWS = ("parallelism_config.parallelism_config_cp_size", "parallelism_config.parallelism_config_sp_size")
"""Devices that split a row: by a ring, and by heads."""
SPLITS = ("cp_size", "sp_size", "tp_size", "dp_replicate_size")
"""Ends of names for sizes that split a row or a model, or keep several copies of it."""


def launcher_file(settings: Mapping[str, Setting], source: str) -> Mapping[str, Any]:
    """What the launcher's file holds, with dotted names; empty if none is named, or it is not beside the script or
    above it."""
    if FILE not in settings:
        return {}
    named = Path(str(settings[FILE].value))
    for folder in (Path(), *Path(source).resolve().parents):
        if (folder / named).is_file():
            tree, _ = read_yaml((folder / named).read_text(encoding="utf-8", errors="replace"), str(named))
            return _dotted(tree) if isinstance(tree, dict) else {}
    return {}


def _dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    for section, inner in tree.items():
        if isinstance(inner, dict):
            found |= {f"{section}.{key}": value for key, value in inner.items()}
    return found


def put_launcher(draft: Draft) -> None:
    """The train backend of the launcher's file, with its options."""
    held = draft.script.launch
    if not held:
        if FILE in draft.script.settings:
            why = "not in this folder, beside the script or above it, so its processes are not known; give --devices N"
            draft.row(Fate.REFUSED, FILE, why)
        return
    engine = str(held.get("distributed_type", "")).lower()
    shards = engine in FIRST_PARTY[BackendKind.TRAIN]
    if not shards and engine not in ("no", "multi_gpu"):
        return
    split = [name for name, value in held.items() if name.endswith(SPLITS) and isinstance(value, int) and value > 1]
    rows = [name for name in split if name in SPLITS_ROWS and engine == SHARDED]
    if len(rows) == 1:
        split.remove(rows[0])
    options = {name: held[name] for name, (path, _) in OPTIONS.items() if name in held and f".{engine}." in path}
    odd = [name for name, value in options.items() if value not in OPTIONS[name][1]]
    for name in (*split, *odd):
        draft.row(Fate.REFUSED, FILE, f"{name} {held[name]} has no counterpart here; see `rlsdk plugins info {engine}`")
    if split or odd:
        return
    why = f"its {held.get('num_processes', 1)} processes, and what shards the model; kernels are the backend's choice"
    fields = ["train.backend"] if shards else []
    if shards:
        draft.put("train.backend", engine, note=f"{draft.script.peer}: distributed_type of {draft.value(FILE)}")
    if len(rows) == 1:
        path, why = f"train.{engine}.context_parallel", f"{why}; rows are split over devices by a ring"
        draft.put(path, held[rows[0]], note=f"{draft.script.peer}: {rows[0].rpartition('.')[2]} of the launcher's file")
        fields.append(path)
    for name, value in options.items():
        path, values = OPTIONS[name]
        draft.put(path, values[value], note=f"{draft.script.peer}: {name} of the launcher's file")
        fields.append(path)
    draft.row(Fate.OTHERWISE, FILE, why, fields)
