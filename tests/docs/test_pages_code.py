"""Code and commands of the tutorial and of the readers' pages: it computes, and they exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from rlsdk.api.table import Table
from rlsdk.config import load_config
from rlsdk.interfaces import INTERFACE_VERSION, BackendSpec, Batch, RewardSample
from rlsdk.registry import ComponentKind, Registry

DOCS = Path(__file__).parents[2] / "docs"
NAMED = ("tutorial", "plugin_tutorial", "plugins", "running", "python", "evaluation", "extending", "rewards", "agents",
         "schedules", "reliability", "concepts", "metrics", "index")  # fmt: skip
PAGES = [DOCS.parent / "README.md", *(DOCS / f"{name}.md" for name in NAMED), *sorted((DOCS / "readers").glob("*.md"))]
PLACEHOLDERS = re.compile(r"\$\w+|\b[A-Z]+\b(?!:)")
"""Words that stand for a person's own: `NAME`, `$DATA`."""


def block(page: Path, start: str) -> str:
    """The Python block that begins with these words behind its fence."""
    found = re.search(rf"^```python{re.escape(start)}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_reward_of_the_tutorial_counts_letters_and_gives_a_bonus(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(block(DOCS / "tutorial.md", ' title="mine.py"'))
    space: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    letters = space["letters"]
    assert callable(letters)

    def score(response: str, **options: float) -> float:
        sample = RewardSample(prompt="", response=response, answer="enarc", row={}, truncated=False)
        return float(letters(sample, **options))  # type: ignore[operator]

    assert score("enarc") == 2.0
    assert score("enarc", bonus=0.5) == 1.5
    assert score("enrac") == 0.6
    assert score("") == 0.0


def test_the_estimator_of_the_research_page_centers_scores_and_leaves_failed_ones_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(block(DOCS / "readers" / "research.md", ""))
    centered = Registry.discover().function(ComponentKind.ADVANTAGE, f"{file}:centered")
    batch = Batch.from_rows([[1, 2], [3, 4], [5, 6]])
    batch = batch.with_tokens(response_mask=torch.tensor([False, True] * 3))
    batch = batch.with_rows(scores=torch.tensor([1.0, 0.0, torch.nan]), valid=torch.tensor([True, True, False]))
    assert centered(batch)["advantages"].tolist() == [0.0, 0.5, 0.0, -0.5, 0.0, 0.0]


def test_the_entry_module_of_the_guide_registers_a_backend_with_all_that_the_kit_asks_for() -> None:
    """A plugin that was typed from the page failed the first requirement: it had no description."""
    space: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "plugins.md").read_text(), re.DOTALL)
    (code,) = (part for part in blocks if "rlsdk_register_backends" in part)
    exec(compile(code, "plugin.py", "exec"), space)
    specs: list[BackendSpec] = []
    space["rlsdk_register_backends"](specs.append)  # type: ignore[operator]
    (spec,) = specs
    assert spec.description
    assert spec.interface == INTERFACE_VERSION


def test_what_pages_ask_a_run_s_metrics_for_is_there_when_it_ends_with_an_evaluation() -> None:
    """The last line of a run's metrics is that of its last evaluation, which has no `reward/mean`."""
    asked = [
        (page, text)
        for page in PAGES
        for text in re.findall(r"run\.metrics(?:\[|\.last)[^,\n]*[\])]", page.read_text())
    ]
    assert asked
    run = SimpleNamespace(metrics=Table([{"step": 1, "reward/mean": 0.5}, {"step": 1, "eval/accuracy_greedy": 0.25}]))
    for page, text in asked:
        assert eval(text, {"run": run}) == 0.5, (page.name, text)


def lines(page: Path) -> list[str]:
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    text = "".join(body for language, body in blocks if language in ("", "bash")).replace("\\\n", " ")
    inline = re.findall(r"`(rlsdk [^`]+)`", page.read_text())
    found = [*(line for line in text.splitlines() if line.startswith("rlsdk ")), *inline]
    return [line for line in found if not line.startswith("rlsdk 0.")]  # a report's last line


def meant(flags: list[str]) -> bool:
    """Whether a value stands for a person's own."""
    return any(PLACEHOLDERS.fullmatch(flag) for flag in flags)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_ones_that_there_are(page: Path) -> None:
    from rlsdk.cli.commands import app

    found = lines(page)
    assert found
    for line in found:
        words = shlex.split(line.partition("&&")[0], comments=True)[1:]
        command = words[:2] if words[0] in ("plugins", "config", "algorithms", "reward") else words[:1]
        if command == ["train"]:
            flags = [word for word in words[1:] if word not in ("...",)]
            is_whole = not any(part in line for part in ("--config", "mine.py", "--rollout-backend", "--help"))
            if is_whole and not meant(flags):
                load_config([], flags, Registry.discover(), sections=())
            continue
        said = CliRunner().invoke(app, [*command, "--help"])
        assert said.exit_code == 0, (line, said.output)
