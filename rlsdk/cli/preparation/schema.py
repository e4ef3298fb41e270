"""`rlsdk config schema`: a JSON schema with which editors complete and check a run's YAML file."""

from __future__ import annotations

import json
from pathlib import Path

from rlsdk.config.loading.json_schema import config_schema
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry
from rlsdk.system.atomic import atomic_write_text
from rlsdk.system.printable import printable
from rlsdk.system.streams import stdout_aside


def schema(output: Path | None) -> None:
    """Prints the schema, or writes it to a file and prints how to tell an editor about it.

    Raises:
        ConfigError: the file cannot be written.
    """
    with stdout_aside():
        text = json.dumps(config_schema(Registry.discover()), indent=1) + "\n"
    if output is None:
        print(text, end="")
        return
    try:
        atomic_write_text(output, text)
    except OSError as error:
        raise ConfigError(
            f"--output {str(output)!r} cannot be written: {error.strerror}; choose another path"
        ) from error
    print(printable(f"wrote {output}; for editors with the YAML language server, start a YAML file with this line:"))
    print(printable(f"# yaml-language-server: $schema={output}"))
