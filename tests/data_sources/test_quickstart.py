"""The quickstart's rows: the same bytes as when reasoning-gym made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.resources import files

import pytest
import yaml

from rlsdk.data import DataRow
from rlsdk.data.quickstart import _words
from rlsdk.interfaces import ConfigError

Load = Callable[..., list[DataRow]]
RECIPE = yaml.safe_load((files("rlsdk.trainer") / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
DIGEST = "cba10e4ddd02c0c9aba519c6bd7964a347d31d2dcc62cb7ed9a589ee9de8bcad"
"""SHA-256 of the rows, as JSON lines, that reasoning-gym 0.1.25 made for the quickstart (`spell_backward`)."""


def test_the_rows_of_the_quickstart_are_byte_for_byte_those_of_the_library(load: Load) -> None:
    rows = load(RECIPE["data"]["train"], **RECIPE["data"]["options"])
    lines = "".join(json.dumps(row.row, ensure_ascii=False) + "\n" for row in rows)
    assert len(rows) == 12_000
    assert hashlib.sha256(lines.encode()).hexdigest() == DIGEST
    assert rows[1].source == "quickstart:spell_backward:2"


def test_every_word_has_five_letters() -> None:
    words = _words()
    assert len(words) == len(set(words)) == 10_180
    assert all(len(word) == 5 and word.isalpha() and word.isascii() for word in words)


def test_limit_is_the_number_of_rows_without_a_size(load: Load) -> None:
    assert len(load("quickstart:spell_backward", limit=7)) == 7
    assert len(load("quickstart:spell_backward", limit=3, size=7)) == 3
    assert len(load("quickstart:spell_backward")) == 500


def test_another_task_or_value_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="quickstart:spell: expected quickstart:spell_backward, the only task"):
        load("quickstart:spell")
    with pytest.raises(ConfigError, match="size is 0; expected a whole number of at least 1"):
        load("quickstart:spell_backward", size=0)
    with pytest.raises(ConfigError, match=r"seed is '1'; expected a whole number$"):
        load("quickstart:spell_backward", seed="1")
    with pytest.raises(ConfigError, match=r"no option 'sed'; did you mean 'seed'"):
        load("quickstart:spell_backward", sed=1)
