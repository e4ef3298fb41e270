"""What commands print: complete or an error, harmless for a terminal, and nothing of a stranger's in what programs
read."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.highlighter import NullHighlighter

from rlsdk.kit.files.write_errors import OutputError, disk_errors
from rlsdk.system.streams import STDERR, STDOUT, SafeStream
from rlsdk.views.terminal import SafeConsole

NOISE = """
import atexit, os
print("noise")
os.write(1, b"loud noise\\n")
atexit.register(print, "late noise")
"""


def rlsdk_command(
    *arguments: str, site: Path | None = None, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment} | ({"PYTHONPATH": str(site)} if site else {})
    command = [sys.executable, "-m", "rlsdk.cli", *arguments]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=given, timeout=250, check=False
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed distributions with one plugin, whose module is written by the test."""
    info = tmp_path / "rlsdk_stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlsdk]\nstranger = rlsdk_stranger\n")
    return tmp_path


@pytest.mark.parametrize("command", ["--help", "train --help", "plugins list --json", "plan"])
def test_a_full_disk_under_standard_output_is_an_error_with_the_way_out(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = rlsdk_command(*command.split(), stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: standard output: No space left on device; what the command printed is not")


def test_a_full_disk_under_what_a_run_prints_is_not_blamed_on_its_folder(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, pytest.raises(OSError, match="No space left") as caught, disk_errors(tmp_path):
        print("step 1", file=SafeStream(full, STDOUT), flush=True)
    assert not isinstance(caught.value, OutputError)
    assert caught.value.filename == STDOUT


def test_a_reader_that_has_seen_enough_gets_no_message() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = rlsdk_command("plugins", "list", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_error_that_cannot_be_printed_still_has_its_exit_code() -> None:
    command = [sys.executable, "-m", "rlsdk.cli", "plan", "--confg", "x"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full, timeout=100, check=False).returncode == 2


@pytest.mark.parametrize("command", ["plugins list --json", "plan --json", "config schema"])
def test_what_a_plugin_prints_is_in_no_output_for_programs(site: Path, command: str) -> None:
    (site / "rlsdk_stranger.py").write_text(NOISE)
    done = rlsdk_command(*command.split(), site=site)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert all(word in done.stderr for word in ("noise", "loud noise", "late noise"))


def test_a_plugin_that_interrupts_costs_its_row_and_ctrl_c_ends_the_command(site: Path) -> None:
    module = site / "rlsdk_stranger.py"
    module.write_text("raise KeyboardInterrupt\n")
    done = rlsdk_command("plugins", "list", site=site)
    assert done.returncode == 0
    assert "its import failed: PluginExitError: it raised KeyboardInterrupt" in done.stdout
    module.write_text("import time, sys\nprint('here', file=sys.stderr, flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "rlsdk.cli", "plugins", "list"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "here\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130


@pytest.mark.parametrize("command", ["plugins list", "plugins info stranger", "doctor"])
def test_no_control_sequence_of_a_plugin_reaches_a_terminal(site: Path, command: str) -> None:
    (site / "rlsdk_stranger.py").write_text(r"raise ImportError('\x1b]0;title\x07\x1b[2J' + 'x' * 10**7)" + "\n")
    (site / "rlsdk_stranger-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rlsdk-stranger\nVersion: 1.0\x1b[2J\n"
    )
    done = rlsdk_command(*command.split(), site=site)
    assert "rlsdk-stranger" in done.stdout
    assert len(done.stdout) < 50_000
    assert not {"\x1b", "\x07"} & set(done.stdout + done.stderr)


def test_an_unexpected_error_cannot_send_control_sequences(site: Path) -> None:
    (site / "sitecustomize.py").write_text(
        "import rlsdk.api.installed as i\ndef fail(): raise ValueError('\\x1b]0;title\\x07')\ni.plugin_rows = fail\n"
    )
    done = rlsdk_command("plugins", "list", site=site)
    assert done.returncode == 1
    assert r"ValueError: \x1b]0;title\x07" in done.stderr


def test_a_stream_shows_what_a_terminal_would_obey_and_keeps_the_bars_of_libraries() -> None:
    written = io.StringIO()
    SafeStream(written, STDERR).writelines(["\rloading: 5%", "\x1b[A", "a\rb\x1b[2J\n"])
    assert written.getvalue() == "\rloading: 5%\x1b[Aa\\rb\\x1b[2J\n"
    written = io.StringIO()
    print("\ra\x1b[A", file=SafeStream(written, STDOUT))
    assert written.getvalue() == "\\ra\\x1b[A\n"


def test_our_own_colours_pass_and_those_of_others_do_not() -> None:
    written = io.StringIO()
    console = SafeConsole(file=SafeStream(written, STDOUT), force_terminal=True, color_system="standard", width=80)
    console.highlighter = NullHighlighter()
    console.print("[red]\x1b[2Jred[/]")
    assert written.getvalue() == "\x1b[31m\\x1b[2Jred\x1b[0m\n"
