"""What comes first when a run starts: refusals without torch and Ray, then Ray's daemons, the workers, and torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REFUSED = """
import sys
from rlsdk.cli import main
try:
    main(["train", "--data", "nowhere.jsonl", "--model", sys.argv[1], "--reward", "gsm8k"])
finally:
    print("imported:", sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""
STARTED = """
import sys, time
from rlsdk.cli import main
from rlsdk.interfaces import ConfigError
from rlsdk.trainer.roles import devices

def say(text):
    sys.stdout.write(text + "\\n")  # in one piece: the program's own thread prints, too

def start_cluster(table, *_, before_connect, **__):
    say(f"roles: {[role.name for role in table]}")
    before_connect()
    end = time.monotonic() + 60
    while "transformers" not in sys.modules and time.monotonic() < end:  # the program imports what it can meanwhile
        time.sleep(0.05)
    time.sleep(1)
    say(f"transformers: {'transformers' in sys.modules}, torch: {'torch' in sys.modules}")
    raise ConfigError("no cluster today")

devices.start_cluster = start_cluster
main(sys.argv[1:])
"""

INTERRUPTED = """
import importlib.abc, signal, sys, time
from rlsdk.cli import main
from rlsdk.trainer.roles import devices

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformers":
            signal.raise_signal(signal.SIGINT)

def start_cluster(*_, before_connect, **__):
    time.sleep(0.2)
    before_connect()
    sys.stdout.write("connects\\n")

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
devices.start_cluster = start_cluster
main(["train", "--placement.device", "cpu"])
"""


def python(script: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_data_that_is_not_there_is_refused_without_torch_and_without_ray(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    done = python(REFUSED, tmp_path, "model")
    assert done.returncode == 2
    assert "nowhere.jsonl" in done.stderr
    assert "imported: []" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_workers_are_started_before_torch_is_imported(tmp_path: Path) -> None:
    """Their imports take as long as this program's: they go on side by side. But two threads that import torch at once
    get parts of it, and connecting to Ray looks into it."""
    done = python(STARTED, tmp_path, "train", "--sft.steps", "0")
    assert "roles: ['actor', 'rollout']" in done.stdout, done.stderr
    assert "transformers: True, torch: False" in done.stdout
    assert "starting Ray ..." in done.stdout
    assert done.returncode == 2
    assert "no cluster today" in done.stderr
    assert not list(tmp_path.glob("runs/*")), "a start that failed leaves no folder"


def test_a_cluster_imports_no_torch(tmp_path: Path) -> None:
    script = """
import sys
from rlsdk.cluster import Cluster
from rlsdk.config import PlacementConfig
from rlsdk.trainer.roles.placement import placement_of
with Cluster.start(placement_of(PlacementConfig(), ["actor"], "cpu")):
    print("torch:", "torch" in sys.modules, "httpx:", "httpx" in sys.modules)
"""
    done = python(script, tmp_path)
    assert done.stdout == "torch: False httpx: False\n", done.stderr


def test_a_start_that_is_interrupted_before_it_connects_to_ray_does_not_connect(tmp_path: Path) -> None:
    """Connecting holds Python's lock: on a busy machine Ctrl-C was heard seven seconds later."""
    done = python(INTERRUPTED, tmp_path)
    assert done.returncode == 130, done.stderr
    assert "stopping: nothing was trained yet" in done.stdout
    assert "connects" not in done.stdout
    assert list(tmp_path.iterdir()) == []
