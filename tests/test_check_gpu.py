"""`make check-gpu` where there is no GPU: it says so; and its checks themselves, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "check_gpu"
sys.path.insert(0, str(TOOL))

import gpu_metadata  # noqa: E402
import gpu_steps  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], env=environment, capture_output=True, text=True, timeout=110
    )


def test_without_a_device_it_says_so_and_checks_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = run("--report", str(report), "--suites", str(tmp_path / "suites"))
    assert found.returncode == 3, found.stderr
    assert found.stdout.startswith("no CUDA device: torch ")
    assert "Nothing was checked" in found.stdout
    assert not report.exists()


def test_what_there_is_no_time_for_is_not_run_and_stands_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = run(
        "--device", "cpu", "--only", "a", "--minutes", "0.0", "--report", str(report), "--suites", str(tmp_path)
    )
    assert found.returncode == 0, found.stdout + found.stderr
    checks = {check["name"]: check for check in json.loads(report.read_text())["checks"]}
    assert {"offload bfloat16", "offload float32", "suite transformers"} <= set(checks)
    assert {check["outcome"] for check in checks.values()} == {"not run"}
    assert {check["why"].partition(":")[0] for check in checks.values()} <= {"no time left", "not installed"}


@pytest.mark.parametrize("name", sorted(gpu_steps.PASSES.values()))
def test_checks_of_passes_run_on_a_cpu(tmp_path: Path, name: str) -> None:
    import gpu_passes

    found = gpu_passes.CHECKS[name]("cpu", tmp_path)
    assert found["passed"], found


def test_each_part_fits_into_eight_minutes(tmp_path: Path) -> None:
    parts: dict[int, float] = {}
    for step in gpu_steps.steps("python", "cuda:0", tmp_path, tmp_path, num_devices=1):
        parts[step.part] = max(parts.get(step.part, 0.0), step.limit_s)
    assert sorted(parts) == [1, 2, 3, 4, 5, 6]
    assert max(parts.values()) <= 480


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offload_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    import gpu_offload

    found = gpu_offload.measure("cpu", dtype, tmp_path)
    assert found["moved"]
    assert found["passed"]


def test_weights_between_processes_are_compared_and_timed(tmp_path: Path) -> None:
    step = gpu_steps.Step(name="move", command=(sys.executable, str(TOOL / "gpu_move.py"), "cpu", "16"), figures=True)
    environment = {"PYTHONPATH": str(gpu_steps.ROOT)}
    found = gpu_steps.run(step, python=sys.executable, environment=environment, left_s=100)
    assert found.outcome == gpu_steps.PASSED, found.why
    assert found.figures["transport"] == "ring"
    assert found.figures["arrived"] is True
    assert float(str(found.figures["sync_gb_per_s"])) > 0


def test_a_check_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    step = gpu_steps.Step(name="hangs", command=(sys.executable, "-c", code))
    found = gpu_steps.run(step, python=sys.executable, environment={}, left_s=2)
    assert (found.outcome, found.why.partition(",")[0]) == (gpu_steps.FAILED, "not done after 2 s")
    assert found.seconds < 40


def test_a_check_says_what_it_lacks() -> None:
    step = gpu_steps.Step(name="x", command=(sys.executable, "-c", "raise SystemExit(1)"), needs=("no_such_engine",))
    found = gpu_steps.run(step, python=sys.executable, environment={}, left_s=9)
    assert (found.outcome, found.why) == (gpu_steps.NOT_RUN, "not installed: no_such_engine")


def test_one_gpu_is_asked_for_no_ranks_of_nccl(tmp_path: Path) -> None:
    commands = {
        count: {s.name: s.command for s in gpu_steps.steps("python", "cuda:0", tmp_path, tmp_path, num_devices=count)}
        for count in (1, 2)
    }
    assert "not ranks and not parallel" in commands[1]["suite fsdp"]
    assert "--only" not in commands[2]["suite fsdp"]
    assert "device=cuda:0" in commands[1]["suite torch"]


def test_a_checkout_is_discovered_without_being_installed(tmp_path: Path) -> None:
    gpu_metadata.expose(gpu_steps.ROOT / "plugins" / "fsdp", gpu_steps.ROOT / "plugins" / "fsdp" / "src", tmp_path)
    (found,) = metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("rlsdk-fsdp", "0.1.0")
    assert [(e.group, e.name, e.value) for e in found.entry_points] == [("rlsdk", "fsdp", "rlsdk_fsdp.plugin")]
