"""Arguments that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

FIELDS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that accept the fields of a run's configuration as flags, and pass them on unchanged."""
ONLY_FIELDS = {**FIELDS, "help_option_names": []}

ModelPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="Run, checkpoint or model folder; fields follow: --data.eval rows.jsonl")
]

Checkpoint = Annotated[
    str | None, typer.Option(help="For a run: best (by checkpoint.best), newest, or a step; default: newest.")
]

TrustRun = Annotated[
    bool, typer.Option("--trust-run", help="Also run code that the run's config.yaml refers to: see SECURITY.md.")
]


def with_trust(arguments: Sequence[str], trust_run: bool) -> list[str]:
    """Returns the fields as typed, with `--trust-run` added back if typer removed it."""
    return [*arguments, "--trust-run"] if trust_run else list(arguments)
