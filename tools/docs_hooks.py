"""What the documentation site is made of besides its pages: fields of the configuration, the changelog, an index of all
headings, links into the repository."""

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
CHANGELOG = "<!-- changelog -->"
TOPICS = "<!-- topics -->"
_FILE = re.compile(r"<!-- file: ([\w/.]+) -->")
"""Where a file of the repository is shown whole."""
_OUTWARD = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fills in what is generated; a link to a file of the repository becomes its path, which must be there."""
    if FIELDS in markdown:
        markdown = markdown.replace(FIELDS, "\n".join(field_lines()))
    if CHANGELOG in markdown:
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        markdown = markdown.replace(CHANGELOG, text.replace("](docs/", "]("))
    if TOPICS in markdown:
        markdown = markdown.replace(TOPICS, "\n".join(topic_lines()))
    markdown = _FILE.sub(lambda found: _whole(found[1]), markdown)
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


def _whole(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return f'```python title="{posixpath.basename(name)}"\n{text.rstrip()}\n```'


def topic_lines() -> Iterator[str]:
    """A heading for each letter, and under it a link to every heading of a page that begins with it."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "docs").rglob("*.md")):
        page = file.relative_to(ROOT / "docs").as_posix()
        text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        titles = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
        for title in titles:
            name = re.sub(r"[`*]", "", title)
            around = f" ({titles[0]})" if title != titles[0] else ""
            found.setdefault(name, []).append(f"[{name}]({page}#{anchor_of(title)}){around}")
    letter = ""
    for name in sorted(found, key=str.casefold):
        first = name[0].upper() if name[0].isalpha() else "0-9"
        if first != letter:
            letter = first
            yield f"\n## {letter}\n"
        yield from (f"- {line}" for line in found[name])


def anchor_of(title: str) -> str:
    """Where the site puts a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


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
