"""The import table of the design, and what else keeps every engine a plugin. Read from the source, imported nowhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "rlsdk"
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
SOURCES = [ROOT, *(plugin / "src" for plugin in PLUGINS)]
"""Folders from which modules are imported."""

ROOMS: dict[str, set[str]] = {
    "version": set(),
    "system": set(),
    "moved": set(),
    "interfaces": set(),
    "kit": {"interfaces"},
    "registry": {"interfaces"},
    "builtin": {"interfaces"},
    "diagnosis": {"interfaces", "registry"},
    "config": {"interfaces", "registry"},
    "algorithms": {"interfaces"},
    "rollouts": {"interfaces", "kit"},
    "data": {"interfaces", "registry"},
    "confinement": set(),
    "agents": {"interfaces", "registry", "data", "confinement"},
    "rewards": {"interfaces", "registry", "confinement"},
    "sharding": {"interfaces", "kit"},
    "reference": {"interfaces", "kit"},
    "cluster": {"interfaces", "kit"},
}
ROOMS["trainer"] = {room for room in ROOMS if room not in ("builtin", "reference", "diagnosis")}
ROOMS["testing"] = {"interfaces", "kit", "registry", "config", "sharding", "cluster", "trainer"}
ROOMS["planning"] = {*ROOMS["trainer"], "trainer"} - {"algorithms", "data", "rewards"}
ROOMS["chaos"] = {"interfaces", "rollouts", "trainer"}
ROOMS["virtualenvs"] = {"interfaces", "registry", "config", "cluster", "diagnosis"}
ROOMS["views"] = {"interfaces", "kit", "config", "rollouts", "trainer"}
ROOMS["migrate"] = {"interfaces", "registry", "config"}
ROOMS["api"] = {*ROOMS["trainer"], "trainer", "diagnosis", "planning", "views"}
ROOMS["cli"] = {*ROOMS["api"], "api", "testing", "chaos", "virtualenvs", "migrate"}
for allowed in list(ROOMS.values())[2:]:
    allowed |= {"version", "system"}
"""Room -> the other rooms that it may import. `config` looks the backends' options up in `registry`; nothing imports
the built-ins and the reference engines: they are found like any plugin's."""

FLOORS: dict[str, tuple[str, ...]] = {
    "agents": ("sandbox", "chats", "environments", "conformance", "sessions", "dialects", "gateway", "programs"),
    "algorithms": (".", "advantages", "losses", "objectives"),
    "cli": (".", "plugin_tools", "environment_tools", "preparation", "training", "models", "pages", "commands"),
    "cluster": ("devices", "ray_cluster", "batches", "calls", "workers"),
    "config": ("problem.py", "introspection", "sections", "loading", "derived", "checks"),
    "kit": ("ranks", "files", "weights", "model", "memory", "generation", "guards"),
    "rollouts": ("schedule", "client", "groups", "journal"),
    "trainer": (
        "checkpoints",
        "tracking",
        "roles",
        "inputs",
        "learner",
        "generation",
        "stages/evaluation",
        "stages",
        "runs",
    ),
    "rewards": ("scores", "functions", "text", "math", "code", "grading", "services"),
    "sharding": ("transports", "plan", "transfer"),
    "testing": (
        "suites",
        "process",
        "sharding",
        "sharding/requirements",
        "rollout",
        "rollout/requirements",
        "train",
        "train/requirements",
        "roles",
    ),
    "views": (".", "report"),
}
"""Room -> its folders, ground floor first: a folder imports only itself and the ones before it, not even for types.
`a/b` is a floor of its own; `name.py` is a module at the top of the room, and `.` all modules there without a floor of
their own. Without `.` these are above all folders. The room's `__init__` is above everything."""
MAX_FILES = 25
"""In a folder."""

