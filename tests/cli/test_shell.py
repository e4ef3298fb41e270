"""Mistakes and limits of a shell: refused with a message, before anything is started."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlsdk.cli.training.pairs import _next_command
from rlsdk.cli.training.train import quoted
from rlsdk.config import PairTraining


def shell(command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=cwd, env=os.environ | variables
    )


def rlsdk(arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m rlsdk {arguments}"


def test_a_limit_of_address_space_is_named_and_not_a_stack_of_a_library(tmp_path: Path) -> None:
    done = shell(f"ulimit -v 6000000; {rlsdk('train')}", tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ulimit -v is 5.7 GiB")
    assert "ask who runs this machine" in done.stderr  # a shell that lowers it once cannot raise it
    assert len(done.stderr.splitlines()) == 1
    done = shell(f"ulimit -S -v 6000000; {rlsdk('train')}", tmp_path)
    assert "Run: ulimit -v unlimited" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["--trainer.run_dir", "--trainer.run_name"])
def test_a_run_folder_that_is_a_file_is_refused_in_one_line(tmp_path: Path, field: str) -> None:
    (tmp_path / "runs").mkdir()
    place = tmp_path / "runs" / "taken"
    place.write_text("mine")
    value = str(place) if field.endswith("dir") else "taken"
    done = shell(rlsdk(f"train {field} {value}"), tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: trainer.run_dir: cannot make the folder"), done.stderr
    assert "Traceback" not in done.stderr
    assert place.read_text() == "mine"


def test_a_run_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    place = Path("/proc/runs") if os.geteuid() == 0 else tmp_path / "runs"  # root writes anywhere else
    tmp_path.chmod(0o500)
    done = shell(rlsdk(f"train --trainer.run_dir {place}"), Path.home())
    tmp_path.chmod(0o700)
    assert done.returncode == 2, done.stderr
    assert "cannot make the folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_printed_paths_are_one_word_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my run; echo 'x' $(y)"
    folder.mkdir()
    assert shell(f"test -d {quoted(folder)} && printf %s {quoted(folder)}", tmp_path).stdout.endswith(str(folder.name))
    for kind in PairTraining:
        words = shlex.split(_next_command(kind, folder))
        assert any(str(folder) in word or folder.name in word for word in words), words
