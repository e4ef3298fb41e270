"""Old names of public modules still import, and say the new name."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlsdk.moved import MOVED, keep_old_names


@pytest.fixture
def old_name() -> Iterator[str]:
    keep_old_names({"rlsdk.kit.once": "rlsdk.interfaces.errors"})
    yield "rlsdk.kit.once"
    del sys.meta_path[-1]
    sys.modules.pop("rlsdk.kit.once", None)
    vars(importlib.import_module("rlsdk.kit")).pop("once", None)


def test_an_old_name_gives_the_very_module_and_says_the_new_one(old_name: str) -> None:
    with pytest.warns(DeprecationWarning, match=re.escape(f"{old_name} is now rlsdk.interfaces.errors")) as warned:
        module = importlib.import_module(old_name)
    assert module is importlib.import_module("rlsdk.interfaces.errors")
    assert module.__spec__ is not None
    assert module.__name__ == module.__spec__.name == "rlsdk.interfaces.errors"
    assert len(warned) == 1


def test_the_warning_points_at_the_line_that_imports(old_name: str) -> None:
    with pytest.warns(DeprecationWarning, match="change the import") as warned:
        from rlsdk.kit import once  # type: ignore[attr-defined]
    assert warned[0].filename == __file__
    assert once.ConfigError is importlib.import_module("rlsdk.interfaces").ConfigError


def test_every_name_of_the_table_is_free_and_leads_to_a_module() -> None:
    for old, new in MOVED.items():
        spec = importlib.util.find_spec(new)
        assert spec is not None, new
        assert spec.origin != new, new
        before = importlib.util.find_spec(old)
        assert before is not None
        assert before.origin == new, f"{old}: a module of this name exists"


def test_the_core_and_its_plugins_use_none_of_them() -> None:
    """Every module of `rlsdk` that can be imported light is, with the warning as an error."""
    code = "import rlsdk.api, rlsdk.cli, rlsdk.testing"
    done = subprocess.run(
        [sys.executable, "-W", "error:.*is now rlsdk:DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
