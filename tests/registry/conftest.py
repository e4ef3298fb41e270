"""Real plugins, installed as Python sees it: a module and a `.dist-info` folder on `sys.path`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_plugins import Install


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions; what is imported from it is forgotten afterwards."""
    monkeypatch.delenv("RLSDK_PLUGINS", raising=False)
    monkeypatch.delenv("RLSDK_DISABLE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """`install(distribution, source, module=..., entry=..., version=...)` installs a plugin of one module."""

    def install_plugin(
        distribution: str, source: str, *, module: str = "", entry: str = "", version: str = "1.0", points: str = ""
    ) -> Path:
        module = module or distribution.replace("-", "_")
        (site / f"{module}.py").write_text(source)
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(points or f"[rlsdk]\n{entry or distribution} = {module}\n")
        importlib.invalidate_caches()
        return info

    return install_plugin
