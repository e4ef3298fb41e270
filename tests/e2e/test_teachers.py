"""A run that learns from two teachers, one of them in a rollout engine in a pool of its own, and its replay."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import rlsdk, train_arguments

from rlsdk.config import load_config
from rlsdk.planning import make_plan
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.tracking.trackers import read_metrics


def test_a_run_learns_from_teachers_here_and_there_and_is_repeated_update_for_update(
    model: str, tmp_path: Path
) -> None:
    teachers: list[dict[str, object]] = [
        {"path": str(write_tiny_model(tmp_path / f"teacher{at}", seed=5 + at)), "name": name}
        for at, name in enumerate(("near", "far"))
    ]
    teachers[1]["rollout"] = {}
    pools = {name: {"devices_per_node": [1]} for name in ("train", "sample", "teach")}
    roles = {"actor": "train", "rollout": "sample", "teacher.far": "teach"}
    extra = [
        "--teachers", json.dumps(teachers), "--placement.pools", json.dumps(pools), "--placement.roles",
        json.dumps(roles), "--schedule.max_staleness", "1", "--schedule.journal", "all", "--eval.every_steps", "null",
    ]  # fmt: skip
    rlsdk(*train_arguments(model, "taught", 2, extra), cwd=tmp_path)
    run = tmp_path / "runs" / "taught"
    steps = [line for line in read_metrics(run) if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for step in steps:
        assert step["teacher/tokens"] == step["teacher/near/tokens"] == step["teacher/far/tokens"] > 0
        assert step["teacher/near/gap"] != step["teacher/far/gap"]
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    plan = make_plan(PreparedRun.of(load_config([run / "config.yaml"], ["--trust-run"], registry), registry, "cpu"))
    where = plan.places.processes
    assert where["teacher.near"] == where["actor"] != where["teacher.far"]
    assert "teacher.far log_probs" in {phase.phase for phase in plan.memory}
    assert "the same updates" in rlsdk("replay", str(run), "--trust-run", cwd=tmp_path)
