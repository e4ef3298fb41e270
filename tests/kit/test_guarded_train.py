"""What a train engine may be asked, held once for all engines: around the reference engine, which refuses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, ModelSpec, OptimSpec, RankContext, RlsdkError, TrainEngine, TrainSpec
from rlsdk.kit.guards.guarded_train import GuardedTrainEngine
from rlsdk.kit.ranks import progress
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.models import random_batch, write_tiny_model
from rlsdk.testing.train.cases import Weighted

BATCH = random_batch(2, seed=0)
ASK: dict[str, Callable[[TrainEngine, Path], Any]] = {
    "forward": lambda engine, path: engine.forward(BATCH, ("log_probs",)),
    "forward_backward": lambda engine, path: engine.forward_backward(BATCH, Weighted()),
    "optim_step": lambda engine, path: engine.optim_step(),
    "shards": lambda engine, path: list(engine.shards()),
    "save_checkpoint": lambda engine, path: engine.save_checkpoint(path),
    "save_pretrained": lambda engine, path: engine.save_pretrained(path),
    "reset_optimizer": lambda engine, path: engine.reset_optimizer(OptimSpec()),
}
NEEDS = {
    "forward": {"weights"},
    "forward_backward": {"weights", "gradients"},
    "optim_step": {"weights", "gradients", "optimizer"},
    "shards": {"weights"},
    "save_checkpoint": {"weights", "optimizer"},
    "save_pretrained": {"weights"},
    "reset_optimizer": {"weights", "gradients", "optimizer"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def make(folder: Path, optim: OptimSpec | None) -> GuardedTrainEngine:
    engine = GuardedTrainEngine(TorchTrainEngine())
    model = ModelSpec(path=str(folder), dtype="float32")
    engine.initialize(RankContext(role="critic"), TrainSpec(model=model, optim=optim, micro_batch_rows=4))
    return engine


@pytest.mark.parametrize("part", ["weights", "optimizer", "gradients"])
def test_what_needs_a_part_that_is_offloaded_is_refused_and_nothing_else(
    folder: Path, tmp_path: Path, part: str
) -> None:
    engine = make(folder, OptimSpec())
    engine.offload((part,))
    for name, ask in ASK.items():
        if part in NEEDS[name]:
            with pytest.raises(RlsdkError, match=rf"{name}: \['{part}'\] of role 'critic' are offloaded; call onload"):
                ask(engine, tmp_path)
        else:
            ask(engine, tmp_path)
    engine.onload()
    for ask in ASK.values():
        ask(engine, tmp_path)


def test_a_frozen_model_computes_and_is_never_trained(folder: Path, tmp_path: Path) -> None:
    engine = make(folder, None)
    for name, ask in ASK.items():
        if name in ("forward_backward", "optim_step", "reset_optimizer"):
            with pytest.raises(ConfigError, match=f"{name}: the model of role 'critic' is frozen"):
                ask(engine, tmp_path)
        else:
            ask(engine, tmp_path)


def test_only_parts_that_move_are_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, moved = make(folder, OptimSpec()), []
    for name in ("offload", "onload"):
        monkeypatch.setattr(engine.engine, name, lambda parts, name=name: moved.append((name, *parts)))
    engine.onload()
    engine.offload(("optimizer",))
    engine.offload()
    engine.onload(("weights",))
    engine.onload()
    assert moved == [
        ("offload", "optimizer"),
        ("offload", "weights", "gradients"),
        ("onload", "weights"),
        ("onload", "optimizer", "gradients"),
    ]


def test_unknown_parts_and_strange_optimizers_are_refused(folder: Path) -> None:
    engine = make(folder, OptimSpec())
    with pytest.raises(ConfigError, match="offload: unknown part 'weight'; did you mean 'weights'"):
        engine.offload(("weight",))
    with pytest.raises(ConfigError, match="reset_optimizer takes an OptimSpec, got dict"):
        engine.reset_optimizer({})


def test_a_closed_engine_is_asked_for_nothing(folder: Path, tmp_path: Path) -> None:
    engine = make(folder, OptimSpec())
    engine.close()
    engine.close()
    for name, ask in ASK.items():
        with pytest.raises(RlsdkError, match=rf"{name}\(\) was called after the engine of role 'critic' was closed"):
            ask(engine, tmp_path)


def test_every_micro_batch_is_a_sign_of_progress() -> None:
    """Whatever the engine: its objective is called for each, and is still the objective that was given."""

    class Objective:
        outputs = ("log_probs",)
        whole_groups = True

        def __call__(self, outputs: object, batch: object) -> float:
            return 1.5

    class Engine:
        def forward_backward(self, batch: object, objective: Any) -> list[float]:
            found: list[float] = []
            for _ in range(2):
                time.sleep(0.05)
                assert progress.idle_s() >= 0.05
                assert objective({}, batch) == 1.5
                found.append(progress.idle_s())
            assert (objective.outputs, objective.whole_groups) == (("log_probs",), True)
            assert not hasattr(objective, "zero_without_advantage")
            return found

    guarded = GuardedTrainEngine(Engine())  # type: ignore[arg-type]
    idle: Any = guarded.forward_backward(None, Objective())  # type: ignore[arg-type]
    assert max(idle) < 0.04
