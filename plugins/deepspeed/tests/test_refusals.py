"""What cannot be built says what was asked, what is the case, and what would do; what was built leaves nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from typing import Any

import psutil
import pytest
from jobs import Case, error_of, refused

from rlsdk.interfaces import AdapterSpec, ConfigError, Head, RankContext
from rlsdk_deepspeed.config import DeepSpeedOptions
from rlsdk_deepspeed.engine import DeepSpeedTrainEngine


def test_what_cannot_be_built_is_a_config_error_on_every_rank(models: Any, world: Any) -> None:
    good = Case(models["plain"]).spec
    wrong: dict[str, Any] = {
        "'reduce_bucket_sice'; did you mean 'reduce_bucket_size'?": {"engine_kwargs": {"reduce_bucket_sice": 1}},
        "passes them to DeepSpeed's": {"engine_kwargs": {"stage": 1}},
        "TrainSpec.options is a dict": {"options": {"zero_stage": 1}},
        "expected one of them": {"micro_batch_tokens": 2},
        "float16 gradients underflow": {"model": replace(good.model, dtype="float16")},
        "zero_stage: 4; expected 1, 2 or 3": {"options": DeepSpeedOptions(zero_stage=4)},  # type: ignore[arg-type]
        "a model with a value head trains its new head": {
            "model": replace(good.model, head=Head.VALUE, adapter=AdapterSpec(rank=2))
        },
        "model.lora.targets 'q_pro'": {"model": replace(good.model, adapter=AdapterSpec(rank=2, targets=("q_pro",)))},
        "use train.deepspeed.zero_stage 3": {"options": DeepSpeedOptions(zero_stage=2, offload_param=True)},
    }
    for told, changes in wrong.items():
        for error in world(2).run(refused, replace(good, **changes)):
            assert isinstance(error, ConfigError), (told, error)
            assert told in str(error)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_and_port_are_free_when_close_returns(stage: int, models: Any) -> None:
    def listening() -> set[int]:
        connections = psutil.Process().net_connections(kind="tcp")
        return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    before = listening()
    gc.collect()
    gc.disable()
    try:
        engine = DeepSpeedTrainEngine()
        engine.initialize(RankContext(role="actor"), Case(models["plain"], DeepSpeedOptions(zero_stage=stage)).spec)
        model = weakref.ref(engine.model)
        opened = listening() - before
        engine.close()
        engine.close()
        assert opened
        assert (model(), listening() & opened) == (None, set())
    finally:
        gc.enable()


def test_an_engine_that_never_started_can_be_closed() -> None:
    assert error_of(DeepSpeedTrainEngine().close) is None


def test_the_entry_module_and_options_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rlsdk_deepspeed.plugin, rlsdk_deepspeed.config; "
        "sys.exit(bool({'torch', 'ray', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
