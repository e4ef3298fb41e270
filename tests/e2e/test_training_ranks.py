"""A training group of several ranks that loses one: the session is started again from the newest whole checkpoint,
within the same command, and every number is that of a run that lost none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import TASK, rlsdk, wait_for
from test_faults import Running, watched
from test_schedule import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
from test_cluster_nodes import await_nodes, end_node, start_node

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.chaos.account import CLOCK
from rlsdk.cluster import PlacementSpec, PoolSpec
from rlsdk.cluster.ray_cluster.local import LocalRay
from rlsdk.rollouts.journal.recorded import account
from rlsdk.rollouts.journal.segments import records
from rlsdk.trainer.runs.launch import launch
from rlsdk.trainer.tracking.stopping import StopFlag
from rlsdk.trainer.tracking.trackers import read_metrics

STEPS = 3
SHARDED = [
    *TASK, "--train-backend", "fsdp", "--trainer.steps", str(STEPS), "--trainer.save_every_steps", "1",
    "--eval.every_steps", "null", "--placement.device", "cpu", "--schedule.journal", "all",
    "--placement.roles", "{actor: train, rollout: serve}",
]  # fmt: skip
ONE_NODE = ["--placement.pools", "{train: {devices_per_node: [2]}, serve: {devices_per_node: [1]}}"]
SEVERAL_NODES = ["--placement.pools", "{train: {devices_per_node: [1, 1]}, serve: {devices_per_node: [1]}}"]
PROMPTS = 4
"""Of a step."""


def numbers(run: Path) -> list[dict[str, Any]]:
    """Metrics of every step, without those that depend on the clock."""
    return [{name: v for name, v in line.items() if not name.startswith(CLOCK)} for line in read_metrics(run)]


@pytest.fixture(scope="module")
def undisturbed(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    rlsdk("train", "--model", model, *SHARDED, *ONE_NODE, "--trainer.run_name", "whole", cwd=folder)
    found = numbers(folder / "runs" / "whole")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    return found


def is_in_second_step(run: Path) -> bool:
    """With the first one's checkpoint."""
    return (run / "checkpoints" / "step_00000001").is_dir() and any(
        line["event"] == "sample" and line["group"] > PROMPTS for line in records(run / "journal")
    )


def assert_undisturbed(run: Path, said: str, undisturbed: list[dict[str, Any]], restarts: int) -> None:
    assert said.count("the session was lost and is started again from its newest whole checkpoint") == restarts, said
    assert f"({restarts} of 3 in a row)" in said
    assert numbers(run) == undisturbed
    trained = [(at, f"trained in step {at // PROMPTS + 1}") for at in range(STEPS * PROMPTS)]
    assert sorted(account(run / "journal").items()) == trained


def test_a_rank_of_two_that_is_killed_and_the_other_on_its_way_back_change_no_number(
    model: str, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    arguments = ["train", "--model", model, *SHARDED, *ONE_NODE]
    with watched(Running(arguments, "struck", tmp_path)) as run:
        run.wait_for(lambda: is_in_second_step(run.run), "a sample of step 2")
        first = run.worker("train-0")
        assert first is not None
        run.kill("train-1")

        def returns() -> bool:
            found = run.worker("train-0")
            return found is not None and found.pid != first.pid

        run.wait_for(returns, "the first rank of the second session")
        run.kill("train-0")
        run.process.wait(240)
    assert run.process.returncode == 0, run.text()
    assert_undisturbed(run.run, run.text(), undisturbed, restarts=2)


def test_a_node_with_a_rank_that_is_lost_changes_no_number(
    model: str, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """Three nodes; the ranks stand on those of one device, and after the loss one of them on what the third has
    left."""
    head = LocalRay(PlacementSpec(pools=(PoolSpec(name="all", devices_per_node=(2,)),), roles={}))
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{head.folder}/token"}
    nodes: list[subprocess.Popen[bytes]] = []
    run, view, hosted = tmp_path / "runs" / "struck", Recorder(), list[str]()

    def strike() -> None:
        wait_for(lambda: is_in_second_step(run), "a sample of step 2")
        raylet = next(one for one in psutil.Process(nodes[0].pid).children() if "raylet" in one.name())
        hosted.extend(log for one in raylet.children(recursive=True) if (log := log_of(one)) is not None)
        raylet.kill()

    try:
        for count in (2, 3):  # two that start at once would choose the same socket
            nodes.append(start_node(variables, cpus=1))
            await_nodes(count)
        address = ray.get_runtime_context().gcs_address
        place = ["--placement.ray_address", address, "--placement.network_interface", "lo"]
        names = ["--trainer.run_dir", str(run.parent), "--trainer.run_name", run.name]
        striking = threading.Thread(target=strike, daemon=True)
        striking.start()
        launch(resolve(Settings(flags=["--model", model, *SHARDED, *SEVERAL_NODES, *place, *names])), view, StopFlag())
        striking.join(60)
    finally:
        for node in nodes:
            end_node(node)
        head.stop()
    assert {"train-0", "train-1"} & set(hosted), hosted
    assert_undisturbed(run, "\n".join(view.notices), undisturbed, restarts=1)


def log_of(process: psutil.Process) -> str | None:
    """`POOL-DEVICE` of a worker; None: it is none."""
    with suppress(OSError, psutil.Error):
        log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        return log.stem if log.parent.name == "logs" else None
    return None
