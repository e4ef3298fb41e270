"""Compiles every module on each promised Python that this machine has, and imports all of rlsdk on the newest of them:
`python tools/pythons.py ENVIRONMENT`.

Standard library only. A promised version is one that `requires-python` of pyproject.toml allows. Interpreters are found
as `python3.X` on PATH, by `uv python find`, and among those of pyenv. ENVIRONMENT is the folder of a virtual
environment, which `tools/environment.py` makes (a minute); without one nothing is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("rlsdk", "plugins", "tools", "benchmarks", "examples", "tests")
COMPILE = """
import sys, warnings
warnings.simplefilter("error", SyntaxWarning)
for name in sys.stdin.read().splitlines():
    with open(name, "rb") as file:
        source = file.read()
    try:
        compile(source, name, "exec", dont_inherit=True)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""
IMPORT = """
import importlib, pkgutil, rlsdk
names = ["rlsdk", *(found.name for found in pkgutil.walk_packages(rlsdk.__path__, "rlsdk."))]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(f"imports all {len(names)} modules of rlsdk")
"""
Version = tuple[int, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, nargs="?", help="folder to make the newest Python's environment in")
    args = parser.parse_args()
    promised = promised_versions((ROOT / "pyproject.toml").read_text())
    found = interpreters(promised)
    sources = source_files(ROOT)
    failed = False
    for version, python in sorted(found.items()):
        problems = compile_problems(python, sources)
        print(f"Python {said(version)}: {(problems and 'does not compile:') or f'compiles {len(sources)} modules'}")
        print(problems, end="")
        failed |= bool(problems)
    absent = [f"3.{minor}" for minor in promised if not any(version[1] == minor for version in found)]
    if absent:
        print(f"not checked, as this machine has none: Python {', '.join(absent)}")
    if not found:
        sys.exit("no promised Python was found")
    if args.environment is not None:
        failed |= not imports_all(found[max(found)], args.environment, said(max(found)))
    sys.exit(failed)


def promised_versions(project: str) -> list[int]:
    """The minor versions of Python 3 that `requires-python` allows, written as `>=3.A,<3.B`."""
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", tomllib.loads(project)["project"]["requires-python"])
    if bounds is None:
        sys.exit("requires-python of pyproject.toml: expected the form >=3.A,<3.B")
    return list(range(int(bounds[1]), int(bounds[2])))


def interpreters(promised: list[int]) -> dict[Version, Path]:
    """Every interpreter of a promised version, one a release: a fault may be of one release only."""
    found: dict[Version, Path] = {}
    for candidate in _candidates(promised):
        version = version_of(candidate)
        if version is not None and version[0] == 3 and version[1] in promised:
            found.setdefault(version, candidate)
    return found


def _candidates(promised: list[int]) -> Iterator[Path]:
    yield Path(sys.executable)
    for minor in promised:
        if path := shutil.which(f"python3.{minor}"):
            yield Path(path)
        for uv in filter(None, (shutil.which("uv"), shutil.which("uv", path=str(Path(sys.executable).parent)))):
            command = [uv, "python", "find", "--no-python-downloads", "--no-project", f"3.{minor}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                yield Path(done.stdout.strip())
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob("versions/3.*/bin/python"))


def version_of(python: Path) -> Version | None:
    """Its release; None if it does not run (a shim of pyenv for a version that is not chosen), or is no final one."""
    code = "import sys; v = sys.version_info; print(*v[:3]) if v[3] == 'final' else None"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    parts = done.stdout.split()
    return (int(parts[0]), int(parts[1]), int(parts[2])) if done.returncode == 0 and len(parts) == 3 else None


def source_files(root: Path) -> list[str]:
    """Every module of the repository; templates are none."""
    files = [path for name in SOURCES for path in (root / name).rglob("*.py")]
    return sorted(str(path) for path in files if not {"templates", "node_modules"} & set(path.parts))


def compile_problems(python: Path, sources: list[str]) -> str:
    """A line for each module that this interpreter does not compile."""
    done = subprocess.run(
        [python, "-I", "-c", COMPILE], input="\n".join(sources), capture_output=True, text=True, check=False
    )
    return done.stdout + (f"the interpreter failed: {done.stderr}\n" if done.returncode else "")


def imports_all(python: Path, environment: Path, version: str) -> bool:
    """Makes the environment and imports every module of rlsdk in it."""
    make: list[str | Path] = [python, ROOT / "tools" / "environment.py", environment, "--extras", "check", "--lazy"]
    if subprocess.run(make, check=False).returncode:
        print(f"Python {version}: no environment could be made in {environment}, so nothing was imported")
        return False
    command: list[str | Path] = [environment / "bin" / "python", "-P", "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result = done.stdout if done.returncode == 0 else f"does not import:\n{done.stderr}"
    print(f"Python {version}: {result.strip()}")
    return done.returncode == 0


def said(version: Version) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    main()
