"""Shell completion for flags that typer does not know: the fields of the configuration."""

from __future__ import annotations

import importlib
from typing import Any

from typer import Context
from typer.core import TyperCommand


class FieldsCommand(TyperCommand):
    """A command that accepts fields of a run's configuration as flags, and passes them on unchanged."""

    def shell_complete(self, ctx: Context, incomplete: str) -> list[Any]:  # type: ignore[override]  # click's or its own
        """Returns the command's own options, and the short forms and fields that it reads and that start so."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        from rlsdk.config import RunConfig
        from rlsdk.config.checks.commands import READERS, TRAIN
        from rlsdk.config.introspection.describe import describe_options
        from rlsdk.config.loading.overrides import ALIASES, FILE_FLAG

        known = {item.value for item in found}
        flags = {f"--{FILE_FLAG}": "A YAML file."}
        reads = READERS.get(str(self.name), TRAIN).may_read  # `plan` and `chaos` take the arguments of `train`
        flags |= {f"--{short}": f"Short for --{field}." for short, field in ALIASES.items() if reads(field)}
        options = (option for option in describe_options(RunConfig) if reads(option.path))
        flags |= {f"--{option.path}": option.doc.partition(". ")[0] for option in options}
        item = _item_class()
        return found + [
            item(flag, help=text) for flag, text in flags.items() if flag.startswith(incomplete) and flag not in known
        ]


def _item_class() -> Any:
    """Returns click's class of completions. Newer versions of typer include their own click; older ones import it."""
    package = TyperCommand.__mro__[1].__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.shell_completion").CompletionItem
