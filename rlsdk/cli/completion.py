"""Completion in the shell of what typer does not know: the fields of the configuration as flags."""

from __future__ import annotations

import importlib
from typing import Any

from typer import Context
from typer.core import TyperCommand


class FieldsCommand(TyperCommand):
    """A command that takes fields of a run's configuration as flags, and hands them on as typed."""

    def shell_complete(self, ctx: Context, incomplete: str) -> list[Any]:  # type: ignore[override]  # click's or its own
        """The command's own options, short forms, and every field whose name begins so."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        from rlsdk.config import RunConfig
        from rlsdk.config.describe import describe_options
        from rlsdk.config.overrides import ALIASES, FILE_FLAG

        known = {item.value for item in found}
        flags = {f"--{FILE_FLAG}": "A YAML file."}
        flags |= {f"--{short}": f"Short for --{field}." for short, field in ALIASES.items()}
        flags |= {f"--{option.path}": option.doc.partition(". ")[0] for option in describe_options(RunConfig)}
        item = _item_class()
        return found + [
            item(flag, help=text) for flag, text in flags.items() if flag.startswith(incomplete) and flag not in known
        ]


def _item_class() -> Any:
    """click's class of a completion: typer brings its own click in newer versions, and uses the library before."""
    package = TyperCommand.__mro__[1].__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.shell_completion").CompletionItem
