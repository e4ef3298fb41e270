"""Which engines' suites run in full: those whose inputs are not the ones that the landing's parent has a report of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from .changes import Parent, blobs_at, blobs_now, changed, digest, git, head_of, summary

SHARED = (
    "rlsdk/interfaces", "rlsdk/kit", "rlsdk/registry", "rlsdk/sharding", "rlsdk/system", "rlsdk/testing",
    "rlsdk/__init__.py", "rlsdk/builtin.py", "rlsdk/moved.py", "rlsdk/version.py", "pyproject.toml", "conftest.py",
    ".ci", "tools/environment.py", "tools/landing", "tools/run_tests.py",
)  # fmt: skip
"""What the result of every suite of `INPUTS` depends on. Not `rlsdk/config`, which describes a backend's options: the
requirement that reads them is basic."""
CORE_PINS = "tools/tested.txt"
BUILTIN = ("rlsdk/reference", "tests/testing/test_own.py", CORE_PINS)
INPUTS: dict[str, Sequence[str]] = {
    "torch": BUILTIN,
    "transformers": BUILTIN,
    "fsdp": ("plugins/fsdp", CORE_PINS),
    "megatron": ("plugins/megatron", "plugins/vllm/overrides.txt"),
    # Their tests run in Megatron's environment.
    "deepspeed": ("plugins/deepspeed", "plugins/megatron/tested.txt", "plugins/vllm/overrides.txt"),
    "vllm": ("plugins/vllm", "plugins/megatron/tested.txt"),
    "sglang": ("plugins/sglang",),
}
"""Engine -> what its suite's result depends on besides `SHARED`: its sources, its tests and its pins."""
PUBLISHED = "published"
"""The engines that `tests/isolated` builds and installs: those that `rlsdk plugins new` writes, and an example."""
UNREPORTED: dict[str, Sequence[str]] = {
    PUBLISHED: ("rlsdk/cli/plugin_tools", "examples/third_party", "tests/isolated", CORE_PINS),
}
"""As `INPUTS`, but all that the result depends on, of engines whose reports are not kept: the landing that changed an
input ran their suites in full. What they share with the built-in engines, whose suites run in full where that changed,
is none of them."""
REPORTS = "docs/conformance"
STAMP = "inputs"
"""Key in a report: of which inputs it is."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Whether the suite of an engine runs in full."""

    engine: str
    full: bool
    why: str
    """What it is decided by, as a person reads it behind the engine's name."""


def tier_of(root: Path, engine: str, parent: Parent) -> Tier:
    """Full, unless nothing changed since the landing's parent, which has a report of these inputs.

    The parent's report alone would not do: it could name inputs that only this landing has. Its files alone would not
    either: that they passed is known where the suite ran in full at the landing that changed them, and left its report.
    """
    if why := _why_full(root, engine, parent):
        return Tier(engine=engine, full=True, why=why)
    if engine in UNREPORTED:
        last = git(root, "log", "-1", "--format=%cs (commit %h)", str(parent.commit), "--", *_paths(engine))
        return Tier(engine=engine, full=False, why=f"inputs unchanged since {last}; `make test FLAGS=--whole` runs all")
    stamp = _stamp(root, engine, parent)
    return Tier(
        engine=engine,
        full=False,
        why=f"inputs unchanged since its report of {stamp['date']} (commit {stamp['commit']}); `make check-{engine}` "
        "runs all of it",
    )


def _why_full(root: Path, engine: str, parent: Parent) -> str:
    """Why the suite runs in full; empty: it need not."""
    if parent.commit is None:
        return parent.why
    now, before = blobs_now(root, _paths(engine)), blobs_at(root, parent.commit, _paths(engine))
    if files := changed(before, now):
        return f"changed since {parent.short}: {summary(files)}"
    if engine not in UNREPORTED and _stamp(root, engine, parent).get("digest") != digest(now):
        return (
            f"its report in {parent.short} is of other inputs; run `make check-{engine}`, and commit "
            f"{REPORTS}/{engine}.json"
        )
    return ""


def _stamp(root: Path, engine: str, parent: Parent) -> Mapping[str, str]:
    """Of which inputs the parent's report is; empty where it does not say so, or is not of a suite that passed."""
    text = git(root, "show", f"{parent.commit}:{REPORTS}/{engine}.json")
    try:
        document: Any = json.loads(text or "{}")
        stamp = document[STAMP] if _is_whole(document) else {}
        return {key: str(stamp[key]) for key in ("digest", "date", "commit")}
    except (ValueError, KeyError, TypeError):
        return {}


def _is_whole(document: Any) -> bool:
    """Whether a report is of suites that passed, with nothing left out."""
    suites = document["suites"]
    return bool(suites) and all(suite["passed"] and not suite.get("left_out") for suite in suites)


def _paths(engine: str) -> Sequence[str]:
    return [*SHARED, *INPUTS[engine]] if engine in INPUTS else UNREPORTED[engine]


def digest_of(root: Path, engine: str) -> str:
    """Of the inputs as they are here."""
    return digest(blobs_now(root, _paths(engine)))


def write_stamp(root: Path, engine: str, before: str) -> None:
    """Notes in an engine's report of which inputs it is.

    Args:
        before: the digest before the suite ran.

    Raises:
        ValueError: inputs changed while it ran, or not all of it ran, or something failed.
    """
    file = root / REPORTS / f"{engine}.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    if not _is_whole(document):
        raise ValueError(f"{file.name} is not of a whole suite that passed")
    if (now := digest_of(root, engine)) != before:
        raise ValueError(f"inputs of {engine}'s suite changed while it ran; run `make check-{engine}` once more")
    document[STAMP] = {"digest": now, "date": date.today().isoformat(), "commit": head_of(root)[:8]}
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
