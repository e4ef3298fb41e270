"""Configurations that no run could use are refused by file and line, soon, and never by a traceback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlsdk.config import load_config
from rlsdk.interfaces import ConfigError

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
