"""Makes (or refreshes) a virtual environment of this repository: `python tools/environment.py FOLDER [options]`.

Standard library only. Versions come from `tools/tested.txt`, the set that the tests ran with. uv does the installing;
it is put into the environment itself, so nothing outside FOLDER changes. On a machine without an NVIDIA GPU the CPU
build of torch is taken from PyTorch's own index where that can be reached.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = ROOT / "tools" / "tested.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
STAMP = ".rlsdk-stamp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extras", default="", help="extras of rlsdk, comma-separated: test, lint, wandb, mlflow")
    parser.add_argument("--plugins", default="", help="folders under plugins/, comma-separated")
    parser.add_argument("--packages", default="", help="further requirements, comma-separated")
    parser.add_argument("--tested", type=Path, default=TESTED, help="file of exact versions")
    parser.add_argument("--overrides", type=Path, help="file of requirements that replace what packages ask for")
    parser.add_argument("--lazy", action="store_true", help="compile modules when they are first imported, not now")
    args = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        sys.exit(f"rlsdk needs Python 3.11 to 3.13; this is {sys.version.split()[0]}. Run: make PYTHON=python3.12 ...")
    plugins = [name for name in args.plugins.split(",") if name]
    stamp = _stamp(args, plugins)
    stamp_file = args.folder / STAMP
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        return
    python = _create(args.folder)
    _install(python, args, plugins)
    stamp_file.write_text(stamp)


def _stamp(args: argparse.Namespace, plugins: list[str]) -> str:
    """Changes whenever what would be installed changes."""
    digest = hashlib.sha256(f"{sys.version}|{args.extras}|{plugins}|{args.packages}".encode())
    files = [args.tested, ROOT / "pyproject.toml", *(ROOT / "plugins" / p / "pyproject.toml" for p in plugins)]
    for file in (*files, args.overrides) if args.overrides else files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _create(folder: Path) -> Path:
    """An environment with uv in it; a half-made one (no stamp, no interpreter) is made again."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making environment {folder} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
    (folder / STAMP).unlink(missing_ok=True)
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"])
    return python


def _install(python: Path, args: argparse.Namespace, plugins: list[str]) -> None:
    command = [str(python.parent / "uv"), "pip", "install", "--quiet", "--python", str(python)]
    command += ["--constraint", str(args.tested)]
    if not args.lazy:
        # Where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), each process would compile what it imports.
        command.append("--compile-bytecode")
    if args.overrides:
        command += ["--overrides", str(args.overrides)]
    if _torch_index_answers():
        # An exact set of versions of its own names a CPU build.
        command.append(f"--torch-backend={'auto' if args.tested == TESTED else 'cpu'}")
    command += ["--editable", f"{ROOT}[{args.extras}]" if args.extras else str(ROOT)]
    for plugin in plugins:
        command += ["--editable", str(ROOT / "plugins" / plugin)]
    print("installing (a few minutes on a slow line) ...", flush=True)
    packages = [package for package in args.packages.split(",") if package]
    _run([*command, *packages], env={**os.environ, **_pip_settings()})
    sources = [ROOT / "rlsdk", *(ROOT / "plugins" / plugin / "src" for plugin in plugins)]
    _run([str(python), "-m", "compileall", "-q", *map(str, sources)])


def _torch_index_answers() -> bool:
    try:
        with urllib.request.urlopen(TORCH_INDEX, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _pip_settings() -> dict[str, str]:
    """uv does not read pip's environment; a user who set these for pip means them for any installer."""
    pairs = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL", "UV_INDEX": "PIP_EXTRA_INDEX_URL"}
    return {uv: os.environ[pip] for uv, pip in pairs.items() if pip in os.environ and uv not in os.environ}


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    code = subprocess.run(command, env=env, check=False).returncode
    if code:
        sys.exit(f"failed ({code}): {' '.join(command)}")


if __name__ == "__main__":
    main()
