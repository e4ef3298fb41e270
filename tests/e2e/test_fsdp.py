"""The same run with the sharded train backend: colocated with the rollout, and on devices of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import rlsdk, train_arguments

from rlsdk.trainer.trackers import read_metrics

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


def test_a_run_resumes_at_another_number_of_ranks(model: str, tmp_path: Path) -> None:
    base = ["--trainer.save_every_steps", "1", "--eval.every_steps", "null", "--train-backend", "fsdp"]
    rlsdk(*train_arguments(model, "run", 1, [*base, "--placement.devices_per_node", "2"]), cwd=tmp_path)
    rlsdk(*train_arguments(model, "run", 2, [*base, "--placement.devices_per_node", "1"]), cwd=tmp_path)
    rlsdk(*train_arguments(model, "whole", 2, [*base, "--placement.devices_per_node", "1"]), cwd=tmp_path)
    run, whole = (read_metrics(tmp_path / "runs" / name)[1] for name in ("run", "whole"))
    for name in ("reward/mean", "policy/grad_norm", "policy/loss"):
        assert run[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
