"""Checks of the interpreter, and of the packages that rlsdk and its engines need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlsdk.diagnosis.finding import Finding, Health
from rlsdk.diagnosis.probe import Answer, ask

CORE = "rlsdk"
PYTHONS = ">=3.11,<3.14"
"""Supported versions of Python if the distribution's metadata is unavailable."""
IMPORT_TIMEOUT_S = 180.0
RAY = "import ray\nanswer(version=ray.__version__)"
TORCH = """
import torch
found = torch.ones(64, 64) @ torch.ones(64, 64)
gpus, why = [], ""
try:
    for at in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(at)
        gpus.append([about.name, about.total_memory])
    if gpus:
        float((torch.ones(64, 64, device="cuda:0") @ torch.ones(64, 64, device="cuda:0")).sum())
    elif torch.version.cuda:
        torch.cuda.init()
except Exception as error:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
answer(version=torch.__version__, cuda=torch.version.cuda, gpus=gpus, why=why, right=float(found.sum()) == 64.0**3)
"""
OWN = """
import importlib, importlib.util, os, pkgutil, traceback
home = os.path.dirname(importlib.util.find_spec("rlsdk").origin) + os.sep
names = ["rlsdk"]
for name in names:
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        places = [place for place in places if not place.startswith("<")][-1:] + [str(getattr(error, "filename", ""))]
        own = any(place.startswith(home) for place in places)
        answer(failed=name, error=f"{type(error).__name__}: {error}", own=own)
        break
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        if found.name not in ("rlsdk.testing", "rlsdk.__main__", "rlsdk.cli.__main__"):
            names.append(found.name)
else:
    answer(count=len(names))
"""
"""Imports what a run imports: every module but the conformance suites, which need pytest."""


def install(*requirements: str) -> str:
    """The command that installs into this interpreter's environment, for the tool with which it was made."""
    what = " ".join(map(shlex.quote, requirements))
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is not None:
        return f"{python} -m pip install {what}"
    if shutil.which("uv"):
        return f"uv pip install --python {python} {what}"
    return f"{python} -m ensurepip && {python} -m pip install {what}"


def interpreter(version: str | None = None, supported: str | None = None) -> Finding:
    """Whether this Python is one that rlsdk supports.

    Args:
        version: of the interpreter; None: of this one.
        supported: versions that rlsdk supports; None: as its metadata says.
    """
    version = version or platform.python_version()
    supported = supported or _supported()
    found = f"{platform.python_implementation()} {version} at {sys.executable}"
    if SpecifierSet(supported).contains(version, prereleases=True):
        return Finding(check="interpreter", state=Health.OK, found=found)
    return Finding(
        check="interpreter",
        state=Health.FAULT,
        found=f"{found}; rlsdk supports {supported}",
        fix=f"uv venv --python 3.12 .venv && uv pip install --python .venv/bin/python {CORE}",
    )


def requirements(declared: Iterable[str] | None = None) -> Iterator[Finding]:
    """One finding for all packages that meet the requirements, and one for each that is missing or of another
    version.

    Args:
        declared: requirements as metadata spells them; None: those of rlsdk.
    """
    if declared is None:
        try:
            declared = importlib.metadata.requires(CORE) or ()
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                check="packages",
                state=Health.WARNING,
                found="rlsdk runs from a folder and is not installed: its requirements and plugins are not known",
                fix=install("-e", "."),
            )
            return
    right = 0
    for text in declared:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        bare = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(check=requirement.name, state=Health.FAULT, found="not installed", fix=install(bare))
            continue
        if requirement.specifier.contains(version, prereleases=True):
            right += 1
        else:
            said = f"version {version}, but rlsdk needs {requirement.specifier}"
            yield Finding(check=requirement.name, state=Health.FAULT, found=said, fix=install(bare))
    if right:
        yield Finding(check="packages", state=Health.OK, found=f"{right} of rlsdk's requirements as they should be")


