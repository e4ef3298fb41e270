"""A run of all five roles, actor, rollout, reference, critic and two reward models, under every placement preset."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import rlsdk, train_arguments

from rlsdk.config import load_config
from rlsdk.planning import make_plan
from rlsdk.registry import Registry
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.tracking.trackers import read_metrics

PLACED = ("time/", "throughput/", "sync/moved_bytes")
"""Metrics that depend on the clock, or on who stands where."""


@pytest.fixture(scope="module")
def reward_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """As reward models are published: a head of one label over the same backbone and tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("reward") / "model"
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, float]]]:
    """Numbers of the runs so far, by preset."""
    return {}


@pytest.mark.parametrize(
    ("preset", "devices"),
    [("colocate_all", 1), ("colocate_actor_ref", 5), ("colocate_critic_reward", 4), ("disaggregated", 6)],
)
def test_every_preset_runs_all_five_roles_and_comes_to_the_same_numbers(
    preset: str,
    devices: int,
    model: str,
    reward_model: str,
    found: dict[str, list[dict[str, float]]],
    tmp_path: Path,
) -> None:
    models = f"[{{path: {reward_model}, name: a, weight: 0.1}}, {{path: {reward_model}, name: b, dtype: bfloat16}}]"
    extra = [
        "--algorithm.advantage", "gae", "--algorithm.kl_coef", "0.05", "--critic.optim.lr", "1e-3",
        "--reward_models", models, "--placement.preset", preset, "--placement.devices_per_node", str(devices),
        "--eval.every_steps", "null",
    ]  # fmt: skip
    rlsdk(*train_arguments(model, "five", 2, extra), cwd=tmp_path)
    run = tmp_path / "runs" / "five"
    newest = CheckpointStore(run / "checkpoints", keep=3).newest()
    assert newest is not None
    assert {"actor", "critic", "model"} <= {path.name for path in newest.iterdir()}
    assert not (newest / "ref").exists()
    steps = [line for line in read_metrics(run) if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(step["reward/reward.a"] and step["reward/reward.b"] and step["critic/grad_norm"] > 0 for step in steps)
    assert_placed(run, devices)
    found[preset] = [{k: v for k, v in step.items() if not k.startswith(PLACED)} for step in steps]
    first = next(iter(found.values()))
    for mine, theirs in zip(found[preset], first, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def assert_placed(run: Path, devices: int) -> None:
    """The processes of the run are those of its plan, which puts every role on some."""
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    plan = make_plan(PreparedRun.of(load_config([run / "config.yaml"], ["--trust-run"], registry), registry, "cpu"))
    assert set(plan.places.processes) == {"actor", "rollout", "ref", "critic", "reward.a", "reward.b"}
    planned = {device.process for device in plan.places.devices}
    assert len(planned) == devices
    assert {log.stem for log in (run / "logs").glob("*-*.log")} == planned
