"""Configurations that no run could use are refused by file and line, soon, and never by a traceback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rlsdk.config import load_config
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.generation import TEMPERATURES

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)
BROKEN = {
    "5,000 digits": ("\ntrainer: {steps: " + "9" * 5000 + "}", ":2: an integer of 5,000 digits"),
    "5,000 hexadecimal digits": ("data: {options: {x: 0x" + "f" * 5000 + "}}", ":1: an integer of 5,002 digits"),
    "900 lists": ("data: {options: {x: " + "[" * 900 + "]" * 900 + "}}", "nested more than 64 levels"),
    "100 mappings": ("data: {options: " + "{a: " * 100 + "1" + "}" * 101, ":1: nested more than 64 levels"),
    "lists without end": ("x: " + "[" * 100_000, "nested more than 64 levels"),
    "aliases of aliases": (BOMB, "more than 100,000 values"),
    "half a pair": ('data:\n  train: "a\\ud800b"', ":2: half a surrogate pair"),
    "half a pair as a key": ('data: {options: {"\\ud800": 1}}', ":1: key .* half a surrogate pair"),
    "not UTF-8": (b"\xff\xfe\x00", "cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_yaml_allows_and_no_run_can_use_is_named(tmp_path: Path, case: str) -> None:
    text, told = BROKEN[case]
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = time.monotonic()
    with pytest.raises(ConfigError, match=f"run.yaml.*{told}"):
        load_config([file])
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "~nouser/x", "."])
def test_a_file_that_cannot_be_is_a_message(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--config .*: (cannot be read|no such file)"):
        load_config([], ["--config", name])


def test_an_argument_that_is_not_utf_8_is_named() -> None:
    with pytest.raises(ConfigError, match="expected UTF-8 text"):
        load_config([], ["--data.train", b"a\xff".decode("utf-8", "surrogateescape")])


@pytest.mark.parametrize("value", ["{x: " + "[" * 3000, "9" * 5000])
def test_a_value_on_the_command_line_is_refused_by_its_field(value: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.steps"):
        load_config([], ["--trainer.steps", value])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rollout.temperature", "1e-45"), ("rollout.temperature", "1e-30"), ("rollout.temperature", "1e30"),
        ("rollout.temperature", "0"), ("eval.temperature", "1e-45"), ("eval.sets", "{a: {temperature: 1e-20}}"),
        ("rollout.top_p", "1e-45"), ("rollout.min_p", "1e-45"), ("algorithm.kl_coef", "1e-45"),
        ("algorithm.kl_coef", ".inf"), ("algorithm.kl_coef", ".nan"), ("algorithm.kl_coef", "1e39"),
        ("algorithm.entropy_coef", "-1e-40"), ("algorithm.value_clip", "1e-45"), ("train.optim.lr", "1e-45"),
        ("train.optim.eps", "1e-45"), ("train.optim.betas", "[1e-45, 0.9]"), ("critic.optim.lr", "1e300"),
        ("algorithm.correction.upper", "1e300"), ("preferences.beta", "1e-45"), ("reward_limits.max_value", "1e300"),
    ],
)  # fmt: skip
def test_numbers_that_are_0_or_infinite_in_an_engine_are_refused_by_name(path: str, value: str) -> None:
    """`rollout.temperature 1e-45` was blamed on the weights: logits divided by it are not finite."""
    with pytest.raises(ConfigError, match=rf"{path}.*: .*expected .*\(--{path}\)"):
        load_config([], [f"--{path}={value}"])


def test_temperatures_at_the_ends_of_their_range_give_finite_log_probs() -> None:
    logits = torch.tensor([[3e4, -3e4, 2e4, 0.0]], requires_grad=True)
    for temperature in TEMPERATURES:
        load_config([], [f"--rollout.temperature={temperature}", f"--eval.temperature={temperature}"])
        (logits / temperature).log_softmax(-1).sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
        assert (logits / temperature).log_softmax(-1).isfinite().all()
