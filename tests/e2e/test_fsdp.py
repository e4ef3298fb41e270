"""The same run with the sharded train backend: colocated with the rollout, and on devices of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import TASK, rlsdk, train_arguments
from test_schedule import in_one_process

from rlsdk.config import load_config
from rlsdk.planning import make_plan
from rlsdk.registry import Registry
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.tracking.trackers import read_lines, read_metrics

SEPARATE = [
    "--train-backend", "fsdp", "--train.fsdp.replicate_size", "2",
    "--placement.pools", "{a: {devices_per_node: [2]}, b: {devices_per_node: [1]}}",
    "--placement.roles", "{actor: a, critic: a, rollout: b}",
]  # fmt: skip
PPO = [
    "--algorithm", "ppo", "--critic.optim.lr", "1e-3", "--critic.optim.warmup_steps", "0", "--critic.warmup_steps", "0",
]  # fmt: skip
STEPS = ["--trainer.save_every_steps", "1", "--eval.every_steps", "null"]
COMPARED = ("reward/mean", "response/tokens_mean", "policy/loss", "policy/grad_norm", "policy/approx_kl")
OF_CRITIC = ("critic/loss", "critic/grad_norm", "critic/value_mean")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs that tests compare."""
    return tmp_path_factory.mktemp("runs")


def alone(model: str, folder: Path, *more: str, steps: int = 2) -> list[Mapping[str, float]]:
    """Steps of the built-in engine, in this process."""
    task = [*TASK, *STEPS, *more, "--trainer.steps", f"{steps}", "--placement.device", "cpu"]
    return in_one_process(model, task, folder).steps


def assert_same_step(found: dict[str, Any], expected: Mapping[str, float]) -> None:
    assert ("critic/loss" in found) == ("critic/loss" in expected)
    for name in (*COMPARED, *(OF_CRITIC if "critic/loss" in expected else ())):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert found["parity/log_prob_diff_max"] < 2e-5


def assert_planned(run: Path, at: int = 1) -> None:
    """What `rlsdk plan` says of a run's configuration is what the run recorded of a step."""
    registry = Registry.discover()
    config = load_config([run / "config.yaml"], ["--trust-run"], registry)
    plan = make_plan(PreparedRun.of(config, registry, "cpu"))
    step = read_metrics(run)[at - 1]
    assert plan.reshard is not None
    assert (plan.reshard.num_bytes, plan.reshard.moved_bytes) == (step["sync/bytes"], step["sync/moved_bytes"])
    sizes = {size.what: size for size in plan.batches}
    assert len(read_lines(run / "samples.jsonl")) <= at * (sizes["step"].samples or 0)
    updates = config.trainer.samples_per_step // (sizes["update"].samples or 1)
    assert step["policy/version"] == at * updates
    rows, mine = sizes["micro-batch"].samples or 0, sizes["update, each rank"].samples or 0
    # Rows are taken to be full, so a rank may need fewer passes.
    assert updates <= step["policy/micro_batches"] <= updates * -(-mine // rows)


def test_two_sharded_ranks_take_the_steps_of_one_process_also_with_split_rows_and_one_goes_on(
    folder: Path, model: str
) -> None:
    ranks = (("2",), ("2", "--train.fsdp.context_parallel", "2"), ("1",))
    for step, given in enumerate(ranks, 1):
        task = [*STEPS, "--train-backend", "fsdp", "--placement.devices_per_node", *given]
        rlsdk(*train_arguments(model, "run", step, task), cwd=folder)
        if step < 3:
            assert_planned(folder / "runs" / "run", step)
    run, one = read_metrics(folder / "runs" / "run"), alone(model, folder / "one", steps=3)
    assert len(run) == len(one) == 3
    for mine, expected in zip(run, one, strict=True):
        assert_same_step(mine, expected)


def test_two_copies_on_devices_of_their_own_take_the_same_steps_of_ppo_as_one_process(folder: Path, model: str) -> None:
    """Actor and critic; in the second step the values are of weights that the first has trained."""
    rlsdk(*train_arguments(model, "apart", 2, [*STEPS, *PPO, *SEPARATE]), cwd=folder)
    apart, one = read_metrics(folder / "runs" / "apart"), alone(model, folder / "ppo", *PPO)
    assert len(apart) == len(one) == 2
    assert_same_step(apart[0], one[0])
    assert_same_step(apart[1], one[1])
    assert_planned(folder / "runs" / "apart")
