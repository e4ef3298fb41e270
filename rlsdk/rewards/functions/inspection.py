"""Inspects the source of a reward function before the run starts any process, without running the function.

The grading process loads the function later and finds further errors.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.interfaces.spelling import called
from rlsdk.registry import python_file
from rlsdk.rewards.functions.signatures import Form, check_form, form_of, parameters_of


def inspect_target(target: str, options: Mapping[str, Any] | None = None) -> Form:
    """Returns the form of the function that `target` names, as far as its source shows.

    Args:
        target: `pkg.mod:fn` or `path/file.py:fn`.
        options: keyword arguments of its calls.

    Raises:
        ConfigError: the file, module or function does not exist (the message gives the nearest name), the source is not
            valid Python, or the signature does not accept the call.
    """
    label = f"reward {called(target)!r}"
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{label}: expected pkg.mod:function or path/file.py:function")
    path = python_file(Path(where), label) if where.endswith(".py") else _module(where, label)
    if path is None:
        return Form.OWN  # not written in Python: checked by the grading process
    tree = _parsed(path, label)
    node = _definition(tree, path, name, label)
    _check_imports(tree, path, label)
    return (
        _form(node, options or {}, label) if isinstance(node, ast.FunctionDef) and not node.decorator_list else Form.OWN
    )


def _module(name: str, label: str) -> Path | None:
    """Returns the source file of a module without importing it; None if it has none."""
    places: Sequence[str] | None = [*sys.path, str(Path.cwd())]
    spec = None
    for at, _ in enumerate(parts := name.split("."), 1):
        whole = ".".join(parts[:at])
        spec = importlib.machinery.PathFinder.find_spec(whole, places)
        if spec is None and whole in sys.builtin_module_names | sys.modules.keys():
            return None
        if spec is None:
            raise ConfigError(
                f"{label}: no module {whole!r}. Is it installed, or in the current folder? A file is given as "
                "path/file.py:function"
            )
        places = spec.submodule_search_locations
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _parsed(path: Path, label: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigError(f"{label}: {path}:{error.lineno} is not valid Python: {error.msg}: {line[:80]}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{label}: {str(path)!r} cannot be read as Python: {error}") from error


def _check_imports(tree: ast.Module, path: Path, label: str) -> None:
    """Refuses a file whose first statements import a missing package.

    Only imports before any other statement are checked: later ones may depend on one, such as a change of `sys.path`.
    Nothing is imported, so errors inside a package are not found.
    """
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the docstring
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module is not None and not node.level else []
        else:
            return
        for name in names:
            package = name.partition(".")[0]
            if not _is_there(package):
                raise ConfigError(
                    f"{label}: {path}:{node.lineno} imports {name!r}, but there is no module {package!r} here. Is it "
                    f"installed in {sys.prefix}?"
                )


def _is_there(package: str) -> bool:
    """Whether the grading process can find a package; imports nothing."""
    if package in sys.stdlib_module_names or package in sys.modules:
        return True
    here = [str(Path.cwd())]
    spec = importlib.util.find_spec(package) or importlib.machinery.PathFinder.find_spec(package, here)
    return spec is not None


def _definition(tree: ast.Module, path: Path, name: str, label: str) -> ast.AST | None:
    """Returns the definition of a top-level name in a file; None if the source does not show it."""
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name in defined:
        return defined[name]
    elsewhere = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    imported = {
        a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names
    }
    nested = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.AsyncFunctionDef | ast.FunctionDef)}
    if name in elsewhere | imported | nested or "*" in imported or "__getattr__" in defined:
        return None
    public = sorted(each for each in defined if not each.startswith("_"))
    raise ConfigError(f"{label}: no function {name!r}{nearest(name, public)}; {path} has {public}")


def _form(node: ast.FunctionDef, options: Mapping[str, Any], label: str) -> Form:
    """Returns the form of a function, and checks that its signature accepts such a call."""
    signature = _signature(node)
    named, takes_any = parameters_of(signature)
    form = form_of(named)
    if form is not Form.OWN:
        check_form(form, named, takes_any=takes_any, options=options, label=label)
        return form
    for option in options:
        if option not in list(named)[1:] and not takes_any:
            own = list(named)[1:]
            raise ConfigError(f"{label} has no option {option!r}{nearest(option, own)}; it has {own or 'none'}")
    try:
        signature.bind("sample", **options)
    except TypeError as error:
        raise ConfigError(
            f"{label} is called as fn(sample, **options) with options {sorted(options)}, but its signature is "
            f"{node.name}({ast.unparse(node.args)}): {error}. TRL's fn(prompts, completions, **columns) and verl's "
            "fn(data_source, solution_str, ground_truth, extra_info) are recognised, too"
        ) from error
    return form


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    kinds, arguments = inspect.Parameter, node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    made = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if at < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if at < required else None,
        )
        for at, argument in enumerate(positional)
    ]
    if arguments.vararg:
        made.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        made.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        made.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)
