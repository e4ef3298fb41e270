"""Ways to ask for help: `-h`, `python -m rlsdk`, completion in the shell."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from rlsdk.cli import main


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["plugins"], ["plugins", "info"], ["sft"]])
def test_every_command_explains_itself_by_both_flags(
    command: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main([*command, flag])
    assert "Usage: rlsdk" in capsys.readouterr().out


@pytest.mark.parametrize("group", [[], ["plugins"], ["algorithms"], ["config"], ["reward"]])
def test_the_line_of_a_command_is_whole_on_a_narrow_terminal(
    group: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*group, "--help"])
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert lines
    assert [line for line in lines if line.endswith("...")] == []


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "rlsdk", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("rlsdk 0.")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("rlsdk tr", {"train"}),
        ("rlsdk train --trainer.st", {"--trainer.steps"}),
        ("rlsdk train --rewa", {"--reward", "--rewards", "--reward_models", "--reward_limits.timeout_s"}),
        ("rlsdk eval runs/x --chec", {"--checkpoint"}),
        ("rlsdk plan --hard", {"--hardware"}),
    ],
)
def test_the_shell_completes_commands_and_fields(typed: str, expected: set[str]) -> None:
    words = typed.split()
    environment = {
        **os.environ,
        "_RLSDK_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    code = "from rlsdk.cli import main; main(['x'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    found = {line.split(",")[-1] for line in done.stdout.splitlines()}
    assert expected <= found, done.stdout + done.stderr


def test_a_command_that_is_refused_has_imported_no_torch() -> None:
    code = (
        "import sys; from rlsdk.cli import main; sys.argv = ['rlsdk', 'train', '--trainer.stepz', '3']\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stdout + done.stderr