LIBRARIES: dict[str, set[str]] = {
    "version": set(),
    "system": set(),
    "moved": set(),
    "confinement": set(),
    "interfaces": {"annotated_types", "pluggy"},
    "registry": {"pluggy", "packaging"},
    "builtin": set(),
    "diagnosis": {"packaging"},
    "config": {"pydantic", "pydantic_core", "yaml"},
    "algorithms": {"torch"},
    "migrate": {"yaml"},
}
"""Rooms that must stay light or pure -> the third-party packages that they may import at module level."""
ENGINES = {"vllm", "sglang", "megatron", "mbridge", "transformer_engine", "deepspeed", "apex"}
PLUGIN_LIBRARIES = ENGINES | {"mcp", "reasoning_gym", "verifiers", "websockets"}
PLUGIN_BACKENDS = {"deepspeed", "fsdp", "megatron", "vllm", "sglang"}
PLUGIN_SOURCES = {"mcp", "openenv", "reasoning_gym", "verifiers"}
BUILTIN_BACKENDS = {"torch", "transformers"}
NAMED = {"rlsdk.rewards"}
"""What else docs/plugins.md allows: what the room itself exports, for rewards."""
FOREIGN = CORE / "config" / "loading" / "foreign_names.py"
HINTS = CORE / "registry" / "known.py"
"""The one place that may name first-party plugins: for the install hint."""


@dataclass(frozen=True)
class Import:
    """One imported module, and where."""

    module: str
    file: Path
    line: int
    deferred: bool
    """Inside a function, or for the type checker only."""

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def room(self) -> str:
        return f"{self.module}.".split(".")[1]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: imports {self.module}"


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(file: Path) -> list[Import]:
    return list(_imports(parse(file), file, deferred=False))


def _imports(node: ast.AST, file: Path, *, deferred: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, file, node.lineno, deferred) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{file}:{node.lineno}: write the whole path of the module"
        names = {_imported(str(node.module), alias.name) for alias in node.names}
        yield from (Import(name, file, node.lineno, deferred) for name in sorted(names))
    elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
        named = [argument for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        yield from (Import(str(argument.value), file, node.lineno, deferred) for argument in named)
    inner = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _for_types(node)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, file, deferred=inner)


def _imported(module: str, name: str) -> str:
    """The module that `from MODULE import NAME` reads: NAME, if it is a module of rlsdk or of a plugin."""
    paths = [folder / module.replace(".", "/") / name for folder in SOURCES]
    is_module = module == "rlsdk" or any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
    return f"{module}.{name}" if is_module else module


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def files_of(room: str) -> list[Path]:
    return sorted((CORE / room).rglob("*.py")) if (CORE / room).is_dir() else [CORE / f"{room}.py"]


def folders_of(root: Path) -> list[Path]:
    """The packages in this one, itself included."""
    return sorted(path.parent for path in root.rglob("__init__.py"))


