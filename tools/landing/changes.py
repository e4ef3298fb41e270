"""The commit before a landing, and the files that differ between it and this tree, as git sees them."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LANDING_PARENT"
"""Environment variable that names the commit before a landing."""
REMOTE = ("origin/HEAD", "origin/main")
"""Where a clone has what was landed before."""
NOTED = "tests/landed.txt"
"""The commit that main was at when this landing began, for a clone in which `origin` is the landing itself."""
SHORT = 8
"""Characters of a commit in messages."""
NAMED = 4
"""Most folders named in a message."""


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The commit before a landing of one or many commits, which was tested when it was landed."""

    commit: str | None
    """None: not known; then nothing counts as unchanged."""
    why: str = ""
    """Why it is not known."""

    @property
    def short(self) -> str:
        return (self.commit or "")[:SHORT]


def find_parent(root: Path, named: str | None = None) -> Parent:
    """The commit before this landing: `named`, else `$LANDING_PARENT`, else where the branch left `origin`'s.

    HEAD's own parent is never taken for it: a landing of many commits could change an engine in one of them and skip
    its suite in the next. For the same reason HEAD itself is not, which is what a fresh clone of the landing names:
    there the landing's first commit says it (`NOTED`).
    """
    if given := named or os.environ.get(VARIABLE, ""):
        return _checked(root, given, f"{given!r}, given as the commit before this landing,")
    unknown = f"no commit before this landing is known: {VARIABLE} is not set and no origin is there"
    for name in REMOTE:
        if base := git(root, "merge-base", "HEAD", name):
            left = _checked(root, base, f"{name}, from which this clone came,")
            if left.commit:
                return left
            unknown = left.why
            break
    return _noted(root, unknown)


def _noted(root: Path, unknown: str) -> Parent:
    """The commit that `NOTED` names, if the commit that wrote it was made right on that one.

    A landing that did not write it is compared with an earlier commit, and more runs.
    """
    name = (git(root, "show", f"HEAD:{NOTED}") or "").strip()
    if not name:
        return Parent(commit=None, why=unknown)
    if git(root, "log", "-1", "--format=%P", "--", NOTED) != name:
        return Parent(commit=None, why=f"{NOTED} names {name[:SHORT]}, but not the commit that it was written on")
    return _checked(root, name, f"{name[:SHORT]}, named in {NOTED},")


def begin(root: Path) -> str:
    """Writes into `NOTED` that a landing begins on HEAD; to be committed before anything else.

    Raises:
        ValueError: something else was changed already, or this is no repository.
    """
    head = head_of(root)
    if not head or git(root, "status", "--porcelain", "--untracked-files=no"):
        raise ValueError(f"{NOTED} is written in a repository without changes: commit or put them away first")
    (root / NOTED).write_text(f"{head}\n", encoding="utf-8")
    return head


def _checked(root: Path, name: str, what: str) -> Parent:
    """The commit of this name, if the landing is built on it and more than it."""
    head, commit = (git(root, "rev-parse", "--verify", "--quiet", f"{of}^{{commit}}") for of in ("HEAD", name))
    if not commit:
        return Parent(commit=None, why=f"{what} is no commit of this clone; a shallow one may lack it")
    if commit == head:
        return Parent(commit=None, why=f"{what} is the landing itself; set {VARIABLE} to the commit before it")
    if git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return Parent(commit=None, why=f"{what} is not known to be an ancestor of this landing")
    return Parent(commit=commit)


def head_of(root: Path) -> str:
    """The commit that is checked out; empty outside a repository."""
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD") or ""


def blobs_at(root: Path, commit: str, paths: Sequence[str]) -> dict[str, str]:
    """File -> git's hash of its contents, in a commit, of files and folders.

    Raises:
        OSError: the commit cannot be read.
    """
    said = git(root, "ls-tree", "-r", "-z", "--full-tree", commit, "--", *paths)
    if said is None:
        raise OSError(f"git cannot list {commit} in {root}")
    entries = (line.partition("\t") for line in said.split("\0") if line)
    return _kept({path: about.split()[2] for about, _, path in entries})


def blobs_now(root: Path, paths: Sequence[str]) -> dict[str, str]:
    """As `blobs_at`, of the files that are here, including those that git does not have yet and does not ignore.

    Raises:
        OSError: this is no repository.
    """
    said = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths)
    if said is None:
        raise OSError(f"{root} is no git repository")
    files = [path for path in dict.fromkeys(said.split("\0")) if path and (root / path).is_file()]
    hashes = git(root, "hash-object", "--stdin-paths", given="".join(f"{path}\n" for path in files))
    if hashes is None:
        raise OSError(f"git cannot read the files of {root}")
    return _kept(dict(zip(files, hashes.split(), strict=True)))


def _kept(blobs: Mapping[str, str]) -> dict[str, str]:
    """Without what no test reads."""
    return {path: blob for path, blob in blobs.items() if not path.endswith((".md", "LICENSE"))}


def digest(blobs: Mapping[str, str]) -> str:
    """One text for the names and contents of files."""
    return hashlib.sha256("".join(f"{path} {blobs[path]}\n" for path in sorted(blobs)).encode()).hexdigest()


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> frozenset[str]:
    """Files that are new, gone, or have other contents."""
    return frozenset(path for path, blob in {**before, **now}.items() if before.get(path) != blob or path not in now)


def summary(files: Iterable[str]) -> str:
    """`rlsdk/kit (3 files), plugins/vllm (1 file)`."""
    counts = Counter("/".join(file.split("/")[:2]) for file in files)
    shown = [f"{where} ({number} file{'s' * (number > 1)})" for where, number in counts.most_common(NAMED)]
    return ", ".join([*shown, *([f"{len(counts) - NAMED} more"] if len(counts) > NAMED else [])])


def git(root: Path, *words: str, given: str | None = None) -> str | None:
    """What git says, without the last line break; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], input=given, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
