"""What is registered, and what its import costs."""

from __future__ import annotations

import subprocess
import sys

from rlsdk.registry import ComponentKind, Registry

NAME = "reasoning_gym"


def test_the_source_and_the_reward_are_found_by_entry_point() -> None:
    registry = Registry.discover()
    for kind in (ComponentKind.DATASET, ComponentKind.REWARD):
        assert registry.row(kind, NAME).source.distribution == "rlsdk-reasoning-gym"
        assert callable(registry.component(kind, NAME))


def test_source_and_grader_import_without_torch_and_without_the_library() -> None:
    code = (
        "import sys, rlsdk_reasoning_gym.plugin, rlsdk_reasoning_gym.source, rlsdk_reasoning_gym.grader; "
        "heavy = {'torch', 'math_verify', 'sympy', 'mpmath', 'reasoning_gym', 'datasets', 'ray'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
