"""Makes docs/gallery.md: three small runs on this machine's CPU, their reports, and a page that compares two of them.

python -m tools.gallery         # or make gallery: all of it, five minutes on two quiet cores
python -m tools.gallery --only calculator --keep /tmp/gallery    # one anew; the others come from the folder
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rlsdk
from rlsdk.system.quantities import duration
from rlsdk.views.report import write_comparison, write_report

ROOT = Path(__file__).resolve().parent.parent
PAGE, FOLDER = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
RLSDK = Path(sys.executable).with_name("rlsdk")
"""The command: what a report says was typed."""
SMALL = (
    "--trainer.steps", "60", "--trainer.save_every_steps", "null", "--tracking.samples_per_step", "4",
    "--tracking.tokens_per_sample", "64",
)  # fmt: skip
"""Half the quickstart's steps, and fewer samples on the page."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One run of the gallery."""

    name: str
    title: str
    flags: Sequence[str]
    about: str
    look: str
    prepare: Sequence[str] = ()
    """A script of the repository that makes what the run starts from."""


RUNS = (
    Shown(
        name="quickstart",
        title="The quickstart: GRPO, synchronous",
        flags=SMALL,
        about="A Llama with 1.1 million random parameters learns to spell words backward: 50 supervised steps teach "
        "the answer format, 60 steps of GRPO the content. Both engines take turns on the same device.",
        look="*Time by phase*: generation and update alternate. *Samples*: the first and the last answer to the same "
        "prompt are shown side by side.",
    ),
    Shown(
        name="one-step-off",
        title="The same, one step off policy",
        flags=(
            *SMALL, "--placement.preset", "disaggregated", "--placement.devices_per_node", "2",
            "--placement.cpus_per_device", "1", "--schedule.max_staleness", "1", "--algorithm.old_log_probs", "auto",
        ),
        about="The same task with a separate device for each engine: the samples of the next step are generated while "
        "a step trains.",
        look="*Pools over time*: both pools are busy at the same time. *Age of tokens*: all steps but the first train "
        "on samples that are one update old. The comparison below shows the cost.",
    ),
    Shown(
        name="calculator",
        title="Turns and a tool: a policy learns to ask a calculator",
        flags=("--config", "examples/calculator/run.yaml", "--sft.steps", "100", "--trainer.steps", "16",
               "--trainer.prompts_per_step", "24", "--tracking.samples_per_step", "4",
               "--tracking.tokens_per_sample", "128"),
        prepare=("examples/calculator/prepare.py",),
        about="Sums of three-digit numbers. The model may answer directly or call a calculator; supervised training "
        "showed it both, each on half of the rows. The reward depends only on the answer.",
        look="*rollout/tool_calls*, under all other metrics: the number of calls rises with the accuracy. *Samples*: "
        "output of the tool is grey: it is not sampled, and the loss masks it.",
    ),
)  # fmt: skip
COMPARED = ("quickstart", "one-step-off")


def make(shown: Shown, folder: Path) -> None:
    """Runs it in `folder`, unless it is there.

    Raises:
        CalledProcessError: it failed; what it said is on the screen.
    """
    if (folder / "runs" / shown.name / "report.html").exists():
        return
    if shown.prepare:
        subprocess.run([sys.executable, *shown.prepare], cwd=folder, check=True)
    command = [str(RLSDK), "train", *shown.flags, "--trainer.run_name", shown.name]
    subprocess.run(command, cwd=folder, check=True)


