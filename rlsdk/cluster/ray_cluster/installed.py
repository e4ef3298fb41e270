"""Which versions of packages an interpreter has. Standard library only: its text is run in other environments, too."""

from __future__ import annotations

import platform
import re
from importlib.metadata import distributions

SHARED = ("ray", "rlsdk", "numpy", "torch", "transformers", "safetensors")
"""Packages that every worker imports."""
GROUP = "rlsdk"
"""Entry points of plugins: `ENTRY_POINT_GROUP`, which other environments may not have."""


def installed() -> dict[str, str | None]:
    """Versions of Python, of `SHARED`, of every plugin, and of the packages that a plugin requires directly, as its
    engine; None: missing. Imports none of them but `rlsdk`, whose version counts and not that of its metadata."""
    versions: dict[str, str] = {}
    wanted = set(SHARED)
    for one in distributions():
        name = _plain(one.metadata["Name"] or "")
        versions.setdefault(name, one.version)
        if name != "rlsdk" and any(entry.group == GROUP for entry in one.entry_points):
            needs = (text for text in one.requires or () if "extra ==" not in text)
            wanted |= {name, *(_plain(re.split(r"[^\w.-]", text.strip(), maxsplit=1)[0]) for text in needs)}
    found = {name: versions.get(name) for name in sorted(wanted)}
    try:
        from rlsdk.version import __version__

        found["rlsdk"] = __version__
    except ImportError:
        found["rlsdk"] = None
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
