"""Whatever a configuration file holds, it is a configuration or an error in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import FUZZ
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.config import RunConfig, dump_config, load_config
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry

REGISTRY = Registry.discover()
WHOLE: dict[str, Any] = yaml.safe_load(dump_config(RunConfig()))
ODD = [
    "1e400", "-0", "0x10", "010", "1:30", ".inf", ".nan", "~", "yes", "*a", "&a x", "!!python/object:os.system x", "{",
    "[", "'", "<<: {a: 1}", "2024-01-01", "null", "-", "? a", "%YAML 1.9", "\t", "$HOME", "${oc.env:HOME}", "{{ x }}",
]  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        st.text(max_size=8), st.sampled_from(ODD), st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(),
        st.integers(-2, 3),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a tree but its root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, inner in items for place in ((*at, key), *places(inner, (*at, key)))]


def load(file: Path, *arguments: str) -> RunConfig | None:
    """The configuration; None where it was refused in words, by file, flag or field."""
    try:
        return load_config([file], list(arguments), REGISTRY)
    except ConfigError as error:
        words = str(error)
    assert words.strip()
    assert "Traceback" not in words
    return None


@pytest.mark.parametrize("kind", ["bytes", "text", "lines"])
@FUZZ
@given(data=st.data())
def test_any_file(tmp_path: Path, tried: Callable[[str], None], kind: str, data: st.DataObject) -> None:
    tried("configuration files of any bytes and lines")
    file = tmp_path / "run.yaml"
    if kind == "bytes":
        file.write_bytes(data.draw(st.binary(max_size=200)))
    elif kind == "text":
        file.write_text(data.draw(st.text(st.characters(codec="utf-8"), max_size=200)), encoding="utf-8")
    else:
        words = st.sampled_from([*ODD, *WHOLE, "trainer:", "  steps: ", "a: ", "- "])
        file.write_text(
            "\n".join("".join(line) for line in data.draw(st.lists(st.lists(words, max_size=4), max_size=6)))
        )
    load(file)


@FUZZ
@given(data=st.data())
def test_a_whole_configuration_with_other_values(
    tmp_path: Path, tried: Callable[[str], None], data: st.DataObject
) -> None:
    """What is accepted can be written and read again, and is the same."""
    tried("whole configurations with some values changed")
    tree = copy.deepcopy(WHOLE)
    for place in data.draw(st.lists(st.sampled_from(places(WHOLE)), min_size=1, max_size=3)):
        inner = tree
        for key in place[:-1]:
            inner = inner[key] if isinstance(inner, dict) and key in inner else {}
        if isinstance(inner, dict):
            key = place[-1] if data.draw(st.integers(0, 9)) else data.draw(st.text(max_size=6))
            inner[key] = data.draw(VALUES)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    config = load(file)
    if config is not None:
        again = tmp_path / "again.yaml"
        again.write_text(dump_config(config), encoding="utf-8", newline="")
        assert dump_config(load_config([again], [], REGISTRY)) == dump_config(config)


@FUZZ
@given(
    flags=st.lists(
        st.one_of(
            st.sampled_from([f"--{'.'.join(map(str, place))}" for place in places(WHOLE)]),
            st.text(st.characters(codec="utf-8"), max_size=10), st.sampled_from(ODD),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_any_flags(tmp_path: Path, tried: Callable[[str], None], flags: list[str]) -> None:
    tried("command lines")
    file = tmp_path / "run.yaml"
    file.write_text("{}")
    load(file, *flags)
