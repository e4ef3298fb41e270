"""What an environment of the plugin's own is made from."""

from __future__ import annotations

import tomllib
from pathlib import Path

PLUGIN = Path(__file__).parents[1]


def test_an_environment_of_its_own_leaves_out_what_the_tests_leave_out() -> None:
    recipe = tomllib.loads((PLUGIN / "src" / "rlsdk_sglang" / "install.toml").read_text())["cpu"]
    lines = [line for line in (PLUGIN / "overrides.txt").read_text().splitlines() if line and line[0] != "#"]
    assert recipe["overrides"] == lines
    assert recipe["torch_backend"] == "cpu"
