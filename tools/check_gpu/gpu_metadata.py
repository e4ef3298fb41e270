"""Makes a checkout discoverable without installing it: the metadata that an installation would have written."""

from __future__ import annotations

import tomllib
from pathlib import Path


def expose(project: Path, source: Path, into: Path) -> None:
    """Writes the name, version and entry points of a project of this checkout as a `.dist-info` folder.

    Args:
        project: folder with `pyproject.toml`.
        source: folder that its packages are imported from.
        into: a folder on the import path.
    """
    about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = into / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    requires = "".join(f"Requires-Dist: {line}\n" for line in about.get("dependencies", ()))
    head = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (folder / "METADATA").write_text(head + requires, encoding="utf-8")
    groups = about.get("entry-points", {})
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    # Not a file of an installer's: whoever reads it finds where the code is.
    (folder / "direct_url.json").write_text(f'{{"url": "{source.resolve().as_uri()}"}}', encoding="utf-8")
