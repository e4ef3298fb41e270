"""What the documentation site is made of besides its pages: fields of the configuration, links into the repository."""

from __future__ import annotations

import html
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIELDS = "<!-- fields -->"
_OUTWARD = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fills in the fields; a link to a file of the repository becomes its path, which must be there."""
    if FIELDS in markdown:
        markdown = markdown.replace(FIELDS, "\n".join(field_lines()))
    folder = posixpath.dirname(page.file.src_uri)
    return _OUTWARD.sub(lambda found: _inward(found, folder), markdown)


def _inward(found: re.Match[str], folder: str) -> str:
    text, target = found[1], posixpath.normpath(posixpath.join("docs", folder, found[2]))
    if target.startswith("docs/"):
        return found[0]
    if target.startswith("..") or not (ROOT / target).exists():
        raise ValueError(f"a link leads to {target!r}, which is not in the repository")
    bare = text.strip("`")
    return f"`{target}`" if bare in (target, posixpath.basename(target)) else f"{text} (`{target}`)"


def field_lines() -> Iterator[str]:
    """A heading for each section, and its fields with type, default and meaning."""
    sys.path.insert(0, str(ROOT))  # here: mkdocs puts the path back once it has loaded this file
    from rlsdk.config import RunConfig
    from rlsdk.config.introspection.describe import describe_options

    section = ""
    for option in describe_options(RunConfig):
        name = option.path.partition(".")[0]
        if name != section:
            section = name
            yield f"\n## {name}\n\n{RunConfig.model_fields[name].description}\n"
        default = f", default `{option.default}`" if option.default else ", required"
        yield f"**`{option.path}`** {html.escape(option.type)}{default}  "
        yield f"{html.escape(option.doc)}\n"
