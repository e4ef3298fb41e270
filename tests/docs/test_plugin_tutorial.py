"""docs/plugin_tutorial.md builds a plugin: its files are taken from the page, and its commands are run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "plugin_tutorial.md"
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CONTINUED = " (continued)"
TIMEOUT_S = 400
PART = "samples or filters or stop_tokens or max_tokens or update or refusals"
"""Of the suite: all of it takes minutes, and tests/isolated runs it on the engine that `rlsdk plugins new` writes."""
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def files(text: str) -> Iterator[tuple[str, str]]:
    """Path and whole text of each file, as often as the page writes it."""
    written: dict[str, str] = {}
    for _, title, body in BLOCK.findall(text):
        if title:
            name = title.removesuffix(CONTINUED)
            written[name] = f"{written[name]}\n{body}" if title.endswith(CONTINUED) else body
            yield name, written[name]


def commands(text: str) -> list[str]:
    """Every command of the page, in order, without its comment."""
    blocks = "".join(body for language, _, body in BLOCK.findall(text) if not language)
    lines = blocks.replace("\\\n", " ").splitlines()
    return [" ".join(line.partition("  #")[0].split()) for line in lines]


def write(folder: Path, text: str) -> None:
    """The files of a part of the page; what an editable install leaves behind stands in `installed/`."""
    for name, body in files(text):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body)
    project = tomllib.loads((folder / "rlsdk-plain" / "pyproject.toml").read_text())["project"]
    info = folder / "installed" / "rlsdk_plain-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    points = project["entry-points"]["rlsdk"]
    (info / "entry_points.txt").write_text("[rlsdk]\n" + "".join(f"{n} = {t}\n" for n, t in points.items()))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], tuple[int, str]]:
    """Runs a command of the page where its plugin is installed: exit code, output."""
    here = [str(tmp_path / "installed"), str(tmp_path / "rlsdk-plain" / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, here)), "OMP_NUM_THREADS": "1", "COLUMNS": "120",
    }  # fmt: skip

    def run(command: str) -> tuple[int, str]:
        line = command.replace("rlsdk ", f"{sys.executable} -m rlsdk.cli ", 1)
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_page_s_plugin_is_listed_checked_refused_a_false_claim_and_trained_with(
    tmp_path: Path, shell: Callable[[str], tuple[int, str]]
) -> None:
    """One test: each part of the page stands on the one before it."""
    text = PAGE.read_text()
    asked = [line for line in commands(text) if line.startswith("rlsdk ")]
    listed, first, whole, refused, seeded, again, train, install = asked
    assert [whole, again] == ["rlsdk plugins check plain"] * 2
    assert refused == seeded
    assert install.startswith("rlsdk plugins install")  # tests/isolated runs this with other wheels

    until_engine = text.partition("## 3.")[0]
    write(tmp_path, until_engine)
    code, said = shell(listed)
    assert code == 0, said
    assert any("plain" in line and "ready" in line for line in said.splitlines()), said

    write(tmp_path, text.partition("## 7.")[0])
    code, said = shell(first)
    assert code == 0, said

    claimed, _, mended = text.partition("A drawn token must depend only on the seed")
    write(tmp_path, claimed)
    code, said = shell(refused)
    assert code == 1, said
    assert any("seed" in line and "FAILED" in line.upper() for line in said.splitlines()), said

    assert "noise.py" in mended
    write(tmp_path, text)
    code, said = shell(f'{again} --only "{PART}"')
    assert code == 0, said
    assert "conformance · rollout plain" in said, said
    code, said = shell(seeded)
    assert code == 0, said

    code, said = shell(train)
    assert code == 0, said
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    differences = [row["parity/log_prob_diff_max"] for row in rows if "parity/log_prob_diff_max" in row]
    assert differences, rows
    assert max(differences) < 2e-5


def test_a_part_of_a_file_is_added_to_it_and_a_new_version_replaces_it() -> None:
    page = '```python title="a.py"\none\n```\n\n```python title="a.py (continued)"\ntwo\n```\n'
    assert list(files(page)) == [("a.py", "one\n"), ("a.py", "one\n\ntwo\n")]
    assert dict(files(page + '```python title="a.py"\nthree\n```\n'))["a.py"] == "three\n"
    assert commands("```\nrlsdk a \\\n    --b   # why\nls\n```\n") == ["rlsdk a --b", "ls"]
