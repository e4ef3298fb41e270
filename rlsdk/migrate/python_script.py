"""What a training script of TRL sets, read from its syntax tree. The script is never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsdk.interfaces import ConfigError
from rlsdk.migrate.draft import Fate, Row, Setting, Unknown
from rlsdk.migrate.prompt_functions import prompt_settings
from rlsdk.migrate.values import value_of

PARSERS = ("TrlParser", "HfArgumentParser")
"""Calls that read settings from the command line."""
STILL_THE_MODEL = ("get_peft_model", "prepare_model_for_kbit_training", "to", "cuda", "bfloat16", "half", "compile")
"""Calls with a model whose result has the same origin."""
SHAPING = ("map", "filter", "select", "rename_column", "rename_columns", "shuffle", "train_test_split", "take")
"""Methods of a data set that change its rows."""


@dataclass(kw_only=True)
class PythonScript:
    """What was found in a script."""

    source: str
    """The file, as messages name it."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """Keywords of configurations, `Trainer.keyword` of the trainer, and `data.*` of what it loads."""
    trainers: list[tuple[str, str]] = field(default_factory=list)
    """Class and place of each trainer, in order."""
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)
    imported: dict[str, str] = field(default_factory=dict)
    """Name -> `package.module:name` of what the script imports."""
    rows: list[Row] = field(default_factory=list)
    parses: bool = False
    """Whether the command line gives settings."""
    doc: str = ""


def read_python(text: str, source: str, configs: Mapping[str, str], trainers: Mapping[str, str]) -> PythonScript:
    """Reads a script.

    Args:
        text: the script.
        source: the file, for messages.
        configs: classes whose keywords are settings -> prefix of their names.
        trainers: classes of trainers -> command of rlsdk.

    Raises:
        ConfigError: it is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is no Python: {error}; give a script, a shell script or a YAML file") from error
    reader = _Reader(PythonScript(source=source, doc=ast.get_docstring(tree) or ""), configs, trainers)
    reader.statements(tree.body, top=True)
    return reader.found


