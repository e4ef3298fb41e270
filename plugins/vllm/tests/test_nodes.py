"""A replica whose workers are on two nodes: each takes its own part of an update, where it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ModelSpec, RankContext, RolloutSpec, Workload
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.worker_updates import bytes_held
from rlsdk_vllm.forecast import forecast


def test_workers_on_two_nodes_receive_what_they_hold_and_serve_it(tmp_path: Path) -> None:
    """vLLM's own Ray workers in two raylets. A source's bytes go to the other node by themselves, or, by a way that no
    worker can take, through the replica's process; both times each worker gets what it holds."""
    model = write_tiny_model(tmp_path / "model", architecture="qwen2", seed=1, sharpness=2.0)
    found = outcome(model, tmp_path / "platform")
    assert found["nodes"] == found["bundles"], "worker i is in bundle i, on its node"
    assert len(set(found["nodes"])) == 2
    assert [(node, is_apart) for node, is_apart, _ in found["layouts"]] == [("near", False), ("far", True)]
    direct, passed = found["ways"]
    assert direct["transports"] == ["process_group", "ring"]
    assert direct["calls"] == [2, 2, 2], "one for each worker"
    assert passed["transports"] == ["object_store", "ring"]
    for way in (direct, passed):
        assert way["received"] == way["held"] == [658_944] * 2
        assert way["difference"] < 2e-4


def outcome(model: Path, platform: Path) -> dict[str, Any]:
    """Of `two_nodes.py`, in processes of its own: its Ray is no other test's."""
    command = [sys.executable, str(Path(__file__).with_name("two_nodes.py")), str(model), str(platform)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")] or [done.stderr[-3000:]]
    assert line.startswith("OUTCOME "), line
    found: dict[str, Any] = json.loads(line.removeprefix("OUTCOME "))
    return found


def test_a_plan_knows_the_parts_of_workers_on_two_nodes(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", architecture="qwen2")
    ctx = RankContext(
        role="rollout",
        node="a",
        device="cuda:0",
        accelerators=("0", "1", "0", "1"),
        bundles=(0, 1, 2, 3),
        device_nodes=("a", "a", "b", "b"),
    )
    spec = RolloutSpec(model=ModelSpec(path=str(model), dtype="float32"), tp_size=2, pp_size=2)
    (layouts,) = forecast([ctx], spec, Workload(row_tokens=64, update_rows=1, running_rows=4)).layouts
    assert [(layout.node, layout.is_apart) for layout in layouts] == [
        ("a", False),
        ("a", False),
        ("b", True),
        ("b", True),
    ]
    assert max(map(bytes_held, layouts)) < 0.5 * sum(map(bytes_held, layouts))