def ray(answer: Answer | None = None) -> Finding:
    """Checks whether Ray can be imported. Does not start it, which would take devices from their users."""
    answer = ask(RAY, timeout_s=IMPORT_TIMEOUT_S) if answer is None else answer
    if answer.facts is None:
        return _cannot_import("ray", answer.error)
    return Finding(check="ray", state=Health.OK, found=f"imports, version {answer.facts['version']}")


def own(answer: Answer | None = None) -> Finding:
    """Checks whether every module of rlsdk itself can be imported, as a run does.

    Args:
        answer: to `OWN`; None: asked now.
    """
    answer = ask(OWN, timeout_s=IMPORT_TIMEOUT_S) if answer is None else answer
    if answer.facts is None:
        return _cannot_import(CORE, answer.error)
    if "failed" not in answer.facts:
        return Finding(check=CORE, state=Health.OK, found=f"imports, all {answer.facts['count']} modules")
    said = f"{answer.facts['failed']} cannot be imported: {answer.facts['error']}"
    # The fault of a package that it needs has its own finding.
    fix = install("--force-reinstall", CORE) if answer.facts["own"] else ""
    return Finding(check=CORE, state=Health.FAULT, found=said, fix=fix)


def torch(num_gpus: int, answer: Answer | None = None) -> Iterator[Finding]:
    """Checks whether torch can be imported, computes, and sees the GPUs.

    Args:
        num_gpus: NVIDIA GPUs that the system shows and this process may use.
        answer: to `TORCH`; None: asked now.
    """
    answer = ask(TORCH, timeout_s=IMPORT_TIMEOUT_S) if answer is None else answer
    if answer.facts is None:
        yield _cannot_import("torch", answer.error)
        return
    facts = answer.facts
    build = f"for CUDA {facts['cuda']}" if facts["cuda"] else "without CUDA"
    if not facts["right"]:
        again = install("--force-reinstall", "torch")
        yield Finding(check="torch", state=Health.FAULT, found="a product of matrices came out wrong", fix=again)
        return
    yield Finding(check="torch", state=Health.OK, found=f"imports and computes, version {facts['version']}, {build}")
    yield _devices(num_gpus, facts["gpus"], facts["cuda"], facts["why"])


def _devices(num_gpus: int, seen: list[tuple[str, int]], cuda: str | None, why: str) -> Finding:
    if not num_gpus and not seen:
        return Finding(check="devices", state=Health.OK, found="no GPU: runs go on the CPU")
    if why or len(seen) < num_gpus:
        if cuda is None:
            said = f"{num_gpus} GPUs, but torch is built without CUDA"
            fix = install("--force-reinstall", "torch", "--index-url", "https://download.pytorch.org/whl/cu128")
        else:
            said = f"{num_gpus} GPUs, of which torch can use {0 if why else len(seen)}" + (f": {why}" if why else "")
            fix = "nvidia-smi  # does not list them either: install the driver; else install a torch for its version"
        return Finding(check="devices", state=Health.FAULT, found=said, fix=fix)
    names = sorted({f"{name} of {size / 2**30:.0f} GiB" for name, size in seen})
    return Finding(check="devices", state=Health.OK, found=f"{len(seen)} GPUs: {', '.join(names)}")


def _cannot_import(name: str, error: str) -> Finding:
    try:
        installed = f"version {importlib.metadata.version(name)} is installed, but its import failed"
    except importlib.metadata.PackageNotFoundError:
        installed = "cannot be imported"
    wanted = next((f"{r.name}{r.specifier}" for r in _declared() if r.name == name), name)
    fix = install("--force-reinstall", wanted)
    return Finding(check=name, state=Health.FAULT, found=f"{installed}: {error}", fix=fix)


def _declared() -> list[Requirement]:
    try:
        return [Requirement(text) for text in importlib.metadata.requires(CORE) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _supported() -> str:
    try:
        return importlib.metadata.metadata(CORE)["Requires-Python"] or PYTHONS
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return PYTHONS