class _Reader:
    """Walks over a script's statements in order, and keeps the values of names."""

    def __init__(self, found: PythonScript, configs: Mapping[str, str], trainers: Mapping[str, str]) -> None:
        self.found = found
        self._configs = dict(configs)
        self._trainers = {name: name for name in trainers}
        """Class, the script's own ones included -> the trainer that it is, or that it is made of."""
        self._models: dict[str, dict[str, Setting]] = {}
        """Name of a model -> what it was loaded with."""
        self._names: dict[str, Any] = {}
        self._data: dict[str, dict[str, Setting]] = {}
        """Name of a data set -> what it was loaded with."""
        self._objects: dict[str, str] = {}
        """Name of an object of a configuration -> prefix of its settings."""

    def statements(self, body: Sequence[ast.stmt], *, top: bool = False) -> None:
        for statement in body:
            self._statement(statement, top=top)

    def _statement(self, node: ast.stmt, *, top: bool) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.found.functions[node.name] = node
                for call in _calls(node):
                    self._argument(call) if _short(call) == "add_argument" else None
                if node.name in ("main", "train", "run") or any(self._is_known(call) for call in _calls(node)):
                    self.statements(node.body)
            case ast.ClassDef():
                self.found.classes.add(node.name)
                self._defaults(node)
                self._inherits(node)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.If() if top and "__name__" in ast.unparse(node.test):
                self.statements(node.body)
            case ast.If() | ast.For() | ast.While() | ast.With() | ast.Try():
                self.statements(node.body, top=top)
                self.statements(getattr(node, "orelse", []), top=top)
            case ast.Assign() | ast.AnnAssign() | ast.Expr() | ast.AugAssign() | ast.Return():
                self._expression(node)

    def _is_known(self, call: ast.Call) -> bool:
        return _short(call) in {*self._configs, *self._trainers}

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = getattr(node, "module", None)
        for alias in node.names:
            name = alias.asname or alias.name
            self.found.imported[name] = f"{module}:{alias.name}" if module else alias.name
            known = [trainer for trainer in self._trainers.values() if name.endswith(trainer)]
            if known and name not in self._trainers and (module or "").partition(".")[0] != "trl":
                self._trainers[name] = max(known, key=len)

    def _inherits(self, node: ast.ClassDef) -> None:
        """A class of the script that is made of a trainer or of a configuration."""
        for base in node.bases:
            name = getattr(base, "attr", getattr(base, "id", ""))
            for known in (self._trainers, self._configs):
                if name in known:
                    known[node.name] = known[name]

    def _defaults(self, node: ast.ClassDef) -> None:
        """Defaults of a dataclass of arguments: `args.field` has this value unless the command line gives another."""
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
                value = statement.value
                if isinstance(value, ast.Call) and _short(value) == "field":
                    given = [item.value for item in value.keywords if item.arg == "default"]
                    if not given:
                        continue
                    value = given[0]
                self._names[f".{statement.target.id}"] = value_of(value, self._names)

    def _expression(self, node: ast.stmt) -> None:
        self._attribute(node)
        value: ast.expr | None = getattr(node, "value", None)
        if value is None:
            return
        for call in _calls(node):
            self._called(call)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                self._assign(target.id, value)
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
                for position, item in enumerate(target.elts):
                    if isinstance(item, ast.Name):
                        self._built(item.id, value) if position == 0 else None
                        self._loaded(item.id, value, position)
                        self._names[item.id] = Unknown(item.id)

    def _assign(self, name: str, value: ast.expr) -> None:
        known = value_of(value, self._names)
        earlier = self._names.get(name, known)
        self._names[name] = known if earlier == known or not isinstance(known, Unknown) else Unknown(name)
        call = value if isinstance(value, ast.Call) else None
        if call is not None and _short(call) in self._configs:
            self._objects[name] = self._configs[_short(call)]
        self._loaded(name, value)
        self._built(name, value)
        if isinstance(value, ast.Name) and value.id in self._data:
            self._data[name] = self._data[value.id]

    def _attribute(self, node: ast.stmt) -> None:
        """`training_args.learning_rate = 1e-5`."""
        if not isinstance(node, ast.Assign):
            return
        for target in node.targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                owner = target.value.id
                if owner in self._objects or owner in ("training_args", "model_args", "script_args"):
                    self._set(f"{self._objects.get(owner, '')}{target.attr}", node.value)

    def _set(self, name: str, value: ast.expr) -> None:
        where = f"{self.found.source}:{value.lineno}"
        self.found.settings[name] = Setting(name=name, value=value_of(value, self._names), where=where)

    def _called(self, call: ast.Call) -> None:
        name = _short(call)
        if name in self._configs:
            self._keywords(call, self._configs[name])
        elif name in PARSERS:
            self.found.parses = True
        elif name in self._trainers:
            self.found.trainers.append((self._trainers[name], f"{self.found.source}:{call.lineno}"))
            if len(self.found.trainers) == 1:
                self._trainer(call)
                if self._trainers[name] != name:
                    self._own_trainer(name, call)
        elif name == "get_peft_model" and any(keyword.arg == "r" for keyword in call.keywords):
            self._keywords(call, "LoraConfig.")
        elif name == "add_argument":
            self._argument(call)
        elif name in SHAPING and isinstance(call.func, ast.Attribute):
            self._shaped(call, name)

    def _keywords(self, call: ast.Call, prefix: str) -> None:
        for keyword in call.keywords:
            if keyword.arg is not None:
                self._set(f"{prefix}{keyword.arg}", keyword.value)
                continue
            known = value_of(keyword.value, self._names)
            where = f"{self.found.source}:{call.lineno}"
            if isinstance(known, dict):
                for name, value in known.items():
                    self.found.settings[f"{prefix}{name}"] = Setting(name=f"{prefix}{name}", value=value, where=where)
            else:
                self.found.settings[f"**{known}"] = Setting(name=f"**{known}", value=Unknown(f"**{known}"), where=where)

    def _argument(self, call: ast.Call) -> None:
        """`parser.add_argument("--lr", default=1e-5)`."""
        names = [value_of(argument, {}) for argument in call.args]
        given = [keyword.value for keyword in call.keywords if keyword.arg == "default"]
        if names and isinstance(names[-1], str) and given:
            self._names[f".{names[-1].lstrip('-').replace('-', '_')}"] = value_of(given[0], self._names)

    def _own_trainer(self, name: str, call: ast.Call) -> None:
        where = f"{self.found.source}:{call.lineno}"
        why = f"a trainer of its own, made of {self._trainers[name]}: what it changes is not in the run file"
        self.found.rows.append(Row(fate=Fate.REFUSED, name=name, value=Unknown(where), why=why, where=where))

    def _trainer(self, call: ast.Call) -> None:
        samples = any(kind in self._trainers[_short(call)] for kind in ("GRPO", "RLOO"))
        order = ("model", "reward_funcs", "args") if samples else ("model",)
        given = [*zip(order, call.args, strict=False), *((item.arg, item.value) for item in call.keywords if item.arg)]
        for name, value in given:
            if name == "args":
                if isinstance(value, ast.Call):
                    pass  # read as the call that it is
            elif name in ("train_dataset", "eval_dataset"):
                self._dataset(name, value)
            elif name == "model" and self._model(value):
                pass  # read where it is loaded
            elif name == "reward_funcs":
                self._rewards(value)
            elif name == "environment_factory" and (environment := self._environment(value)) is not None:
                where = f"{self.found.source}:{value.lineno}"
                self.found.settings[f"trainer.{name}"] = Setting(name=f"trainer.{name}", value=environment, where=where)
            elif "get_quantization_config(" in ast.unparse(value):
                pass  # comes from the command line, too
            elif name == "peft_config" and isinstance(value, ast.Name | ast.Call):
                self._peft(value)
            else:
                self._set(f"trainer.{name}", value)

    def _model(self, value: ast.expr) -> bool:
        """The settings of a model that the script loads itself."""
        self._built("<model>", value)
        known = self._models.get(value.id if isinstance(value, ast.Name) else "<model>", {})
        self.found.settings.update(known)
        return bool(known)

    def _built(self, name: str, value: ast.expr) -> None:
        """Remembers what a model is loaded with, also through `get_peft_model(model, ...)` and `.to(...)`."""
        calls = [item for item in ast.walk(value) if isinstance(item, ast.Call)]
        for call in calls:
            owner = getattr(call.func, "value", None)
            kind = getattr(owner, "attr", getattr(owner, "id", ""))
            if _short(call) == "from_pretrained" and ("Model" in kind or "For" in kind):
                self._models[name] = dict(self._loaded_model(call))
                return
        if isinstance(value, ast.Name) or (isinstance(value, ast.Call) and _short(value) in STILL_THE_MODEL):
            known = [item.id for item in ast.walk(value) if isinstance(item, ast.Name) and item.id in self._models]
            if known:
                self._models[name] = self._models[known[0]]

    def _loaded_model(self, call: ast.Call) -> Iterator[tuple[str, Setting]]:
        first = [("trainer.model", value) for value in call.args[:1]]
        named = [(item.arg, item.value) for item in call.keywords if item.arg]
        paths = ("pretrained_model_name_or_path", "model_name")
        for key, node in (*first, *named):
            full = key if key == "trainer.model" else "trainer.model" if key in paths else f"from_pretrained.{key}"
            where = f"{self.found.source}:{node.lineno}"
            yield full, Setting(name=full, value=value_of(node, self._names), where=where)

    def _peft(self, value: ast.expr) -> None:
        """The settings of the configuration stand for it, unless it comes from the command line."""
        known = any(name.startswith("LoraConfig.") for name in self.found.settings)
        if not known and "get_peft_config" not in ast.unparse(value):
            self._set("peft_config", value)

    def _rewards(self, value: ast.expr) -> None:
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        if isinstance(value, ast.Name) and isinstance(known := self._names.get(value.id), list):
            items = [ast.Constant(item) for item in known]
        for position, item in enumerate(items):
            name = f"reward_funcs.{position}" if len(items) > 1 else "reward_funcs"
            text = self._reward(item)
            where = f"{self.found.source}:{value.lineno}"
            self.found.settings[name] = Setting(name=name, value=text, where=where)

    def _reward(self, item: ast.expr) -> Any:
        """`file.py:fn`, `package.module:fn`, or the path of a reward model."""
        known = value_of(item, self._names)
        if isinstance(known, str):
            return known
        if isinstance(item, ast.Name) and item.id in self.found.functions:
            return f"{self.found.source}:{item.id}"
        if isinstance(item, ast.Name) and item.id in self.found.imported:
            return self.found.imported[item.id]
        return Unknown(ast.unparse(item))

    def _environment(self, value: ast.expr) -> str | None:
        """`file.py:Class` or `package.module:Class`; None: the text does not tell."""
        if not isinstance(value, ast.Name):
            return None
        return (
            f"{self.found.source}:{value.id}" if value.id in self.found.classes else self.found.imported.get(value.id)
        )

    def _loaded(self, name: str, value: ast.expr, position: int | None = None) -> None:
        """Remembers what a data set is loaded with; `.map(...)` of it is a data set of the same origin."""
        for call in [item for item in ast.walk(value) if isinstance(item, ast.Call)]:
            if _short(call) in ("load_dataset", "from_json", "from_csv", "from_parquet", "load_from_disk"):
                self._data[name] = dict(self._load(call, position))
                return
        for item in ast.walk(value):
            if isinstance(item, ast.Name) and item.id in self._data:
                self._data[name] = dict(self._data[item.id])
                self._split(name, value)
                return

    def _split(self, name: str, value: ast.expr) -> None:
        """`dataset["train"]`, `dataset[args.dataset_train_split]`."""
        if isinstance(value, ast.Subscript):
            split = value_of(value.slice, self._names)
            where = f"{self.found.source}:{value.lineno}"
            self._data[name]["split"] = Setting(name="split", value=split, where=where)

    def _load(self, call: ast.Call, position: int | None) -> Iterator[tuple[str, Setting]]:
        where = f"{self.found.source}:{call.lineno}"
        order = ("path", "name")
        given = [*zip(order, call.args, strict=False), *((item.arg, item.value) for item in call.keywords if item.arg)]
        for name, node in given:
            value = value_of(node, self._names)
            if name == "split" and position is not None and isinstance(value, list) and position < len(value):
                value = value[position]
            yield name, Setting(name=name, value=value, where=where)

    def _dataset(self, name: str, value: ast.expr) -> None:
        self._loaded(f"<{name}>", value)
        self._split(f"<{name}>", value) if f"<{name}>" in self._data else None
        known = self._data.get(f"<{name}>")
        if known is None:
            if not (isinstance(value, ast.Constant) and value.value is None) and "eval" not in ast.unparse(value):
                self._set(name, value)
            return
        for key, setting in known.items():
            full = f"{name}.{key}"
            self.found.settings[full] = Setting(name=full, value=setting.value, where=setting.where)

    def _shaped(self, call: ast.Call, method: str) -> None:
        function = call.args[0] if call.args else None
        if method == "map" and isinstance(function, ast.Name):
            made = prompt_settings(self.found.functions.get(function.id), self._names)
            where = f"{self.found.source}:{call.lineno}"
            named = {f"{function.id}: {key}": value for key, value in made.items()}
            self.found.settings.update({key: Setting(name=key, value=named[key], where=where) for key in named})
            if made:
                return
        text = ast.unparse(call.func) + "(" + ", ".join(ast.unparse(item) for item in call.args) + ")"
        self.found.rows.append(
            Row(
                fate=Fate.REFUSED,
                name=f"data: .{method}()",
                value=Unknown(re.sub(r"\s+", " ", text)[:100]),
                why="rows are read as they are: write the result with `.to_json('rows.jsonl')` and name that file in "
                "data.train, or use data.prompt_field, data.prompt_template and data.system_prompt",
                where=f"{self.found.source}:{call.lineno}",
            )
        )


def _short(call: ast.Call) -> str:
    """The last part of the name that is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _calls(node: ast.AST) -> list[ast.Call]:
    """All calls in a statement, inner ones first, and none of functions that it defines."""
    inside = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
    return sorted(inside, key=lambda call: (call.lineno, -call.col_offset))
