"""Loads a `RunConfig` from YAML files and dotted overrides, or raises one error that lists every problem."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlsdk.config.introspection.fields import annotation_at, keys_at, members, section_of
from rlsdk.config.introspection.options import build_options
from rlsdk.config.introspection.validation_errors import dotted, explain
from rlsdk.config.loading.foreign_names import NOT_FIELDS, VERBS, answer
from rlsdk.config.loading.other_names import Reads, every, known_elsewhere, meant_by
from rlsdk.config.loading.overrides import RECIPE, Override, split_arguments
from rlsdk.config.loading.reads import Given, Idle, Reader
from rlsdk.config.loading.recipes import recipe_file
from rlsdk.config.loading.tree import Place, Tree, TreeFile, read_tree_file
from rlsdk.config.loading.trust import check_trust, is_of_run, take_trust_flag
from rlsdk.config.loading.variables import variable_hint, variable_problems
from rlsdk.config.loading.yaml_text import read_value, write_yaml
from rlsdk.config.problem import Problem, config_error
from rlsdk.config.sections.base import FIELDS_ONLY, problems_in
from rlsdk.config.sections.role_kinds import OWN_SECTIONS
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import BackendKind, ConfigError, PluginError
from rlsdk.registry import FIRST_PARTY, Registry
from rlsdk.system.files import is_pipe

SHIPPED = "the default of"
"""Prefix of the origin of values that a recipe of this package sets."""
PACKAGE = Path(__file__).parents[2]
FROM_PYTHON = "the call"
"""Origin, in messages, of values that a Python program passes."""


def load_config(
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    registry: Registry | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    sections: Collection[str] | None = None,
) -> RunConfig:
    """Reads a run's configuration: defaults, then each file, then `values`, then the command line; the later wins.

    Mappings merge, lists are replaced. A key under `train`, `rollout`, `ref` or `critic` that is named as the section's
    backend holds that backend's own options. Nothing is expanded or evaluated.

    Args:
        files: YAML files.
        overrides: arguments as typed (`--trainer.steps`, `100`); `--config FILE` among them comes after `files`.
        registry: what is installed; None: discovered now.
        values: fields as nested mappings of plain data, as a file would hold them: what a caller from Python gives.
        sections: what the caller acts on: there, code that a file of a run asks for is refused, unless `--trust-run`
            is among the overrides. None: everywhere.

    Raises:
        ConfigError: lists all that is wrong: path, value, what was expected, nearest name, file and line or flag; or
            all the code that a run asks for.
    """
    loaded = read_config(files, overrides, registry, values=values, sections=sections)
    if loaded.config is None or loaded.problems:
        raise config_error(loaded.problems)
    return loaded.config


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration that was read, and what is wrong with it."""

    config: RunConfig | None
    """For inspection only if there are problems; None if a field cannot be read, or if a run asks for code that it may
    not run."""
    problems: list[Problem]
    given: Sequence[Given]
    """The values that somebody gave, without those of recipes."""
    idle: Sequence[Idle] = ()
    """Options in files of backends that are not chosen."""


