"""Temporary folders and files of killed processes: removed by the next process, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlsdk.system import temporary
from rlsdk.system.temporary import HeldFolder, held_folder, hold


@contextmanager
def process(code: str) -> Iterator[str]:
    """A process that runs the code and waits; yields the line that it prints. It is killed at the end."""
    command = [sys.executable, "-c", f"{code}\nimport time\ntime.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.send_signal(signal.SIGKILL)


def make(parent: Path) -> str:
    return (
        "from rlsdk.system.temporary import HeldFolder\n"
        f"folder = HeldFolder('grading', {str(parent)!r})\nprint(folder.path, flush=True)"
    )


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    with process(make(tmp_path)) as killed:
        (Path(killed) / "inner").mkdir()
        (Path(killed) / "inner" / "file").write_text("x")
    with process(make(tmp_path)) as running:
        assert not Path(killed).exists()
        with held_folder("plan", str(tmp_path)) as mine, held_folder("plan", str(tmp_path)):
            assert sorted(map(str, tmp_path.iterdir()))[:1] != []
            assert Path(running).is_dir()
            assert Path(mine).is_dir()
        assert [str(path) for path in tmp_path.iterdir()] == [running]


def test_nothing_but_own_folders_of_this_machine_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    prefix = temporary._own_prefix()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("x")
    (tmp_path / f"{prefix}link").symlink_to(victim)
    (tmp_path / f"{prefix}file").write_text("x")
    os.mkfifo(tmp_path / f"{prefix}pipe")
    (tmp_path / "rlsdk-other").mkdir()
    (tmp_path / "rlsdk-held-00000000-grading-x").mkdir()
    left = tmp_path / f"{prefix}grading-x"
    left.mkdir()
    (left / "link").symlink_to(victim)
    if os.getuid() == 0:
        (tmp_path / f"{prefix}foreign").mkdir()
        os.chown(tmp_path / f"{prefix}foreign", 12345, 12345)
    before = set(tmp_path.iterdir())
    HeldFolder("plan", str(tmp_path)).close()
    assert before - set(tmp_path.iterdir()) == {left}
    assert (victim / "file").read_text() == "x"


def test_a_folder_that_another_process_takes_for_abandoned_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def late(descriptor: int) -> bool:
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            temporary.remove_abandoned(str(tmp_path))
        return hold(descriptor)

    monkeypatch.setattr(temporary, "hold", late)
    with held_folder("plan", str(tmp_path)) as folder:
        assert not Path(taken[0]).exists()
        assert Path(folder).is_dir()


def test_a_folder_that_is_taken_for_abandoned_before_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once in a run of all tests on a busy machine."""
    taken: list[str] = []
    make = temporary.tempfile.mkdtemp

    def made(*args: str, **options: str) -> str:
        folder = make(*args, **options)
        if not taken:
            taken.append(folder)
            temporary.remove_abandoned(str(tmp_path))
        return folder

    monkeypatch.setattr(temporary.tempfile, "mkdtemp", made)
    with held_folder("plan", str(tmp_path)) as folder:
        assert not Path(taken[0]).exists()
        assert Path(folder).is_dir()
