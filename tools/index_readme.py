"""The README as a package index shows it, where a link into the repository would lead nowhere: hatchling calls this."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


class IndexReadme(MetadataHookInterface):  # type: ignore[misc]  # hatchling is not installed where types are checked
    """Sets `readme`: links into the repository become links below `project.urls.Source`, or text without it."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, source)}


def for_index(text: str, source: str | None) -> str:
    """The text with every link into the repository under the address `source`; None: there is no address, and the path
    stands beside the link's words."""

    def replaced(found: re.Match[str]) -> str:
        words, path = found[1], found[2]
        if source is not None:
            return f"[{words}]({source.rstrip('/')}/blob/main/{path})"
        return f"`{path}`" if words.strip("`") == path else f"{words} (`{path}`)"

    return _LINK.sub(replaced, text)
