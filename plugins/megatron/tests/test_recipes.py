"""The recipes for real models resolve and fit, by `rlsdk plan`. Tested here, where the engines they name are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_recipe_fits_the_hardware_that_its_head_names() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "check_recipes.py")], capture_output=True, text=True, timeout=280
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one for one in found if one.get("fits") is not True] == [], done.stderr
    assert len(found) == len(list((ROOT / "examples" / "recipes").glob("*.yaml"))) >= 5
    assert all(one["unknown"] == [] for one in found)
    assert all(one["share"] < 0.9 for one in found)
