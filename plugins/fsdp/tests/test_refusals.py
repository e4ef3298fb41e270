"""What cannot be built or run says what was asked, what is the case, and what would do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from comparing import good

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, ChecksPlace, ConfigError, RankContext
from rlsdk_fsdp.config import FsdpOptions
from rlsdk_fsdp.wrapping import check_sizes


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("kwargs", "'reshard_after_fwd'; did you mean 'reshard_after_forward'?"),
        ("options", "TrainSpec.options is a dict"),
        ("limits", "expected one of them"),
        ("float16", "float16 gradients underflow"),
        ("weights", "found neither model.safetensors nor model.safetensors.index.json"),
        ("shapes", "config.json makes it (320, 128)"),
    ],
)
def test_what_cannot_be_built_is_a_config_error(what: str, told: str, results: Any) -> None:
    for rank in good(results[2, "refused"]):
        assert isinstance(rank[what], ConfigError)
        assert told in str(rank[what])


def test_copies_that_do_not_divide_are_refused_with_the_arithmetic(results: Any) -> None:
    error = results[2, "uneven copies"][0]["error"]
    assert isinstance(error, ConfigError)
    assert "replicate_size: 3 does not divide the 2 ranks" in str(error)
    with pytest.raises(ConfigError, match=r"6 = 1 x 4 \+ 2\); expected one of \[1, 2, 3, 6\]"):
        check_sizes(RankContext(role="actor", world_size=6), FsdpOptions(replicate_size=4))
    with pytest.raises(ConfigError, match="below 1"):
        check_sizes(RankContext(role="actor", world_size=6), FsdpOptions(replicate_size=0))


def test_rows_that_cannot_be_split_are_refused_before_a_device_is_taken(results: Any) -> None:
    def told(ranks: int, model: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
        return list(FsdpOptions(**options).place_problems(num_ranks=ranks, device="cuda", model=model))

    assert isinstance(FsdpOptions(), ChecksPlace)
    assert told(8, {"num_attention_heads": 6}) == told(8, {"num_attention_heads": 8}, context_parallel=4) == []
    assert told(6, {}, context_parallel=4) == [
        ("context_parallel", "4 does not divide the 6 ranks (6 = 1 x 4 + 2); expected one of [1, 2, 3, 6]")
    ]
    assert told(4, {"num_attention_heads": 6}, context_parallel=4) == [
        ("context_parallel", "4 does not divide the model's 6 attention heads; expected one of [1, 2, 3, 6]")
    ]
    assert told(4, {}, context_parallel=2, packing="never") == [
        ("packing", "'never', and context_parallel 2 splits packed rows; expected 'auto' or 'always'")
    ]
    error = results[2, "not packed"][0]["error"]
    assert isinstance(error, ConfigError)
    assert "train.fsdp.packing: 'never'" in str(error)


def test_a_frozen_model_is_held_in_its_own_type_and_only_runs_forward(results: Any) -> None:
    for rank, trained in zip(good(results[2, "frozen"]), good(results[2, "bfloat16"]), strict=True):
        assert rank["dtypes"] == {"bfloat16"}
        assert isinstance(rank["train"], ConfigError)
        assert isinstance(rank["reset"], ConfigError)
        assert "built without an OptimSpec" in str(rank["train"])
        assert (rank["before"] - trained["before"]).abs().max() < 1e-5


def test_a_new_optimizer_starts_its_schedule_and_moments_afresh(results: Any) -> None:
    for rank in good(results[2, "reset"]):
        assert rank["kept"]
        assert rank["state"] == 0
        assert rank["lr"] == pytest.approx(1e-2 / 4)


def test_engine_kwargs_reach_fully_shard(results: Any) -> None:
    for rank in good(results[2, "kwargs"]):
        assert all(rank)


def test_the_entry_module_and_options_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rlsdk_fsdp.plugin, rlsdk_fsdp.config; "
        "sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_plugin_registers_one_backend_whose_engine_and_options_exist() -> None:
    import importlib

    from rlsdk_fsdp.plugin import rlsdk_register_backends

    found: list[BackendSpec] = []
    rlsdk_register_backends(register=found.append)
    (spec,) = found
    assert (spec.name, spec.kind) == ("fsdp", BackendKind.TRAIN)
    for path in (spec.engine, spec.options or ""):
        module, _, name = path.partition(":")
        assert getattr(importlib.import_module(module), name)
    assert Capability.RESHARD_ON_LOAD in spec.capabilities
    assert len(fields(FsdpOptions)) == 8
