"""What the plugin says of itself is what the engine does; its light modules stay light; bad settings are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cases import make_engine

from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    Capability,
    ConfigError,
    Head,
    ModelSpec,
    RankContext,
    RolloutEngine,
    RolloutSpec,
)
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.engine import SglangRolloutEngine, check_spec
from rlsdk_sglang.launch import engine_arguments

METHODS = {
    Capability.ABORT: ("abort",),
    Capability.SLEEP: ("sleep", "wake"),
    Capability.PARTIAL_ROLLOUT: ("pause", "resume"),
}


@pytest.fixture(scope="module")
def spec() -> BackendSpec:
    from rlsdk.registry import Registry

    return Registry.discover().backend(BackendKind.ROLLOUT, "sglang")


def test_a_claimed_ability_is_a_method_that_the_engine_has_itself(spec: BackendSpec) -> None:
    for capability, names in METHODS.items():
        own = [name for name in names if getattr(SglangRolloutEngine, name) is not getattr(RolloutEngine, name)]
        assert own == (list(names) if capability in spec.capabilities else []), capability


def test_every_option_has_a_meaning_that_can_be_shown(spec: BackendSpec) -> None:
    assert spec.options == "rlsdk_sglang.config:SglangOptions"
    source = Path(sys.modules[SglangOptions.__module__].__file__ or "").read_text()
    for option in fields(SglangOptions):
        _, _, after = source.partition(f"    {option.name}: ")
        assert after.split("\n")[1].lstrip().startswith('"""'), option.name


def test_the_entry_module_and_the_options_import_neither_sglang_nor_torch() -> None:
    program = (
        "import sys, rlsdk_sglang.plugin, rlsdk_sglang.config\n"
        "print(sorted({'sglang', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"model": ModelSpec(path="x", head=Head.VALUE)}, "head 'lm', not 'value'"),
        ({"max_running": 0}, "max_running 0: expected 1 or more"),
        ({"max_model_tokens": 1}, "max_model_tokens 1: expected 2 or more"),
        ({"options": {"kv_cache_mb": 3}}, "RolloutSpec.options is a dict; expected SglangOptions"),
    ],
)
def test_specs_that_cannot_be_served_are_refused_before_anything_starts(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        check_spec(RolloutSpec(**{"model": ModelSpec(path="x"), **given}))


@pytest.mark.parametrize(
    ("kwargs", "fault"),
    [
        (
            {"max_prefil_tokens": 9},
            "max_prefil_tokens: SGLang's ServerArgs has no such field; did you mean 'max_prefill",
        ),
        ({"load_format": "dummy"}, r"\['load_format'\] belong to the plugin itself"),
    ],
)
def test_arguments_that_sglang_does_not_take_are_refused(qwen2: Path, kwargs: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_engine(qwen2, engine_kwargs=kwargs)


def test_raw_arguments_reach_the_engine(qwen2: Path) -> None:
    spec = RolloutSpec(model=ModelSpec(path=str(qwen2)), engine_kwargs={"chunked_prefill_size": 384})
    arguments = engine_arguments(RankContext(role="rollout"), spec, SglangOptions(stream_interval=3))
    assert (arguments["chunked_prefill_size"], arguments["stream_interval"]) == (384, 3)