def floor_of(room: str, module: str) -> float:
    """Height in `FLOORS` of a module, or of a name in it. The room itself, its `__init__`, is above everything."""
    parts = module.split(".")[2:]
    if not parts or parts == ["__main__"]:
        return float("inf")
    floors = FLOORS[room]
    paths = ["/".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    at = [floors.index(floor) for path in paths for floor in (path, f"{path}.py") if floor in floors]
    return at[0] if at else floors.index(".") if "." in floors else len(floors)


def module_of(file: Path) -> str:
    folder = max((folder for folder in SOURCES if file.is_relative_to(folder)), key=lambda path: len(path.parts))
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def shown(found: list[Import]) -> list[str]:
    return sorted(map(str, found))


def test_every_room_is_in_the_table() -> None:
    here = {path.name for path in CORE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    here |= {path.stem for path in CORE.glob("*.py")} - {"__init__", "__main__"}
    assert here == set(ROOMS)


def test_the_table_has_no_circle() -> None:
    left = dict(ROOMS)
    while ready := [room for room, needs in left.items() if not needs & set(left)]:
        for room in ready:
            del left[room]
    assert left == {}


def test_no_module_imports_itself_through_others_not_even_later_or_for_types() -> None:
    files = [*CORE.rglob("*.py"), *(file for plugin in PLUGINS for file in (plugin / "src").rglob("*.py"))]
    modules = {module_of(file): file for file in files}
    graph = {module: {i.module for i in imports(file)} & modules.keys() - {module} for module, file in modules.items()}
    assert len(graph) > 600
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_that_the_table_gives_it(room: str) -> None:
    allowed = ROOMS[room] | {room, ""}
    found = [i for file in files_of(room) for i in imports(file) if i.top == "rlsdk" and i.room not in allowed]
    assert shown([i for i in found if not i.module.startswith("rlsdk.__")]) == []


def test_every_room_with_folders_has_floors() -> None:
    rooms = {room: [f for f in folders_of(CORE / room) if f != CORE / room] for room in ROOMS if (CORE / room).is_dir()}
    here = {room: {str(f.relative_to(CORE / room)) for f in folders} for room, folders in rooms.items() if folders}
    named = {room: {f for f in floors if f != "." and not f.endswith(".py")} for room, floors in FLOORS.items()}
    assert here == named


@pytest.mark.parametrize("room", FLOORS)
def test_a_folder_imports_only_the_floors_below_it(room: str) -> None:
    wrong = [
        i
        for file in files_of(room)
        for i in imports(file)
        if f"{i.module}.".startswith(f"rlsdk.{room}.")
        if floor_of(room, i.module) > floor_of(room, module_of(file))
    ]
    assert shown(wrong) == []


@pytest.mark.parametrize("root", [CORE, *(plugin / "src" for plugin in PLUGINS)], ids=lambda path: path.parent.name)
def test_a_folder_is_small_and_says_what_lives_in_it(root: Path) -> None:
    folders = folders_of(root)
    assert folders
    counts = {str(folder.relative_to(root)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MAX_FILES} == {}
    texts = {folder: ast.get_docstring(parse(folder / "__init__.py")) or "" for folder in folders}
    assert [str(folder) for folder, text in texts.items() if not re.match(r"[\w`].{10,200}?\.(\s|$)", text, re.S)] == []


@pytest.mark.parametrize("room", LIBRARIES)
def test_a_light_room_imports_no_heavy_library(room: str) -> None:
    allowed = LIBRARIES[room] | set(sys.stdlib_module_names) | {"rlsdk"}
    found = [i for file in files_of(room) for i in imports(file) if not i.deferred and i.top not in allowed]
    assert shown(found) == []


def test_configuration_registry_and_doctor_never_import_torch_or_ray_not_even_later() -> None:
    files = [file for room in ("config", "registry", "builtin", "diagnosis") for file in files_of(room)]
    assert shown([i for file in files for i in imports(file) if i.top in ("torch", "ray", "transformers")]) == []


def test_only_the_cluster_imports_ray() -> None:
    files = [file for room in ROOMS if room != "cluster" for file in files_of(room)]
    assert shown([i for file in files for i in imports(file) if i.top == "ray"]) == []


def test_only_the_registry_reads_entry_points() -> None:
    files = [file for room in ROOMS if room != "registry" for file in files_of(room)]
    assert [str(file) for file in files if "entry_points(" in file.read_text(encoding="utf-8")] == []


def test_the_core_imports_no_engine_and_no_plugin() -> None:
    found = [
        i
        for file in CORE.rglob("*.py")
        for i in imports(file)
        if i.top in PLUGIN_LIBRARIES or i.top.startswith("rlsdk_")
    ]
    assert shown(found) == []


def others_names(file: Path) -> set[str]:
    """Names of plugins that, where other trainers are read, are names of their settings and launchers."""
    return {"deepspeed"} if file == FOREIGN or file.is_relative_to(CORE / "migrate") else set()


def test_the_core_names_no_plugin_outside_the_install_hints() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for file in sorted(CORE.rglob("*.py"))
        if file != HINTS
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Constant) and node.value in (PLUGIN_BACKENDS | PLUGIN_SOURCES) - others_names(file)
    ]
    assert found == []


def test_the_core_never_compares_with_the_name_of_a_backend() -> None:
    names = PLUGIN_BACKENDS | BUILTIN_BACKENDS
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file in sorted(CORE.rglob("*.py"))
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Compare | ast.MatchValue)
        if any(isinstance(part, ast.Constant) and part.value in names - others_names(file) for part in ast.walk(node))
    ]
    assert found == []


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_imports_interfaces_and_kit_and_no_other_plugin(plugin: Path) -> None:
    own = f"rlsdk_{plugin.name}"
    oracles = {"testing", "reference", "algorithms", "registry", "sharding", "data", "rewards", "agents"}
    for part, allowed in (("src", {"interfaces", "kit"}), ("tests", {"interfaces", "kit", *oracles})):
        found = [i for file in sorted((plugin / part).rglob("*.py")) for i in imports(file)]
        wrong = [i for i in found if i.top == "rlsdk" and i.room not in allowed and i.module not in NAMED]
        wrong += [i for i in found if i.top.startswith("rlsdk_") and i.top != own]
        assert shown(wrong) == []