def read_config(
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    registry: Registry | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    sections: Collection[str] | None = None,
    reader: Reader | None = None,
    forced: Sequence[str] = (),
) -> Loaded:
    """As `load_config`, but returns problems as a list, so that a command can add further problems to one message.

    Args:
        files: as for `load_config`.
        overrides: as for `load_config`.
        registry: as for `load_config`.
        values: as for `load_config`.
        sections: as for `load_config`.
        reader: the command, so that only fields that it reads are suggested; None: any field.
        forced: overrides of the command itself, which nobody gave.

    Raises:
        ConfigError: a file cannot be read; or the only problem is code that a run asks for.
    """
    overrides, trusted = take_trust_flag(overrides)
    more, flags = split_arguments(overrides)
    read = [read_tree_file(Path(file)) for file in files]
    typed = [read_tree_file(Path(file), may_be_pipe=is_pipe(file) and not is_of_run(Path(file))) for file in more]
    tree = _merged(read, typed, flags, values or {})
    registry = Registry.discover() if registry is None else registry
    backends = [_Backend(name, kind, _chosen(name, kind, tree, flags), registry) for name, kind in OWN_SECTIONS.items()]
    idle = [one for backend in backends for one in backend.take_options(tree)]
    problems = [problem for backend in backends for problem in backend.refuse_options(tree)]
    problems += [problem for flag in flags for problem in _apply(flag, tree, backends)]
    given = list(_given(tree, {flag.flag for flag in flags}))
    problems += [problem for flag in split_arguments(forced)[1] for problem in _apply(flag, tree, backends)]
    problems += [problem for backend in backends for problem in backend.check_options(tree)]
    config, found = _validate(tree, backends)
    known = {problem.path for problem in (*problems, *found)}
    found += [problem for problem in variable_problems(tree.data) if problem.path not in known]
    reads = every if reader is None else reader.may_read
    problems = [_as_written(problem, tree, backends, reads) for problem in (*problems, *found)]
    problems = list(_lists_once(problems))
    problems.sort(key=lambda problem: problem.origin.startswith(SHIPPED))  # Values that the user gave come first.
    if config is not None and not trusted:
        try:
            _check_trust(config, tree, [Path(file) for file in (*files, *more)], flags, sections)
        except ConfigError:
            if not problems:
                raise
            config = None
    return Loaded(config=config, problems=problems, given=given, idle=idle)


def _given(tree: Tree, flags: Collection[str]) -> Iterator[Given]:
    """The values of a tree that come from the user."""
    for place, value in tree.values():
        origin = tree.origin_at(place)
        typed = origin in flags or origin == FROM_PYTHON
        if typed or (origin and not _of_recipe(origin).startswith(SHIPPED)):
            yield Given(place=place, value=value, origin=origin, typed=typed)


def _merged(
    files: Sequence[TreeFile], more: Sequence[TreeFile], flags: Sequence[Override], values: Mapping[str, Any]
) -> Tree:
    """Merges the recipe of the algorithm (if any), the files, later ones over earlier ones, and `values`.

    A recipe on the command line overrides `files`, and `more`, the files on the command line, override it. A recipe
    that a file names is overridden by every file, so that each of its parts can be changed.

    Raises:
        ConfigError: there is no recipe of this name.
    """
    tree = Tree()
    for file in (*files, *more):
        tree.merge_file(file)
    tree.merge(values, FROM_PYTHON)
    typed = [flag.text for flag in flags if flag.path == RECIPE]
    name = typed[-1] if typed else tree.section(RECIPE[0]).get(RECIPE[1])
    if name is None or name == "null":
        return tree
    recipe = read_tree_file(recipe_file(str(name)))
    whole = Tree()
    for file in (*files, recipe, *more) if typed else (recipe, *files, *more):
        whole.merge_file(file)
    whole.merge(values, FROM_PYTHON)
    return whole


def dump_config(config: RunConfig) -> str:
    """YAML text of the whole configuration; `load_config` reads it back equal."""
    return write_yaml(config.model_dump(mode="json"))


def _check_trust(
    config: RunConfig, tree: Tree, files: Sequence[Path], flags: Sequence[Override], sections: Collection[str] | None
) -> None:
    """Refuses code that a file of a run asks for; code in flags and in other files is the user's own choice."""
    resumed = tree.section("trainer").get("resume")
    typed = {flag.flag for flag in flags}
    written = {str(file) for file in files if not is_of_run(file, str(resumed or "auto"))}

    def own(origin: str) -> bool:
        return origin in typed or origin == FROM_PYTHON or origin.rpartition(":")[0] in written

    if len(written) < len(files):
        check_trust(config.model_dump(), tree.origin_at, own, sections)


