"""Main memory that the processes of a run take besides tensors: what `rlsdk plan` counts as "processes" on a CPU.

`python -m benchmarks.process_memory --train-backend fsdp --rollout-backend vllm`: three steps of a tiny model,
actor and rollout in processes of their own. Proportional set sizes, the highest of each process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MIB = 1 << 20
POLL_S = 0.5
TASK = (
    "--data", "reasoning_gym:chain_sum", "--data.options", "{size: 64, seed: 1, max_terms: 2, max_digits: 1}",
    "--reward", "reasoning_gym", "--data.num_eval_rows", "8", "--data.max_prompt_tokens", "96",
    "--rollout.max_response_tokens", "8", "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4",
    "--trainer.steps", "3", "--tracking.trackers", "[jsonl]", "--placement.device", "cpu",
    "--placement.pools", "{a: {devices_per_node: [1]}, b: {devices_per_node: [1]}}",
    "--placement.roles", "{actor: a, rollout: b}",
)  # fmt: skip


@dataclass
class Peaks:
    """Of processes that ran."""

    bytes_of: dict[int, int] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)
    total: int = 0
    """Of all at one time."""

    def look(self, root: psutil.Process) -> None:
        """Takes the sizes of a process and all below it."""
        now = 0
        for process in (root, *root.children(recursive=True)):
            try:
                size, name = process.memory_full_info().pss, name_of(process)
            except (psutil.Error, FileNotFoundError):
                continue
            now += size
            if size > self.bytes_of.get(process.pid, 0):
                self.bytes_of[process.pid], self.name_of[process.pid] = size, name
        self.total = max(self.total, now)

    def by_name(self) -> Mapping[str, list[int]]:
        """Largest first."""
        found: dict[str, list[int]] = {}
        for pid, size in sorted(self.bytes_of.items(), key=lambda item: -item[1]):
            found.setdefault(self.name_of[pid], []).append(size)
        return found


def name_of(process: psutil.Process) -> str:
    """What it is, from what it calls itself."""
    words = process.cmdline() or [process.name()]
    first = Path(words[0]).name
    if first.startswith("python"):
        return " ".join(Path(word).name for word in words[:4])
    return words[0] if "::" in words[0] else first


def main() -> None:
    """Runs, looks, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-backend", default="torch")
    parser.add_argument("--rollout-backend", default="transformers")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    args = parser.parse_args()

    from rlsdk.testing.process.models import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "model"))
        command = [sys.executable, "-m", "rlsdk.cli", "train", "--model", model, *TASK]
        command += ["--train-backend", args.train_backend, "--rollout-backend", args.rollout_backend]
        with (Path(folder) / "log").open("w+") as log:
            run = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
            peaks, end = Peaks(), time.monotonic() + args.timeout_s
            root = psutil.Process(run.pid)
            while run.poll() is None and time.monotonic() < end:
                peaks.look(root)
                time.sleep(POLL_S)
            if run.poll() is None:
                run.terminate()
            if run.wait(60):
                log.seek(0)
                sys.exit(log.read())
    print(f"{args.train_backend}, {args.rollout_backend}: {peaks.total / MIB:.0f} MiB at once")
    for name, sizes in peaks.by_name().items():
        print(f"{sum(sizes) / MIB:8.0f} MiB  {name}  {[round(size / MIB) for size in sizes]}")


if __name__ == "__main__":
    main()
