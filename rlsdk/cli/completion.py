"""Shell completion for flags that typer does not know: the fields of the configuration."""

from __future__ import annotations

import importlib
from typing import Any

from typer import Context
from typer.core import TyperCommand


class FieldsCommand(TyperCommand):
    """A command that accepts fields of a run's configuration as flags, and passes them on unchanged."""

    def shell_complete(self, ctx: Context, incomplete: str) -> list[Any]:  # type: ignore[override]  # click's or its own
        """Returns the command's own options, short forms, and every field whose name starts with the typed text."""
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
    """Returns click's class of completions. Newer versions of typer include their own click; older ones import it."""
    package = TyperCommand.__mro__[1].__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.shell_completion").CompletionItem