class _Backend:
    """The backend that a section chooses, and its own options."""

    def __init__(self, section: str, kind: BackendKind, name: str, registry: Registry) -> None:
        self.section = section
        self.kind = kind
        self.name = name
        self.registry = registry
        self.options: type[Any] | None = None
        self.failure = ""
        try:
            self.options = registry.load_options(registry.backend(kind, name))
        except PluginError as error:
            self.failure = str(error)

    def take_options(self, tree: Tree) -> list[Idle]:
        """Moves `train.BACKEND` to `train.options`. Takes out options of backends of this kind that are not chosen,
        unless they were given for this one command: a file may serve several backends."""
        section, fields = tree.section(self.section), keys_at(RunConfig, (self.section,))
        free = isinstance(section.get("options"), dict | None)
        if free and isinstance(section.get(self.name), dict) and self.name not in fields:
            tree.move((self.section, self.name), (self.section, "options"))
        idle = []
        for key in [key for key in section if key not in fields and self._is_backend(self.kind, key)]:
            origins = [tree.origin_at(place) for place, _ in tree.values() if place[:2] == (self.section, key)]
            if FROM_PYTHON not in origins:
                why = f"{self.section}.backend is {self.name!r}"
                idle.append(Idle(path=f"{self.section}.{key}", origin=next(iter(origins), ""), why=why))
                del section[key]
        return idle

    def refuse_options(self, tree: Tree) -> list[Problem]:
        """Takes out what is left of options of other backends, and reports it."""
        section, fields = tree.section(self.section), keys_at(RunConfig, (self.section,))
        unread = [problem for key in section if key not in fields and (problem := self.not_in_use(key))]
        for problem in unread:
            del section[problem.path.partition(".")[2]]
        return unread

    def not_in_use(self, key: str) -> Problem | None:
        """The problem of a key with the name of another backend; None if no backend has that name."""
        for kind in BackendKind:
            if self._is_backend(kind, key):
                why = f"{self.section}.backend is {self.name!r}" if kind is self.kind else f"it is a {kind} backend"
                return Problem(f"{self.section}.{key}", f"options of backend {key!r} that nobody reads: {why}")
        return None

    def _is_backend(self, kind: BackendKind, name: str) -> bool:
        return name in FIRST_PARTY[kind] or any(row.kind == kind and row.name == name for row in self.registry.rows())

    def check_options(self, tree: Tree) -> list[Problem]:
        """Problems of the backend, or of its options."""
        if self.failure:
            # Reported once, by the section that chose the backend.
            chosen = self.section == self.kind.value or tree.section(self.section).get("backend") is not None
            return [Problem(f"{self.section}.backend", self.failure)] if chosen else []
        raw = tree.section(self.section).get("options", {})
        if not isinstance(raw, dict):
            return []  # Reported by the schema.
        if self.options is None:
            return [Problem(f"{self.section}.options.{key}", f"backend {self.name!r} has no options") for key in raw]
        try:
            _, problems = build_options(self.options, raw)
        except PluginError as error:
            return [Problem(f"{self.section}.backend", str(error))]
        return [replace(problem, path=f"{self.section}.options.{problem.path}") for problem in problems]


def _chosen(section: str, kind: BackendKind, tree: Tree, flags: Sequence[Override]) -> str:
    """Name of the backend that a section will have in the final configuration."""
    typed = [flag.text for flag in flags if flag.path == (section, "backend")]
    own = (typed[-1] if typed else None) or tree.section(section).get("backend")
    if own is not None and own != "null":
        return str(own)
    if section != kind.value:
        return _chosen(kind.value, kind, tree, flags)
    return RunConfig().train.backend if kind is BackendKind.TRAIN else RunConfig().rollout.backend


def _apply(flag: Override, tree: Tree, backends: Sequence[_Backend]) -> list[Problem]:
    """Sets a flag's value at its path."""
    if flag.flag == "--reward":
        earlier = tree.data["rewards"] if tree.origin("rewards") == flag.flag else []
        tree.put(("rewards",), [*earlier, {"name": flag.text}], flag.flag)
        return []
    place = _place(flag.path)
    annotation = annotation_at(RunConfig, place)
    backend = next((backend for backend in backends if len(place) > 1 and place[0] == backend.section), None)
    if backend is not None:
        if place[1] not in keys_at(RunConfig, place[:1]):
            if place[1] != backend.name and (problem := backend.not_in_use(str(place[1]))):
                return [replace(problem, origin=flag.flag)]
            place = (place[0], "options", *place[2:]) if place[1] == backend.name else place
        if place[1] == "options" and backend.options is not None:
            annotation = annotation_at(backend.options, place[2:])
    if flag.text is None and not {bool, Any, object} & set(members(annotation)):
        inside = section_of(annotation) is not None
        expected = f"a field of it, {flag.flag}.FIELD VALUE" if inside else f"{flag.flag} VALUE"
        return [Problem(dotted(place), f"no value was given: expected {expected}", origin=flag.flag)]
    problem = tree.put(place, _typed(flag.text, annotation), flag.flag)
    return [problem] if problem else []


