"""Links of the documentation lead somewhere, also where the site itself cannot be built."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
sys.path.insert(0, str(ROOT / "tools"))

from docs_hooks import FIELDS, anchor_of, on_page_markdown  # noqa: E402


def page(file: Path) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=file.relative_to(DOCS).as_posix()))


def anchors(file: Path) -> set[str]:
    """Of the headings, as the site makes them."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {anchor_of(title) for title in titles}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.relative_to(DOCS).as_posix())
def test_links_of_a_page_lead_somewhere(file: Path) -> None:
    text = on_page_markdown(file.read_text(), page=page(file))
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target, _, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(#([^)]*))?\)", text):
        found = (file.parent / target).resolve() if target else file
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{target}#{anchor}"


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_the_readme_of_an_index_has_no_link_into_the_repository() -> None:
    pytest.importorskip("hatchling")
    from index_readme import for_index

    text = (ROOT / "README.md").read_text()
    assert re.findall(r"\]\((?!https?://)", for_index(text, None)) == []
    links = re.findall(r"\]\(([^)]+)\)", for_index(text, "https://example.org/a/"))
    assert links
    assert [link for link in links if not link.startswith("https://example.org/a/blob/main/")] == []


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == [file.relative_to(DOCS).as_posix() for file in PAGES]
    assert yaml.safe_load("nav:\n" + text)


def test_a_link_out_of_the_repository_or_to_nothing_is_an_error() -> None:
    here = page(DOCS / "running.md")
    assert on_page_markdown("[all of them](../examples/recipes)", page=here) == "all of them (`examples/recipes`)"
    for target in ("../examples/none.py", "../../elsewhere/x.md"):
        with pytest.raises(ValueError, match="not in the repository"):
            on_page_markdown(f"[x]({target})", page=here)


def test_the_reference_has_every_field_with_its_meaning() -> None:
    text = on_page_markdown(FIELDS, page=page(DOCS / "reference" / "configuration.md"))
    assert "**`trainer.prompts_per_step`** int, default `64`" in text
    assert text.count("**`") > 150
