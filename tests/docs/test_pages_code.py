"""Code and commands of the tutorial and of the readers' pages: it computes, and they exist."""

from __future__ import annotations

import functools
import re
import runpy
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rlsdk
from rlsdk.api.table import Table
from rlsdk.config import RunConfig, load_config
from rlsdk.config.checks.commands import GENERATE_KEPT, READERS
from rlsdk.config.introspection.describe import option_paths
from rlsdk.config.loading.overrides import ALIASES
from rlsdk.config.loading.reads import Reader
from rlsdk.interfaces import INTERFACE_VERSION, BackendSpec, Batch, RewardSample
from rlsdk.registry import ComponentKind, Registry

DOCS = Path(__file__).parents[2] / "docs"
NAMED = ("tutorial", "plugin_tutorial", "plugins", "running", "data", "pairs", "planning", "devices", "stopping",
         "run_page", "python", "evaluation", "extending", "rewards", "agents", "rollouters", "schedules", "reliability",
         "concepts", "metrics", "index", "distillation")  # fmt: skip
PAGES = [DOCS.parent / "README.md", *(DOCS / f"{name}.md" for name in NAMED), *sorted((DOCS / "readers").glob("*.md"))]
PLACEHOLDERS = re.compile(r"\$\w+|\b[A-Z]+\b(?!:)")
"""Words that stand for a person's own: `NAME`, `$DATA`."""

GROUPS = ("plugins", "config", "algorithms", "reward", "environments")
"""Groups of commands."""


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


def test_the_script_of_the_first_page_is_a_run_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned, with all checks of a run, and not run."""
    file = tmp_path / "reverse.py"
    file.write_text(block(DOCS / "index.md", ' title="reverse.py"'))
    rlsdk.make_model(tmp_path / "tiny", layers=1)
    monkeypatch.chdir(tmp_path)
    plans = []

    def planned(*given: Any, **fields: Any) -> Any:
        plans.append(rlsdk.plan(*given, **fields))
        return SimpleNamespace(generate=lambda *_, **__: "")

    monkeypatch.setattr(rlsdk, "train", planned)
    runpy.run_path(str(file), run_name="__main__")
    assert plans[0].fits


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
def test_commands_are_ones_that_there_are(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsdk.cli.commands import app

    monkeypatch.chdir(DOCS.parent / "examples")  # whose files pages show whole, to be saved
    found = lines(page)
    assert found
    assert [line for line in found if "tests/" in line] == []
    for line in found:
        words = shlex.split(line.partition("&&")[0], comments=True)[1:]
        command = words[:2] if words[0] in GROUPS else words[:1]
        if command == ["train"]:
            flags = [word for word in words[1:] if word not in ("...",)]
            is_whole = not any(part in line for part in ("--config", "mine.py", "--rollout-backend", "--help"))
            if is_whole and not meant(flags):
                load_config([], flags, Registry.discover(), sections=())
            continue
        said = CliRunner().invoke(app, [*command, "--help"])
        assert said.exit_code == 0, (line, said.output)


EVERY_PAGE = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
COMMON = frozenset({"--help", "--config", "--trust-run", "--traceback", "--version", "--a.b"})
AS_TRAIN = ("plan", "chaos")
"""Commands that take the arguments of `rlsdk train`."""


def commands_of(page: Path) -> Iterator[tuple[str, str]]:
    """Whole commands and flags, in blocks and in running text; and the part of the page around each: its paragraph, or
    the whole section on the page of benchmarks, each of which is about one program."""
    text = page.read_text()
    for part in re.split(r"^##", text, flags=re.MULTILINE) if page.stem == "benchmarks" else re.split(r"\n\s*\n", text):
        lines = [line.strip().partition(" #")[0] for line in part.replace("\\\n", " ").splitlines()]
        spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", part.replace("```", ""))]
        found = [*(line for line in lines if line.startswith("rlsdk ")), *spans]
        yield from ((line, part) for line in found if "--" in line)


@functools.cache
def other_flags() -> str:
    """Sources of the programs beside `rlsdk` that pages name."""
    folders = ("benchmarks", "tools", "rlsdk/testing")
    return "".join(file.read_text() for folder in folders for file in sorted((DOCS.parent / folder).rglob("*.py")))


def is_of_another(flag: str, part: str) -> bool:
    """Whether a flag belongs to a benchmark, a tool or pytest that the same part of the page names."""
    return bool(re.search(r"benchmarks[./]|tools/|pytest", part)) and f'"{flag}"' in other_flags()


@functools.cache
def own_flags() -> Mapping[tuple[str, ...], frozenset[str]]:
    """The flags of each command, besides fields of the configuration."""
    import typer

    from rlsdk.cli.commands import app

    def walk(command: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], frozenset[str]]]:
        yield name, frozenset(flag for one in command.params for flag in (*one.opts, *one.secondary_opts))
        for inner, found in getattr(command, "commands", {}).items():
            yield from walk(found, (*name, inner))

    return dict(walk(typer.main.get_command(app), ()))


@functools.cache
def known_fields() -> frozenset[str]:
    """Paths of all fields and sections."""
    paths = {path for option in option_paths(RunConfig) for path in (option, option.rpartition(".")[0])}
    return frozenset({*paths, *RunConfig.model_fields} - {""})


def acts(flag: str, readers: Iterable[Reader]) -> bool:
    """Whether a command reads the field of a flag; a backend's own options are known to its plugin only."""
    path = ALIASES.get(flag.removeprefix("--"), flag.removeprefix("--").replace("-", "_"))
    section, *rest = path.split(".")
    if path not in known_fields() and not (path.rpartition(".")[0] in known_fields() and path.count(".") > 1):
        if section not in ("train", "rollout", "ref", "critic") or len(rest) != 2:
            return section in ("rewards", "reward_models", "eval", "data", "tracking", "algorithm") and len(rest) > 1
        path = f"{section}.options"
    return any(reader.may_read(path) for reader in readers)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_flags_of_pages_act_on_the_command_that_they_are_used_with(page: Path) -> None:
    """A page said that runs used a flag of another program, as if it were one of `rlsdk train`."""
    wrong = []
    for line, part in commands_of(page):
        at = re.search(r"(?:^|[ /])rlsdk (?:(plugins|config|algorithms|reward|environments) )?([a-z-]+)", line)
        if at is None and not line.startswith("--"):
            continue  # of another program
        command = () if at is None else tuple(part for part in (at[1], at[2]) if part)
        every = frozenset(flag for flags in own_flags().values() for flag in flags)
        known = COMMON | (every if at is None else own_flags().get(command, frozenset()))
        name = "train" if command and command[0] in AS_TRAIN else " ".join(command)
        every_reader = [*READERS.values(), GENERATE_KEPT]
        readers = [reader for reader in every_reader if at is None or reader.command == name]
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*(?:\.[\w-]+)*", line[at.end() if at is not None else 0 :]):
            elsewhere = at is None and is_of_another(flag, part)
            if flag not in known and not elsewhere and not acts(flag, readers):
                wrong.append(f"{name} {flag}")
    assert not wrong


def test_rewards_that_commands_of_pages_name_are_there_or_are_made_on_a_page() -> None:
    known = {row.name for row in Registry.discover().rows() if row.kind == ComponentKind.REWARD}
    texts = {page: page.read_text() for page in EVERY_PAGE}
    made = {name for text in texts.values() for name in re.findall(r"(?:def |name=\")(\w+)", text)}
    named = {name for text in texts.values() for name in re.findall(r"--reward ([a-z]\w*)(?![\w./])", text)}
    assert "exact" in named & known
    assert named <= known | made, named - known - made
