"""The runs that the pictures show: real configurations, planned as `rlsdk plan` plans them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rlsdk.config import RunConfig, load_config
from rlsdk.interfaces import BackendSpec, RegisterBackend, hookimpl
from rlsdk.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("fsdp", "megatron", "vllm")
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
"""As in its `config.json` on the hub."""


class _WithoutEngine:
    """A plugin of this repository whose engine need not be installed: a plan asks it for layouts and bytes only."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    @hookimpl
    def rlsdk_register_backends(self, register: RegisterBackend) -> None:
        def registered(spec: BackendSpec) -> None:
            register(replace(spec, engine_requires={}))

        self._plugin.rlsdk_register_backends(registered)


def planning_registry() -> Registry:
    """The built-in backends, and those of this repository."""
    registry = Registry.discover({"RLSDK_DISABLE_PLUGINS": ",".join(PLUGINS)})
    for name in PLUGINS:
        source = str(ROOT / "plugins" / name / "src")
        if source not in sys.path:
            sys.path.append(source)
        registry.register_module(_WithoutEngine(import_module(f"rlsdk_{name}.plugin")))
    return registry


@contextmanager
def config_of(values: dict[str, Any], registry: Registry) -> Iterator[RunConfig]:
    """The configuration of a run of a model of eight billion parameters, of which only the shape is there. `MODEL` in
    the values stands for its folder."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_8B))
        given = {
            "model": {"path": folder, "dtype": "bfloat16"},
            "data": {"train": "gsm8k.jsonl"},
            "rewards": ["gsm8k"],
            **json.loads(json.dumps(values).replace("MODEL", folder)),
        }
        yield load_config(values=given, registry=registry)
