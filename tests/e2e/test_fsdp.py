"""The same run with the sharded train backend: colocated with the rollout, and on devices of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import rlsdk, train_arguments

from rlsdk.config import load_config
from rlsdk.planning import make_plan
from rlsdk.registry import Registry
from rlsdk.trainer.trackers import read_lines, read_metrics

SEPARATE = [
    "--train-backend", "fsdp", "--train.fsdp.replicate_size", "2",
    "--placement.pools", "{a: {devices_per_node: [2]}, b: {devices_per_node: [1]}}",
    "--placement.roles", "{actor: a, rollout: b}",
]  # fmt: skip
STEPS = ["--trainer.save_every_steps", "1", "--eval.every_steps", "null"]
COMPARED = ("reward/mean", "response/tokens_mean", "policy/loss", "policy/grad_norm", "policy/approx_kl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs that tests compare."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder: Path, model: str) -> list[dict[str, Any]]:
    """Two steps of one process of the built-in engine."""
    rlsdk(*train_arguments(model, "one", 2, STEPS), cwd=folder)
    return list(read_metrics(folder / "runs" / "one"))


def assert_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in COMPARED:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert found["parity/log_prob_diff_max"] < 2e-5


def assert_planned(run: Path) -> None:
    """What `rlsdk plan` says of a run's configuration is what the run recorded."""
    registry = Registry.discover()
    config = load_config([run / "config.yaml"], ["--trust-run"], registry)
    plan = make_plan(config, registry, device="cpu")
    step = read_metrics(run)[0]
    assert plan.reshard is not None
    assert (plan.reshard.num_bytes, plan.reshard.moved_bytes) == (step["sync/bytes"], step["sync/moved_bytes"])
    sizes = {size.what: size for size in plan.batches}
    assert len(read_lines(run / "samples.jsonl")) <= (sizes["step"].samples or 0)
    updates = config.trainer.samples_per_step // (sizes["update"].samples or 1)
    assert step["policy/version"] == updates
    rows, mine = sizes["micro-batch"].samples or 0, sizes["update, each rank"].samples or 0
    # Rows are taken to be full, so a rank may need fewer passes.
    assert updates <= step["policy/micro_batches"] <= updates * -(-mine // rows)


def test_two_sharded_ranks_take_the_same_step_as_one_process_and_one_goes_on(
    one: list[dict[str, Any]], folder: Path, model: str
) -> None:
    sharded = [*STEPS, "--train-backend", "fsdp", "--placement.devices_per_node"]
    rlsdk(*train_arguments(model, "run", 1, [*sharded, "2"]), cwd=folder)
    assert_planned(folder / "runs" / "run")
    rlsdk(*train_arguments(model, "run", 2, [*sharded, "1"]), cwd=folder)
    run = read_metrics(folder / "runs" / "run")
    assert len(run) == len(one) == 2
    assert_same_step(run[0], one[0])
    assert_same_step(run[1], one[1])


def test_two_copies_on_devices_of_their_own_take_the_same_step_as_one_process(
    one: list[dict[str, Any]], folder: Path, model: str
) -> None:
    rlsdk(*train_arguments(model, "apart", 2, [*STEPS, *SEPARATE]), cwd=folder)
    apart = read_metrics(folder / "runs" / "apart")
    assert len(apart) == len(one) == 2
    assert_same_step(apart[0], one[0])
    assert_planned(folder / "runs" / "apart")
