"""Checks whether interpreters can host workers before a worker is started, which would hang."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlsdk.cluster.ray_cluster import installed
from rlsdk.cluster.ray_cluster.nodes import run_on_nodes
from rlsdk.interfaces import ConfigError
from rlsdk.system.exit_codes import describe_exit
from rlsdk.system.import_path import child_environment

_TIMEOUT_S = 30.0
_MAX_SAID = 200
"""Longest quotation of what an interpreter says, in characters."""
_NEEDED = ("python", "ray", "rlsdk", "numpy")
"""Packages whose version must match the controller's (numpy: the major version only)."""


Versions = Mapping[str, str | None]
RunOnNodes = Callable[..., Sequence[Any]]
"""`run_on_nodes(node_ids, function, *args)`: the function's result on each."""
_on_nodes = partial(run_on_nodes, timeout_s=2 * _TIMEOUT_S)


def check_interpreter(path: str, node_ids: set[str]) -> None:
    """Checks that `path` runs on each of these nodes, has this process's Ray, rlsdk and Python, and a numpy of the
    same major version: Ray speaks to its own version only, and what crosses is pickled.

    Raises:
        ConfigError: it does not, or it is not the same on all nodes; says what it has, what is needed and the command
            that fixes it.
    """
    here = installed.installed()
    here = {name: here[name] for name in _NEEDED}
    nodes = sorted(node_ids)
    by_node: dict[str, Versions] = {}
    for node_id, found in zip(nodes, _on_nodes(nodes, ask_interpreter, path), strict=True):
        if isinstance(found, str):
            raise ConfigError(
                f"interpreter {path!r} does not run on node {node_id[:8]}: {found}; give the path of python in an "
                "environment that exists on every node"
            )
        if _comparable({name: found[name] for name in here}) != _comparable(here):
            raise ConfigError(_difference(path, found, here))
        by_node[node_id] = found
    _check_equal(by_node, f"interpreter {path!r} has")


def check_nodes(node_ids: Sequence[str], run_on_nodes: RunOnNodes) -> None:
    """Compares what nodes have installed in the interpreter of their own Ray: ranks of one engine must not differ.

    Args:
        node_ids: those that have workers under it.
        run_on_nodes: calls `installed` there, in a process of the node's Ray.

    Raises:
        ConfigError: a package has several versions, or is missing on some of the nodes; names each, with the nodes.
    """
    found = run_on_nodes(node_ids, installed.installed)
    _check_equal(dict(zip(node_ids, found, strict=True)), "the nodes of this run have")


def ask_interpreter(path: str) -> Versions | str:
    """Versions in an environment (see `installed`), or the reason why they cannot be read."""
    question = f"{inspect.getsource(installed)}\nimport json\nprint(json.dumps(installed()))"
    try:
        done = subprocess.run(
            [path, "-P", "-c", question],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        last = (done.stdout.splitlines() or [""])[-1]  # whatever its environment prints at the start comes before
        found: Versions = dict(json.loads(last))
    except subprocess.TimeoutExpired:
        return f"it gave no answer within {_TIMEOUT_S:g} s"
    except subprocess.CalledProcessError as error:
        return _end_of(error)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, TypeError):
        return f"asked for its packages, it answered {last[:_MAX_SAID]!r}" if last else "it ended without an answer"
    return found


def _end_of(error: subprocess.CalledProcessError) -> str:
    how = describe_exit(error.returncode)
    said = (error.stderr or "").strip().splitlines()
    return f"it ended with {how}{f': {said[-1][:_MAX_SAID]}' if said else ' and said nothing'}"


def _check_equal(by_node: Mapping[str, Versions], who: str) -> None:
    names = sorted({name for versions in by_node.values() for name in versions})
    faults = []
    for name in names:
        nodes: dict[str | None, list[str]] = {}
        for node_id, versions in by_node.items():
            nodes.setdefault(versions.get(name), []).append(node_id[:8])
        if len(nodes) > 1:
            where = (f"{version or 'missing'} on {', '.join(those)}" for version, those in nodes.items())
            faults.append(f"{name} {'; '.join(where)}")
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ConfigError(
            f"{who} different packages, and workers of one run must have the same:{lines}\n"
            "install one version of each on all nodes; `ray list nodes` shows which node is which"
        )


def _comparable(versions: Versions) -> dict[str, str | None]:
    """The pickle format of arrays is fixed within a major version of numpy."""
    return {**versions, "numpy": (versions["numpy"] or "").partition(".")[0]}


def _difference(path: str, found: Versions, here: Versions) -> str:
    has = ", ".join(f"{name} {found[name] or 'missing'}" for name in here)
    needs = ", ".join(f"{name} {value}" for name, value in here.items())
    numpy = (here["numpy"] or "").partition(".")[0]
    install = f"uv pip install --python {path} ray=={here['ray']} rlsdk=={here['rlsdk']} numpy=={numpy}.*"
    return f"interpreter {path!r} has {has}, but workers need what the controller has: {needs}; run `{install}`"