def _declared(files: list[Path], of: str) -> set[str]:
    """Names of the fields of all classes whose name matches."""
    classes = [node for file in files for node in parse(file).body if isinstance(node, ast.ClassDef)]
    return {
        statement.target.id
        for found in classes
        if re.fullmatch(of, found.name)
        for statement in found.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _read(files: list[Path]) -> set[str]:
    return {node.attr for file in files for node in ast.walk(parse(file)) if isinstance(node, ast.Attribute)}


def test_every_field_of_the_configuration_is_read_by_somebody() -> None:
    carried = _declared([CORE / "interfaces" / "settings.py"], r"[A-Z]\w+")
    fields = _declared(files_of("config"), r"\w+Config") - carried
    others = [
        CORE / "config" / name
        for name in (
            "sections/old_log_probs.py",
            "derived/auto_values.py",
            "derived/roles.py",
            "derived/specs.py",
            "sections/evaluation.py",
            "sections/preferences.py",
        )
    ]
    read = _read([*files_of("trainer"), *files_of("api"), *files_of("cli"), *others])
    kinds = parse(CORE / "config" / "sections" / "role_kinds.py")
    named = [node.value for node in ast.walk(kinds) if isinstance(node, ast.keyword) and node.arg == "section"]
    read |= {value.value for value in named if isinstance(value, ast.Constant)}
    assert len(fields) > 80
    assert sorted(fields - read) == []
    # Those of `rlsdk.interfaces.settings` reach whoever reads them without being named on the way.
    assert len(carried) > 30
    assert sorted(carried - _read([*files_of("kit"), *files_of("rewards"), *files_of("reference")])) == []


def entry_modules(plugin: Path) -> list[str]:
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    return [value.partition(":")[0] for value in project["entry-points"]["rlsdk"].values()]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_the_entry_module_of_a_plugin_loads_no_engine(plugin: Path) -> None:
    modules = entry_modules(plugin)
    assert modules
    assert loaded_by(modules, plugin / "src") == []


def test_no_docstring_holds_a_lone_surrogate() -> None:
    """Python 3.13.0 refuses to compile one: it encodes docstrings."""
    sources = [*CORE.rglob("*.py"), *(ROOT / "plugins").rglob("src/**/*.py"), *(ROOT / "tools").rglob("*.py")]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [(file, ast.get_docstring(node, clean=False)) for file in sources for node in ast.walk(parse(file))
             if isinstance(node, documented)]  # fmt: skip
    assert len(texts) > 5000
    assert [str(file) for file, text in texts if text and any("\ud800" <= char <= "\udfff" for char in text)] == []


@pytest.mark.parametrize(
    "module",
    [
        "rlsdk",
        "rlsdk.interfaces",
        "rlsdk.registry",
        "rlsdk.builtin",
        "rlsdk.diagnosis",
        "rlsdk.api",
        "rlsdk.cli.commands",
    ],
)
def test_what_every_command_needs_loads_neither_torch_nor_ray(module: str) -> None:
    assert loaded_by([module]) == []


def loaded_by(modules: list[str], *path: Path) -> list[str]:
    """The heavy packages that importing these modules loads, in a fresh interpreter."""
    heavy = sorted({"torch", "ray", "transformers", "datasets", "numpy", *ENGINES})
    code = (
        f"import sys; sys.path[:0] = {[str(folder) for folder in (*path, ROOT)]!r}\n"
        f"import {', '.join(modules)}\n"
        f"print(*[name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
