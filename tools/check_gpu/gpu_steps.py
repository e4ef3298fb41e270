"""What is checked on a GPU, what each check needs, and how one is run. Imports nothing but the standard library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLUGINS = {"fsdp": (), "vllm": ("vllm",), "sglang": ("sglang",)}
"""Plugins whose suites are run, and what each needs beside what the core does."""
CORE = (
    *("torch", "transformers", "pytest", "pydantic", "pluggy", "typer", "rich", "yaml", "psutil", "safetensors"),
    *("numpy", "xxhash"),
)
"""Modules without which no check runs."""
PASSES = {"host waits": "waits", "head": "head", "attention": "attention", "speed": "speed"}
"""Checks of `gpu_passes.py`."""
SUITE_PARTS = {"torch": 2, "transformers": 3, "fsdp": 4, "vllm": 5, "sglang": 6}
"""The part of each suite. Part 1 is all that is no suite."""
SUITE_S = 450.0
SMALL = {
    "vllm": ("--option", "asynchronous=true", "--option", "kv_cache_mb=256"),
    "sglang": ("--option", "kv_cache_mb=256"),
}
"""Several engines are alive at once in a suite: each has a process of its own, and a small part of the device."""
TAIL = 1500
"""Characters of a failed check's output that are kept."""
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One check: a command, and what it needs."""

    name: str
    command: Sequence[str]
    needs: Sequence[str] = ()
    """Modules."""
    report: Path | None = None
    """Of a conformance suite: what `make compatibility` reads."""
    figures: bool = False
    """The last line that it prints is JSON, whose `passed` decides."""
    part: int = 1
    """Part of the whole that it belongs to; each takes at most eight minutes."""
    limit_s: float = 120.0
    """Time after which it is ended, so that it does not take that of the others."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it."""

    name: str
    outcome: str
    why: str = ""
    seconds: float = 0.0
    figures: Mapping[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def steps(python: str, device: str, reports: Path, scratch: Path, *, num_devices: int) -> list[Step]:
    """Everything, the quickest first, so that a deadline costs the least."""
    rlsdk = (python, "-m", "rlsdk")
    found = [
        Step(
            name=f"offload {dtype}",
            command=(python, str(HERE / "gpu_offload.py"), device, dtype),
            figures=True,
        )
        for dtype in ("bfloat16", "float32")
    ]
    found += [
        Step(name=name, command=(python, str(HERE / "gpu_passes.py"), device, which), figures=True, limit_s=60.0)
        for name, which in PASSES.items()
    ]
    found.append(
        Step(
            name="weights between processes", command=(python, str(HERE / "gpu_move.py"), device, "1024"), figures=True
        )
    )
    for backend in ("torch", "transformers", "fsdp", "vllm", "sglang"):
        report = reports / f"{backend}-gpu.json"
        # Ranks of NCCL need a device each.
        alone = ("--only", "not ranks and not parallel") if backend == "fsdp" and num_devices < 2 else ()
        one = ("--only", "not tensor_parallel") if backend in ("vllm", "sglang") and num_devices < 2 else ()
        found.append(
            Step(
                name=f"suite {backend}",
                command=(
                    *rlsdk, "plugins", "check", backend, "--set", f"device={device}", "--report", str(report),
                    *alone, *one, *SMALL.get(backend, ()),
                ),
                needs=PLUGINS.get(backend, ()),
                report=report,
                part=SUITE_PARTS[backend],
                limit_s=SUITE_S,
            )
        )  # fmt: skip
    found.append(
        Step(
            name="GRPO run",
            command=(
                *rlsdk, "train", "--placement.device", device.partition(":")[0], "--trainer.steps", "3",
                "--trainer.run_dir", str(scratch / "runs"),
            ),
            needs=("ray",),
        )
    )  # fmt: skip
    order = {"GRPO run": 1, "suite fsdp": 2, "suite vllm": 3, "suite sglang": 3}
    return sorted(found, key=lambda step: order.get(step.name, 0))


def lacking(modules: Sequence[str], python: str) -> list[str]:
    """Those that an interpreter cannot find; nothing is imported."""
    code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    found = subprocess.run([python, "-c", code, *modules], capture_output=True, text=True, check=True)
    return found.stdout.split()


def run(step: Step, *, python: str, environment: Mapping[str, str], left_s: float) -> Result:
    """Runs one check, and ends it with all that it started when the time is over."""
    missing = lacking(step.needs, python)
    if missing:
        return Result(name=step.name, outcome=NOT_RUN, why=f"not installed: {', '.join(missing)}")
    if left_s < 1:
        return Result(name=step.name, outcome=NOT_RUN, why="no time left: give more with --minutes")
    start = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        why = f"not done after {left_s:.0f} s, and ended: {output[-TAIL:].strip()}"
        return Result(name=step.name, outcome=FAILED, why=why, seconds=time.monotonic() - start)
    seconds = time.monotonic() - start
    figures = _figures(output) if step.figures else {}
    passed = process.returncode == 0 and bool(figures.get("passed", not step.figures))
    return Result(
        name=step.name,
        outcome=PASSED if passed else FAILED,
        why="" if passed else f"exit code {process.returncode}: {output[-TAIL:].strip()}",
        seconds=round(seconds, 1),
        figures=figures,
    )


def _figures(output: str) -> dict[str, object]:
    """The last line, where it is JSON."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            found: dict[str, object] = json.loads(line)
            return found
    return {}
