"""The commands of docs/gpu.md and docs/long_rows.md are ones that rlsdk takes."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rlsdk.config import check_run, load_config
from rlsdk.interfaces import RegisterBackend, hookimpl
from rlsdk.registry import Registry

ROOT = Path(__file__).parent.parent
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("gpu", "long_rows"))
BLOCKS = re.findall(r"```[a-z]*\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    command
    for block in BLOCKS
    for command in re.findall(r"^rlsdk train .*", block.replace("\\\n", " "), re.MULTILINE)
]  # fmt: skip
ENGINES = ("vllm", "megatron")
"""Backends whose engines are not installed where the core is tested; their plugins say what they take all the same."""


class SaysWhatItTakes:
    """A plugin, less the need for its engine."""

    def __init__(self, name: str) -> None:
        self.plugin = importlib.import_module(f"rlsdk_{name}.plugin")

    @hookimpl
    def rlsdk_register_backends(self, register: RegisterBackend) -> None:
        self.plugin.rlsdk_register_backends(lambda spec: register(replace(spec, engine_requires={})))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry.discover()
    for engine in ENGINES:
        monkeypatch.syspath_prepend(str(ROOT / "plugins" / engine / "src"))
        found.register_module(SaysWhatItTakes(engine))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_a_run_that_would_begin(command: str, registry: Registry) -> None:
    config = load_config([], shlex.split(command)[2:], registry)
    assert [str(problem) for problem in check_run(config, registry, device="cuda")] == []


@pytest.mark.parametrize("scheduler", ["srun", "rayClusterSpec"])
def test_what_a_scheduler_starts_is_a_run_that_would_begin(scheduler: str, registry: Registry) -> None:
    """Its options, behind those that stand in the file which it names."""
    (block,) = [" ".join(block.replace("\\\n", " ").split("\n")) for block in BLOCKS if scheduler in block]
    options = re.search(r"rlsdk train --config \S+ (.*?--trainer\.run_dir \S+)", block)
    assert options is not None
    given = options[1].replace('"$ADDRESS:6379"', "HEAD:6379").replace('"$SLURM_NNODES"', "4")
    config = load_config([], shlex.split(f"{COMMANDS[0]} {given}")[2:], registry)
    assert [str(problem) for problem in check_run(config, registry, device="cuda")] == []
    assert (config.placement.num_nodes, config.placement.devices_per_node) == (4, 8)


def test_the_script_for_slurm_is_bash_that_gives_each_raylet_its_processors() -> None:
    (script,) = [block for block in BLOCKS if "srun" in block]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.index("export SRUN_CPUS_PER_TASK=") < script.index("srun --"), "or a raylet has one (Slurm 22.05)"


def test_the_pages_have_a_command_for_each_size_and_one_for_long_rows() -> None:
    assert len(COMMANDS) == 5
    assert sum("srun" in block for block in BLOCKS) == sum("rayClusterSpec" in block for block in BLOCKS) == 1
    assert PAGE.count("Not run") >= 4
