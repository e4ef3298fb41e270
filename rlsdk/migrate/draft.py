"""A run file under construction: its fields, and one row for each setting of the script that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from rlsdk.config.checks.commands import READERS
from rlsdk.config.loading.foreign_names import FOREIGN_NAMES, NOT_FIELDS

Settings = Mapping[str, "Setting"]


class Fate(StrEnum):
    """What became of a setting."""

    TAKEN = "taken over"
    OTHERWISE = "taken over with another meaning"
    DECIDED = "decided by rlsdk"
    REFUSED = "cannot be expressed"


@dataclass(frozen=True)
class Unknown:
    """A value that the text alone does not tell: a variable of the environment, or the result of a call."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a script."""

    name: str
    value: Any
    where: str = ""
    """File and line, or the command."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a script sets."""

    peer: str
    """Name of the trainer, as its authors write it."""
    source: str
    """The file, for comments."""
    command: str
    """The command of rlsdk for this kind of training: `train`, `sft`, `dpo` or `reward-model`."""
    trainer: str
    """The peer's trainer: a class, or a module."""
    settings: Settings
    steps: Sequence[Row] = ()
    """Rows of what is no setting: calls that prepare data, a second trainer."""
    text: str = ""
    """The script itself, if it is Python."""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """What the file of a launcher holds, with dotted names."""
    rewards_file: str = "run_rewards.py"
    """Module for reward functions that the script defines."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one setting."""

    fate: Fate
    name: str
    value: Any
    fields: tuple[str, ...] = ()
    """The fields that hold it, with their values: `trainer.steps: 10`."""
    why: str = ""
    where: str = ""
    is_default: bool = False
    """Whether the script leaves it out, and the value is the peer's default."""
    stops: bool = False
    """Whether the run cannot start without a change by hand."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Collects the fields of a run file from a script. Every given setting gets at least one row; `done` adds those
    that no rule has read."""

    script: Script
    defaults: Mapping[str, Any]
    """Values of settings that the script leaves out."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Dotted path -> value."""
    notes: dict[str, str] = field(default_factory=dict)
    """Dotted path -> where its value comes from."""
    rows: list[Row] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    """Functions of the script that go into `Script.rewards_file`."""

    def value(self, name: str, otherwise: Any = None) -> Any:
        """The value of a setting: as given, else the peer's default. An unknown value counts as the default."""
        setting = self.script.settings.get(name)
        default = self.defaults.get(name, otherwise)
        if setting is None or isinstance(setting.value, Unknown) or _is_odd(setting.value, default):
            return default
        return setting.value

    def gives(self, *names: str) -> str | None:
        """The first of these names that the script gives."""
        return next((name for name in names if name in self.script.settings), None)

    def row(self, fate: Fate, name: str, why: str = "", fields: Iterable[str] = (), *, stops: bool = False) -> None:
        """Adds a row for a setting; for one that the script leaves out, with the peer's default."""
        setting = self.script.settings.get(name)
        shown = tuple(f"{path}: {self.fields[path]!r}" if path in self.fields else path for path in fields)
        if setting is not None and isinstance(setting.value, Unknown) and fate in (Fate.TAKEN, Fate.OTHERWISE):
            shown, fate = (), Fate.REFUSED
            why = f"the text does not tell its value; {'set ' + ', '.join(fields) if fields else 'see what it means'}"
        if setting is not None and _is_odd(setting.value, self.defaults.get(name)):
            shown, fate, why = (), Fate.REFUSED, f"expected a number, such as {self.defaults[name]!r}"
        self.rows.append(
            Row(
                fate=fate,
                name=name,
                value=self.defaults.get(name) if setting is None else HIDDEN if name in SECRETS else setting.value,
                fields=shown,
                why=why,
                where="" if setting is None else setting.where,
                is_default=setting is None,
                stops=stops,
            )
        )

    def put(
        self, path: str, value: Any, *names: str, fate: Fate = Fate.TAKEN, why: str = "", note: str | None = None
    ) -> None:
        """Sets a field, and adds a row for each of the settings that it comes from.

        Args:
            path: dotted path of the field.
            value: its value; None: the row is added, the field keeps its default.
            names: settings; those that the script leaves out get a row only if none is given.
            fate: of these settings.
            why: reason of the fate, or the arithmetic.
            note: comment of the field; None: the names and `why`.
        """
        if value is not None:
            self.fields[path] = value
        given = [name for name in names if name in self.script.settings]
        origin = ", ".join(given) or (f"{names[0]}, by default" if names else "")
        parts = [f"{self.script.peer}: {origin}" if origin else "", why]
        self.notes[path] = note if note is not None else "; ".join(part for part in parts if part)
        for name in given or names[:1]:
            self.row(fate, name, why, [path])

    def take(self, names: Iterable[str]) -> None:
        """Takes settings over under the name that they have here, as `FOREIGN_NAMES` says."""
        for name in names:
            setting = self.script.settings.get(name)
            path = here(name, self.script.command)
            if path is None:
                if setting is not None:
                    self.row(Fate.DECIDED, name, f"`rlsdk {self.script.command}` has nothing of this kind")
            elif setting is not None or self.defaults.get(name) is not None:
                self.put(path, self.value(name), name)

    def only(self, name: str, same: Sequence[Any], why: str, *, stops: bool = False) -> None:
        """A setting that has an effect here with some values only.

        Args:
            name: the setting.
            same: values that mean what is done here anyway.
            why: what other values would need, and what to do instead.
            stops: whether a run without them is no run of this kind.
        """
        if name in self.script.settings:
            is_same = self.value(name) in same
            self.row(Fate.TAKEN if is_same else Fate.REFUSED, name, "so it is here" if is_same else why, stops=stops)

    def same(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Rows of settings whose value means what rlsdk does anyway; of other values, `decide` says why."""
        for name in self.matching(values):
            if self.script.settings[name].value in values[_rule(name, values)]:
                self.row(Fate.TAKEN, name, "so it is here")

    def decide(self, reasons: Mapping[str, str]) -> None:
        """Rows of settings that have no counterpart because rlsdk does or chooses it itself."""
        for name in self.matching(reasons):
            self.row(Fate.DECIDED, name, reasons[_rule(name, reasons)])

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Rows of settings that cannot be expressed; a value that switches the feature off is no refusal."""
        for name in self.matching(reasons):
            if self.script.settings[name].value in OFF:
                self.row(Fate.TAKEN, name, "off, as here")
            else:
                self.row(Fate.REFUSED, name, reasons[_rule(name, reasons)])

    def matching(self, reasons: Iterable[str]) -> Iterator[str]:
        """Settings without a row that a rule names, or whose beginning it names with a `*` at its end."""
        done = {row.name for row in self.rows}
        known = set(reasons)
        yield from [name for name in self.script.settings if name not in done and _rule(name, known) in known]

    def done(self) -> None:
        """Adds a row for every setting that has none."""
        for name in [*self.matching(["*"])]:
            self.row(Fate.REFUSED, name, self._why_unread(name))
        self.rows.extend(self.script.steps)

    def _why_unread(self, name: str) -> str:
        field = here(name, self.script.command)
        if isinstance(self.script.settings[name].value, Unknown) and field is not None:
            return f"the text does not tell its value; set {field}"
        unknown = f"rlsdk does not know this setting of {self.script.peer}; see `rlsdk {self.script.command} --help`"
        return NOT_FIELDS.get(name) or unknown


SECRETS = frozenset({"hub_token", "logger.wandb.key", "use_auth_token", "token"})
"""Settings whose value is never shown or written."""
HIDDEN = "(given)"
OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
"""Values that switch most features off."""
Convert = Callable[[Any], Any]


def _is_odd(value: Any, default: Any) -> bool:
    """Whether a value is a text where the peer's default is a number."""
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return is_number and isinstance(value, str) and value != "group"


def here(name: str, command: str) -> str | None:
    """The field of a command that has the meaning of another trainer's name; None if it has none."""
    for choice in FOREIGN_NAMES.get(name, ()):
        found = [path for path in choice if READERS[command].may_read(path)]
        if found:
            return found[0]
    return None


def _rule(name: str, rules: Iterable[str]) -> str:
    """The rule for a name: itself, or the longest pattern that fits."""
    known = set(rules)
    if name in known:
        return name
    fitting = [rule for rule in known if "*" in rule and fnmatchcase(name, rule)]
    return max(fitting, key=len, default="")