def publish(folder: Path) -> None:
    """Reports, curves and the comparison into `docs/gallery/`, without a path of this machine."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for shown in RUNS:
        page, plot = write_report(folder / "runs" / shown.name)
        copy_page(page, FOLDER / f"{shown.name}.html", folder)
        copy_page(plot, FOLDER / f"{shown.name}.svg", folder)
    page = write_comparison([folder / "runs" / name for name in COMPARED], folder / "comparison.html")
    copy_page(Path(page), FOLDER / "comparison.html", folder)
    PAGE.write_text(text(folder))


def copy_page(source: Path, target: Path, folder: Path) -> None:
    """Paths below `folder` are relative to it.

    Raises:
        ValueError: a path of this machine would be published.
    """
    page = source.read_text(encoding="utf-8")
    for name in {str(folder), str(folder.resolve())}:
        page = page.replace(f"{name}/", "").replace(name, ".")
    for private in (str(Path.home()), str(ROOT), str(Path(sys.prefix).parent)):
        if len(private) > 1 and re.search(re.escape(private) + r"\b", page):
            raise ValueError(f"{source.name} names {private!r}; publish nothing of this machine")
    target.write_text(page, encoding="utf-8")


def text(folder: Path) -> str:
    """The page."""
    parts = [
        "# Gallery of runs\n",
        _wrapped(
            "These are real runs on two CPU cores, each produced by the command above its report; `make gallery` runs "
            "all of them. The times come from a machine that other programs shared; for timings see "
            "[Benchmarks](benchmarks.md). Every picture links to the run's report: curves, time by phase, samples with "
            "the log-prob of each token, all settings. `rlsdk report RUN` writes the same report for your runs; `rlsdk "
            "watch RUN` shows it while they run."
        ),
        _wrapped(
            "[examples/recipes](../examples/recipes) has recipes for widely used models; they pass `rlsdk plan`, and "
            "have not yet been run on a GPU."
        ),
    ]
    parts += [_section(shown, rlsdk.Run(folder / "runs" / shown.name)) for shown in RUNS]
    parts.append(
        f"## Two runs on one page\n\n```\nrlsdk compare {' '.join(f'runs/{name}' for name in COMPARED)}\n```\n\n"
        + _wrapped(
            "[Open the comparison](gallery/comparison.html): overlaid curves, metrics with intervals, and "
            "the settings that differ."
        )
    )
    return "\n".join(parts)


def _wrapped(paragraph: str) -> str:
    """A paragraph of the page, with its line break."""
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _section(shown: Shown, run: rlsdk.Run) -> str:
    look = f"**Look at** {shown.look[0].lower() if shown.look[0] != '*' else '*'}{shown.look[1:]}"
    script = f"python {' '.join(shown.prepare)}\n" if shown.prepare else ""
    return (
        f"## {shown.title}\n\n{_wrapped(shown.about)}\n```\n{script}{_command(shown.flags, shown.name)}\n```\n\n"
        f"{_figures(run)}\n\n"
        f"[![Curves of {shown.name}](gallery/{shown.name}.svg)](gallery/{shown.name}.html)\n\n"
        f"{_wrapped(look)}\n"
        f"[Open the report](gallery/{shown.name}.html)\n"
    )


def _command(flags: Sequence[str], name: str) -> str:
    """On lines of a page's width."""
    words, lines = ["rlsdk", "train", *flags, "--trainer.run_name", name], [""]
    for word in words:
        if len(lines[-1]) + len(word) > 76 and word.startswith("--"):
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{word} "
    return "\n".join(line.rstrip() for line in lines)


def _figures(run: rlsdk.Run) -> str:
    """Held-out accuracy before and after, and how long the steps took."""
    names: Mapping[str, str] = {
        "eval/accuracy_greedy": "greedy",
        "eval/accuracy_sampled": "sampled",
    }
    said = [
        f"{label} {run.before[name]:.1%} → {run.after[name]:.1%}"
        for name, label in names.items()
        if name in run.before and name in run.after
    ]
    seconds = sum(row.get("time/step_s", 0.0) for row in run.metrics)
    return f"Held-out accuracy: {', '.join(said)}; {run.steps} steps in {duration(seconds)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[shown.name for shown in RUNS], help="make this run and publish nothing")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that are there are not made again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlsdk-gallery-") as scratch:
        folder: Path = (given.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / "examples" / "calculator", folder / "examples" / "calculator", dirs_exist_ok=True)
        for shown in RUNS:
            if given.only in (None, shown.name):
                make(shown, folder)
        if given.only is None:
            publish(folder)
            print(f"wrote {PAGE.relative_to(ROOT)} and {FOLDER.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
