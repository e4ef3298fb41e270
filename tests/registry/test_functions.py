"""Which folders a user's function brings along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.registry.functions import check_call

ASK = """
import sys
from rlsdk.registry import find_function
print(find_function(sys.argv[1], what="reward")())
print(*sys.path, sep="\\n")
"""


def load(target: str, cwd: Path, *flags: str) -> tuple[str, list[str]]:
    """What the function returns in a fresh interpreter in this folder, and from where that imports afterwards."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK, target, *flags], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, *places = done.stdout.splitlines()
    return said, places


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The current folder, with modules that hide installed ones, or one that is missing, if it came first or at all."""
    (tmp_path / "here" / "rewards").mkdir(parents=True)
    for folder in (tmp_path / "here", tmp_path / "here" / "rewards"):
        for name in ("torch", "numpy", "pluggy", "msvcrt"):
            (folder / f"{name}.py").write_text("raise SystemExit('a module of the current folder')\n")
    return tmp_path / "here"


def test_an_installed_function_brings_no_folder(here: Path) -> None:
    (here / "yaml.py").write_text("raise SystemExit('a module of the current folder')\n")
    _, places = load("os:getpid", here)
    assert str(here) not in places


def test_a_module_of_the_current_folder_is_found_and_hides_no_installed_one(here: Path) -> None:
    (here / "mine.py").write_text("import other, pluggy\ndef fn(): return other.WORD, pluggy.__name__\n")
    (here / "other.py").write_text("WORD = 'beside'\n")
    said, places = load("mine:fn", here)
    assert said == "('beside', 'pluggy')"
    assert places[-1] == str(here)


def test_a_file_imports_what_is_beside_it_and_hides_no_installed_module(here: Path) -> None:
    (here / "rewards" / "mine.py").write_text("import pluggy\nfrom other import WORD\ndef fn(): return WORD\n")
    (here / "rewards" / "other.py").write_text("WORD = 'beside'\n")
    said, places = load("rewards/mine.py:fn", here)
    assert said == "beside"
    assert places[-1] == str(here / "rewards")
    assert str(here) not in places, "nothing of it is needed"


@pytest.mark.parametrize(
    "text",
    [
        "import shared\ndef fn(): return shared.WORD\n",
        "def fn():\n    from shared import WORD\n    return WORD\n",
        "from other import WORD\ndef fn(): return WORD\n",
        "from inner.deep import WORD\ndef fn(): return WORD\n",
    ],
    ids=["at the top", "in a function", "by a module beside it", "by a package beside it"],
)
def test_a_file_that_needs_a_module_of_the_current_folder_finds_it(text: str, here: Path) -> None:
    (here / "shared.py").write_text("WORD = 'of the project'\n")
    (here / "rewards" / "mine.py").write_text(text)
    (here / "rewards" / "other.py").write_text("from shared import WORD\n")
    (here / "rewards" / "inner").mkdir()
    (here / "rewards" / "inner" / "__init__.py").write_text("from shared import WORD\n")
    (here / "rewards" / "inner" / "deep.py").write_text("from shared import WORD\n")
    said, places = load("rewards/mine.py:fn", here)
    assert said == "of the project"
    assert places[-2:] == [str(here / "rewards"), str(here)]


def test_a_class_where_an_object_is_called_is_named_as_such() -> None:
    class Agent:
        async def run(self) -> None: ...

    with pytest.raises(ConfigError, match=r"agent 'x' is a class, .* made in the same file \(`mine = Agent"):
        check_call(Agent, takes=("prompt", "session"), options={}, said="agent 'x'")
