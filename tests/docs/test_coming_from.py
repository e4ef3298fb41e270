"""docs/coming_from.md: its tables are those of the names that rlsdk answers, its commands have fields that exist."""

from __future__ import annotations

import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

from rlsdk.config import RunConfig
from rlsdk.config.introspection.describe import option_paths
from rlsdk.config.loading.overrides import ALIASES
from rlsdk.migrate.draft import Fate
from rlsdk.migrate.read import draft_of, script_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from foreign_names import PAGE, page  # noqa: E402

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    assert page(TEXT) == TEXT, "run python tools/foreign_names.py"


def test_every_kind_of_row_is_explained() -> None:
    assert [fate for fate in Fate if f"| {fate.value} |" not in TEXT] == []


def test_the_commands_have_fields_that_exist() -> None:
    known = {*option_paths(RunConfig), *ALIASES}
    commands = re.findall(r"^rlsdk train .*?(?:\n|\Z)(?!    )", TEXT, re.S | re.M)
    flags = [word[2:] for text in commands for word in shlex.split(text.replace("\\\n", " ")) if word.startswith("--")]
    assert len(flags) > 20
    assert [flag for flag in flags if flag not in known] == []


def test_the_scripts_before_become_those_after() -> None:
    script = re.search(r"```python\n(.*?)```", TEXT, re.S)
    assert script is not None
    draft = draft_of(script_of(f"from trl import *\n{script[1]}", "train.py"))
    after = shlex.split(re.findall(r"^rlsdk train .*?```", TEXT, re.S | re.M)[0].replace("\\\n", " ").rstrip("`"))
    for flag, value in pairwise(after):
        if flag.startswith("--") and "." in flag:
            assert str(draft.fields[flag[2:]]) == str(float(value) if "e-" in value else value), flag
    for command, steps in (("verl", 4), ("openrlhf", 4)):
        text = re.search(rf"```\n(python3 -m {command}.*?) \.\.\.\n```", TEXT, re.S)
        assert text is not None
        assert draft_of(script_of(text[1], "run.sh")).fields["trainer.updates_per_step"] == steps
