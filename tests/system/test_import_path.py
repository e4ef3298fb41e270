"""Which folders a command and its children import from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rlsdk.system.import_path import add_import_folders, clean_python_path, import_folders, leave_current_folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The current folder, of which Python has put what it was given before the installed packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and path != str(tmp_path)])
    return str(tmp_path)


@pytest.mark.parametrize("first", ["", ".", "{here}", "{here}/", "sub/.."])
def test_a_command_does_not_import_from_the_current_folder(
    first: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(sys.path)
    sys.path.insert(0, first.format(here=here))
    leave_current_folder()
    assert sys.path == before


def test_a_folder_that_python_s_path_names_in_full_stays_and_so_does_an_installed_one(
    here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{here}:/opt/more")
    sys.path[:0] = [here, "/opt/more"]
    before = [*sys.path, here]
    sys.path.append(here)  # as an editable install does
    leave_current_folder()
    assert sys.path == before


@pytest.mark.parametrize(
    ("given", "clean"),
    [("", ""), (":/a", "/a"), ("/a::/b:", "/a:/b"), (".:/a", "/a"), ("src:/a", "{here}/src:/a"), ("{here}", "{here}")],
)
def test_children_get_no_entry_that_means_their_current_folder(
    given: str, clean: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", given.format(here=here))
    assert clean_python_path() == clean.format(here=here)
    leave_current_folder()
    assert os.environ["PYTHONPATH"] == clean.format(here=here)


def test_without_the_variable_there_is_none_for_children(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert clean_python_path() == ""
    leave_current_folder()
    assert "PYTHONPATH" not in os.environ


def test_what_the_parent_imports_from_comes_last(here: str) -> None:
    sys.path.insert(0, "")
    folders = import_folders()
    assert folders[0] == here
    own = sys.path[1:]
    sys.path[:] = own
    add_import_folders(folders)
    assert sys.path == [*own, here]


def test_a_current_folder_that_was_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", "src", "/a"])
    monkeypatch.setenv("PYTHONPATH", ":src:/a")
    leave_current_folder()
    assert import_folders() == ["/a"]
    assert clean_python_path() == "/a"
