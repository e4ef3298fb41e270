"""The same run with the sharded train backend: colocated with the rollout, and on devices of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import rlsdk, train_arguments

from rlsdk.config import load_config
from rlsdk.planning import make_plan
from rlsdk.registry import Registry
from rlsdk.trainer.trackers import read_lines, read_metrics

COLOCATED = ["--train-backend", "fsdp", "--placement.devices_per_node", "2"]
SEPARATE = [
    "--train-backend", "fsdp", "--train.fsdp.replicate_size", "2",
    "--placement.pools", "{a: {devices_per_node: [2]}, b: {devices_per_node: [1]}}",
    "--placement.roles", "{actor: a, rollout: b}",
]  # fmt: skip


@pytest.mark.parametrize("extra", [COLOCATED, SEPARATE], ids=["colocated", "separate"])
def test_two_sharded_ranks_take_the_same_steps_as_one_process(model: str, tmp_path: Path, extra: list[str]) -> None:
    steps = ["--trainer.save_every_steps", "2", "--eval.every_steps", "null"]
    rlsdk(*train_arguments(model, "one", 2, steps), cwd=tmp_path)
    rlsdk(*train_arguments(model, "two", 2, [*steps, *extra]), cwd=tmp_path)
    one, two = (read_metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for name in ("reward/mean", "response/tokens_mean", "policy/loss", "policy/grad_norm", "policy/approx_kl"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-4, abs=1e-6), name
    assert two[0]["parity/log_prob_diff_max"] < 2e-5
    assert_planned(tmp_path / "runs" / "two")


def assert_planned(run: Path) -> None:
    """What `rlsdk plan` says of a run's configuration is what the run recorded."""
    registry = Registry.discover()
    config = load_config([run / "config.yaml"], [], registry)
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


def test_a_run_resumes_at_another_number_of_ranks(model: str, tmp_path: Path) -> None:
    base = ["--trainer.save_every_steps", "1", "--eval.every_steps", "null", "--train-backend", "fsdp"]
    rlsdk(*train_arguments(model, "run", 1, [*base, "--placement.devices_per_node", "2"]), cwd=tmp_path)
    rlsdk(*train_arguments(model, "run", 2, [*base, "--placement.devices_per_node", "1"]), cwd=tmp_path)
    rlsdk(*train_arguments(model, "whole", 2, [*base, "--placement.devices_per_node", "1"]), cwd=tmp_path)
    run, whole = (read_metrics(tmp_path / "runs" / name)[1] for name in ("run", "whole"))
    for name in ("reward/mean", "policy/grad_norm", "policy/loss"):
        assert run[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