def _place(parts: Sequence[str]) -> Place:
    """The path with integers as list positions, and dashes as underscores where a field is named so."""
    place: list[str | int] = []
    for part in parts:
        spelled = part.replace("-", "_")
        place.append(int(part) if part.isdigit() else spelled if spelled in keys_at(RunConfig, tuple(place)) else part)
    return tuple(place)


def _typed(text: str | None, annotation: Any) -> object:
    """The value of a flag's text for a field of type `annotation`; text fields keep the text as typed."""
    if text is None:
        return True
    value = read_value(text)
    kinds = {getattr(member, "__origin__", member) for member in members(annotation)}
    if kinds & {tuple, list} and not isinstance(value, list):
        return None if value is None and type(None) in kinds else [_typed(text, annotation_at(annotation, (0,)))]
    return text if str in kinds and (type(value) is str or type(value) not in kinds) else value


def _validate(tree: Tree, backends: Sequence[_Backend]) -> tuple[RunConfig | None, list[Problem]]:
    def keys(place: Place) -> Sequence[str]:
        return (*keys_at(RunConfig, place), *(backend.name for backend in backends if place == (backend.section,)))

    try:
        config = RunConfig.model_validate(tree.data, context=FIELDS_ONLY)
        return config, list(problems_in(config))
    except ValidationError:
        pass  # Reported later, with problems between the fields of other sections.
    try:
        return RunConfig.model_validate(tree.data), []
    except ValidationError as error:
        return None, list(explain(error, tree.data, keys))


def _as_written(problem: Problem, tree: Tree, backends: Sequence[_Backend], reads: Reads) -> Problem:
    """Adds the origin of the value, and writes a backend's options as the user does: `train.BACKEND.option`."""
    origin = problem.origin or tree.origin(problem.path)
    path = problem.path
    names: Mapping[str, str] = {
        f"{backend.section}.options.": f"{backend.section}.{backend.name}." for backend in backends
    }
    for prefix, written in names.items():
        path = written + path.removeprefix(prefix) if path.startswith(prefix) else path
    if problem.is_unknown_key:
        key = path.rpartition(".")[2]
        elsewhere = tuple(meant_by(path, reads))
        is_answered = key in NOT_FIELDS or path.replace("-", "_") in VERBS
        instead = "" if elsewhere and not is_answered else answer(path)
        if instead:
            return replace(problem, path=path, expected="", suggestions=(), hint=instead, origin=_of_recipe(origin))
        # A field of this very name in another section is likelier than a similar one here.
        if elsewhere and (known_elsewhere(path) or not problem.suggestions or elsewhere[0].endswith(f".{key}")):
            problem = replace(problem, expected="", suggestions=elsewhere)
    hint = variable_hint(problem.path, tree.value(problem.path))
    hint = "" if hint == problem.message else hint
    return replace(problem, path=path, origin=_of_recipe(origin), hint=hint)


def _lists_once(problems: Sequence[Problem]) -> Iterator[Problem]:
    """The problems; a list of all valid keys is printed with the first key that is unknown."""
    seen: set[str] = set()
    for problem in problems:
        is_list = problem.is_unknown_key and bool(problem.expected)
        yield replace(problem, expected="") if is_list and problem.expected in seen else problem
        seen |= {problem.expected} if is_list else set()


def _of_recipe(origin: str) -> str:
    """Origin shown instead of a file of this package, which no user wrote."""
    file = Path(origin.rpartition(":")[0])
    return f"{SHIPPED} {file.stem}" if file.is_relative_to(PACKAGE) else origin
