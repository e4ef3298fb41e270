"""Runs with an adapter: turns on one device, several replicas, DPO without a second model, and rounding."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from pair_runs import run as run_pairs
from test_loop import Recorder, config_of, model, registry, run, trainer_of

from rlsdk.config import PairTraining, load_config
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry
from rlsdk.testing.process.models import random_batch

__all__ = ["model", "registry"]

LORA = ("--model.lora.rank", "4", "--train.optim.lr", "1e-2", "--algorithm.kl_coef", "0.1")


def test_turns_and_replicas_change_no_number(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 2, *LORA)
    plain = run(config, registry, tmp_path / "a")
    assert run(config, registry, tmp_path / "b", forced=True).steps == plain.steps
    two = run(config, registry, tmp_path / "c", replicas=2)
    for mine, theirs in zip(two.steps, plain.steps, strict=True):
        assert mine.pop("sync/bytes") == 2 * theirs.pop("sync/bytes")  # type: ignore[attr-defined]
        assert mine == {name: pytest.approx(value, abs=2e-5) for name, value in theirs.items()}
    assert plain.steps[1]["policy/kl"] > 0.0
    assert "policy/adapter_moved_share" not in plain.steps[0], "nothing is rounded in float32"


def test_the_learner_asks_the_actor_for_the_reference(model: str, registry: Registry, tmp_path: Path) -> None:
    with trainer_of(config_of(model, registry, 1, *LORA), registry, tmp_path / "run", Recorder()) as (
        trainer,
        stage,
        _,
    ):
        learner, batch = stage.learner, random_batch(4, seed=1)
        assert set(learner.roles) == {"actor", "ref"}
        assert set(trainer.session.roles) == {"actor", "rollout"}
        before = learner.forward("ref", batch, "log_probs")
        assert torch.equal(before, learner.forward("actor", batch, "log_probs"))
        trainer.fit()
        assert torch.equal(before, learner.forward("ref", batch, "log_probs"))
        assert not torch.equal(before, learner.forward("actor", batch, "log_probs"))
        with pytest.raises(ConfigError, match="does not have"):
            learner.forward("critic", batch, "values")


def test_what_rounding_takes_of_a_small_adapter_is_said_once(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 2, *LORA[:2], "--train.optim.lr", "1e-6", "--model.dtype", "bfloat16")
    view = run(config, registry, tmp_path / "run")
    assert all(step["policy/adapter_moved_share"] < 0.4 for step in view.steps)
    assert sum("lost by rounding" in notice for notice in view.notices) == 1


@pytest.mark.parametrize("training", [PairTraining.DPO, PairTraining.KTO])
def test_the_actor_as_its_reference_is_as_good_as_a_second_model(
    training: PairTraining, model: str, registry: Registry, tmp_path: Path
) -> None:
    if training is PairTraining.DPO:
        lines = [{"question": f"{at} + 1 =", "chosen": str(at + 1), "rejected": "no"} for at in range(16)]
    else:
        lines = [{"question": f"{at // 2} + 1 =", "answer": "no" if at % 2 else str(at // 2 + 1), "label": at % 2 == 0}
                 for at in range(16)]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [
        "--model", model, "--data", str(tmp_path / "pairs.jsonl"), "--data.max_prompt_tokens", "16",
        "--rollout.max_response_tokens", "9", "--preferences.pairs_per_step", "4", "--preferences.lr", "1e-2",
        "--preferences.steps", "4", "--train.micro_batch_rows", "4", "--tracking.trackers", "[jsonl]", *LORA[:2],
    ]  # fmt: skip
    own = run_pairs(load_config([], flags, registry), training, registry, tmp_path / "own")
    two = run_pairs(load_config([], [*flags, "--ref.path", model], registry), training, registry, tmp_path / "two")
    assert (set(own.session.roles), set(two.session.roles)) == ({"actor"}, {"actor", "ref"})
    assert own.view.steps == two.view.steps
    losses = [step["loss"] for step in own.view.steps]
    assert losses[0] == pytest.approx(math.log(2) if training is PairTraining.DPO else 0.5, abs=1e-6)
    assert losses[-1] < losses[0] - 0.05
