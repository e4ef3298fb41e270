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


@pytest.mark.parametrize(
    ("command", "reads", "not_read"),
    [
        ("train", "rollout", "preferences"),
        ("sft", "sft", "rollout.temperature"),
        ("dpo", "preferences.beta", "critic"),
        ("reward-model", "preferences.margin_field", "preferences.beta"),
        ("eval", "eval.greedy", "train"),
        ("generate", "rollout.top_p", "rewards"),
        ("reward serve", "rewards", "model"),
        ("plan", "trainer.steps", "preferences"),
        ("chaos", "trainer.steps", "preferences"),
    ],
)
def test_help_shows_sections_and_the_fields_of_one_that_act_there(
    command: str, reads: str, not_read: str, capsys: pytest.CaptureFixture[str]
) -> None:
    section = reads.partition(".")[0]
    main_exits([*command.split(), "--help"], 0)
    whole = capsys.readouterr().out
    assert len(whole.splitlines()) < 60
    assert f"\n  {section} " in whole
    assert f"\n  --{section}." not in whole
    main_exits([*command.split(), "--help", section], 0)
    fields = capsys.readouterr().out
    assert f"--{reads}" in fields
    assert f"--{not_read} " not in fields
    main_exits([*command.split(), "--help", not_read], 2)
    assert f"`rlsdk {command}` does not read it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("rollout.top_p", "--rollout.top_p  float, default 1.0"),
        ("steps", "--trainer.steps  int"),
        ("lr", "--train.optim.lr  float"),
        ("algorithm.correction", "--algorithm.correction.mode"),
        ("rewards", "rewards[].weight  float, default 1.0"),
        ("eval.sets", "eval.sets[].data  "),
        ("num_generations", "--trainer.samples_per_prompt"),
        ("all", "--tracking.trackers"),
    ],
)
def test_help_explains_a_field_by_any_of_its_names(topic: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(["train", "--help", topic], 0)
    assert f"{shown}" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "default"), [("train", "sampled"), ("distill", "exact")])
def test_help_shows_the_defaults_of_the_command(command: str, default: str, capsys: pytest.CaptureFixture[str]) -> None:
    main_exits([command, "--help", "algorithm.distillation.objective"], 0)
    assert f"'sampled' or 'exact' or 'top_k', default {default}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("rollot", "did you mean 'rollout'?"),
        ("rollout.top_pp", "did you mean 'rollout.top_p'?"),
        ("use_vllm", "--rollout.backend"),
        ("zero_stage", "the train engine does this itself"),
    ],
)
def test_help_of_an_unknown_name_says_what_was_meant(topic: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(["train", "--help", topic])
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def main_exits(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code


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
