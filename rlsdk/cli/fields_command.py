"""Commands that take the fields of the configuration as flags, which typer does not know: their help, and completion in
the shell."""

from __future__ import annotations

import importlib
from typing import Any

from typer import Context
from typer.core import TyperCommand

HELP_FLAGS = frozenset({"--help", "-h"})


class FieldsCommand(TyperCommand):
    """A command that accepts fields of a run's configuration as flags, and passes them on unchanged."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's or its own
        """Shows the help if a flag of it is among the arguments: `--help`, or `--help NAME` of a section or field.

        Raises:
            ConfigError: the command reads nothing of that name.
        """
        at = next((at for at, argument in enumerate(args) if argument in HELP_FLAGS), None)
        if at is None:
            return list(super().parse_args(ctx, args))
        from rlsdk.cli.fields import command_help, topic_help

        command, topic = ctx.command_path.partition(" ")[2], args[at + 1 : at + 2]
        if topic and not topic[0].startswith("-"):
            print(topic_help(command, topic[0]))
        elif ctx.help_option_names:  # it has options of its own
            print(f"{ctx.get_help()}\n{command_help(command)}")
        else:
            print(
                f"Usage: rlsdk {command} [--config FILE]... [--FIELD VALUE]...\n\n{self.help}\n{command_help(command)}"
            )
        ctx.exit()

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
        reads = READERS.get(ctx.command_path.partition(" ")[2], TRAIN).may_read  # of `plan` and `chaos`: those of train
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
