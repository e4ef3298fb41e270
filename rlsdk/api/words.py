"""Errors and notices in the words of a call from Python: rows by number, fields as keywords.

Checks and runs speak of files and flags, whoever started them. Here, and nowhere else, that is put into what a Python
caller has written: `data` and not the file that its rows went to, `trainer={'steps': 5}` and not `--trainer.steps 5`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlsdk.config import RunConfig
from rlsdk.config.loading.overrides import ALIASES
from rlsdk.config.loading.trust import TRUST_FLAG
from rlsdk.config.loading.yaml_text import read_value
from rlsdk.interfaces import RlsdkError

if TYPE_CHECKING:
    from rlsdk.trainer.tracking.events import RunView

ARGUMENTS: Mapping[str, str] = {
    "model.path": "model",
    "data.train": "data",
    "data.eval": "eval_data",
    "rewards": "reward",
    "algorithm.recipe": "algorithm",
    "trainer.steps": "steps",
    "trainer.run_name": "run_name",
    "trainer.seed": "seed",
    "prompt": "prompts",
    "set": "sets",
    **{name: name for name in ("calibration", "checkpoint", "config", "hardware")},
}
"""Fields and flags that have an argument of their own."""
TAKEN = frozenset({"model", "data", "algorithm"})
"""Sections whose name is an argument for something else: their fields are given under dotted names."""
TRUST = TRUST_FLAG.removeprefix("--")
_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|\{[^}]*\}|(?!(?:and|as|for|in|is|may|or|to|which|with)\b)[\w./:-]*[\w/]"""
_FLAG = rf"--(?P<path>[a-z_]+(?:-[a-z]+)?(?:\.\w+)*)(?:[ =](?P<value>{_VALUE}))?"
_ONE_FLAG = re.compile(_FLAG)
_FLAGS = re.compile(rf"{re.sub(r'[?]P<[a-z]+>', '?:', _FLAG)}(?: {re.sub(r'[?]P<[a-z]+>', '?:', _FLAG)})*")
_CODE = re.compile(r"(`[^`]*`)")
_TEXT = re.compile(r"--prompt (\d+)")


def keyword(path: str, value: Any) -> str:
    """How a call from Python gives a field: `trainer={'steps': 5}`, or `**{'data.num_eval_rows': 5}`."""
    section, *inside = path.split(".")
    if path in ARGUMENTS:
        return f"{ARGUMENTS[path]}={value!r}"
    if section in TAKEN or not inside:
        return f"**{{{path!r}: {value!r}}}"
    return f"{section}={_nested(inside, value)}"


def _nested(path: list[str], value: Any) -> str:
    return f"{{{path[0]!r}: {_nested(path[1:], value)}}}" if len(path) > 1 else f"{{{path[0]!r}: {value!r}}}"


@dataclass(kw_only=True)
class Words:
    """Of one call: what it gave as objects, under the names of its arguments."""

    names: dict[str, str] = field(default_factory=dict)
    """File that an object was written to -> the argument with rows, or the function."""
    places: list[Path] = field(default_factory=list)
    """Folders that hold these files, now or later."""
    eval_data: str = "eval_data"
    """The argument with evaluation rows."""

    def __call__(self, text: str) -> str:
        """The text in these words."""
        text = self._without_files(_TEXT.sub(r"prompts[\1]", text))
        # A whole command stays one: `rlsdk sft --model FOLDER`.
        parts = (part if _is_command(part) else _FLAGS.sub(self._keywords, part) for part in _CODE.split(text))
        return "".join(parts)

    def put_into(self, error: BaseException | None) -> None:
        """Changes the message of an error, and of those behind it."""
        seen: list[BaseException] = []
        while error is not None and error not in seen:
            seen.append(error)
            if isinstance(error, RlsdkError):
                error.args = tuple(self(part) if isinstance(part, str) else part for part in error.args)
            error = error.__cause__ or error.__context__

    def _without_files(self, text: str) -> str:
        for place in self.places:
            for name, called in self.names.items():
                file = re.escape(f"{place}{os.sep}{name}")
                text = re.sub(rf"(?:data\.(?:train|eval): )?{file}:(\d+)", rf"row \1 of {called}", text)
                text = re.sub(rf"(?:data\.(?:train|eval): )?{file}(?::{re.escape(called)}\b)?", called, text)
        return text

    def _keywords(self, flags: re.Match[str]) -> str:
        return ", ".join(self._keyword(flag) for flag in _ONE_FLAG.finditer(flags[0]))

    def _keyword(self, flag: re.Match[str]) -> str:
        path, text = ALIASES.get(flag["path"], flag["path"]), flag["value"]
        if path.partition(".")[0] not in RunConfig.model_fields and path not in (*ARGUMENTS, TRUST):
            return flag[0]
        if path == TRUST:
            return f"trust_run=True{'' if text is None else f' {text}'}"
        if text is None:
            return ARGUMENTS.get(path, path)
        if path == "data.eval":
            return f"{self.eval_data}={_value(text)!r}"
        return keyword(path, _value(text))


def _value(text: str) -> Any:
    """Of a flag, quoted for a shell or not."""
    plain = text.strip("'\"")
    return plain if plain != text and not plain.startswith(("{", "[")) else read_value(plain)


def _is_command(part: str) -> bool:
    return part.startswith("`") and not part.startswith("`--")


@contextmanager
def shown_in(words: Words, view: RunView | None) -> Iterator[RunView]:
    """The view that a run reports to, as `rlsdk.views.shown` has it, with notices in these words."""
    from rlsdk.views import shown

    with shown(view) as watching:
        yield cast("RunView", _InWords(watching, words))


class _InWords:
    """A view whose notices are put into the words of the call."""

    def __init__(self, view: RunView, words: Words) -> None:
        self._view = view
        self._words = words

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def notice(self, text: str) -> None:
        self._view.notice(self._words(text))
