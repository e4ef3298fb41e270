"""Whether an interpreter of another environment can host a worker: asked before one is started, which would hang."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version

from rlsdk import __version__
from rlsdk.cluster.nodes import run_on_node
from rlsdk.interfaces import ConfigError

_TIMEOUT_S = 30.0
_QUESTION = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {"python": ".".join(platform.python_version_tuple()[:2]), "ray": None, "rlsdk": None, "numpy": None}
for name in ("ray", "numpy"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
try:
    import rlsdk
    found["rlsdk"] = rlsdk.__version__
except ImportError:
    pass
print(json.dumps(found))
"""


def check_interpreter(path: str, node_ids: set[str]) -> None:
    """Makes sure that `path` runs on each of these nodes and has this process's Ray, rlsdk and Python, and a numpy of
    the same major version: Ray speaks to its own version only, and what crosses is pickled.

    Raises:
        ConfigError: it does not; says what it has, what is needed and the command that fixes it.
    """
    here: dict[str, str | None] = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "ray": version("ray"),
        "rlsdk": __version__,
        "numpy": version("numpy"),
    }
    for node_id in sorted(node_ids):
        found = run_on_node(node_id, ask_interpreter, path, timeout_s=_TIMEOUT_S)
        if isinstance(found, str):
            raise ConfigError(
                f"interpreter {path!r} does not run on node {node_id[:8]}: {found}; give the path of python in an "
                "environment that exists on every node"
            )
        if _comparable(found) != _comparable(here):
            raise ConfigError(_difference(path, found, here))


def ask_interpreter(path: str) -> Mapping[str, str | None] | str:
    """What an environment has, or why it cannot say."""
    try:
        done = subprocess.run(
            [path, "-P", "-c", _QUESTION], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        found: Mapping[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return found


def _comparable(versions: Mapping[str, str | None]) -> dict[str, str | None]:
    """Arrays are pickled alike within a major version of numpy."""
    return {**versions, "numpy": (versions["numpy"] or "").partition(".")[0]}


def _difference(path: str, found: Mapping[str, str | None], here: Mapping[str, str | None]) -> str:
    has = ", ".join(f"{name} {found[name] or 'missing'}" for name in here)
    needs = ", ".join(f"{name} {value}" for name, value in here.items())
    numpy = (here["numpy"] or "").partition(".")[0]
    install = f"uv pip install --python {path} ray=={here['ray']} rlsdk=={here['rlsdk']} numpy=={numpy}.*"
    return f"interpreter {path!r} has {has}, but workers need what the controller has: {needs}; run `{install}`"
