"""Notices that a grading process has loaded other code than the ones before it: a file was edited during the run."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rlsdk.system.files import read_regular

_PACKAGE = str(Path(__file__).parents[2])
_MOST_NAMED = 3


def own_sources() -> dict[str, str]:
    """Digest of every Python file that this process has imported, but for the interpreter's and installed packages."""
    found: dict[str, str] = {}
    for file in set(_imported()):
        with suppress(OSError):
            found[file] = hashlib.blake2b(read_regular(file), digest_size=16).hexdigest()
    return found


def _imported() -> Iterator[str]:
    paths = sysconfig.get_paths()
    installed = tuple(f"{paths[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for module in list(sys.modules.values()):
        with suppress(Exception):  # a module may be any object
            file = str(vars(module).get("__file__") or "")
            if file.endswith(".py") and not file.startswith((*installed, f"{_PACKAGE}/")):
                yield file


class KnownSources:
    """The files that the newest grading process has loaded."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def compare(self, loaded: object) -> str | None:
        """Takes over what a new process says that it has loaded (`own_sources`); returns what is said if that is not
        what others have."""
        loaded = {str(file): str(digest) for file, digest in loaded.items()} if isinstance(loaded, Mapping) else {}
        changed = sorted(file for file, digest in loaded.items() if self._digests.get(file, digest) != digest)
        self._digests |= loaded
        if not changed:
            return None
        more = f" and {len(changed) - _MOST_NAMED} more files" if len(changed) > _MOST_NAMED else ""
        return (
            f"warning: {', '.join(map(repr, changed[:_MOST_NAMED]))}{more} changed while in use: grading processes "
            "that start from now on use the new content, and the others the old one. Put it back; or stop the run and "
            "resume it: what was not trained on is then graded again"
        )
