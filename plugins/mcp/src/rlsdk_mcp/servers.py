"""Which servers an environment has: a URL, a command, or a file in the form that other clients use."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from rlsdk.interfaces import ConfigError, nearest

_FIELDS = {"command": str, "args": list, "env": dict, "cwd": str, "url": str, "headers": dict, "type": str}
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Server:
    """How one server is reached."""

    name: str
    url: str | None = None
    """Of streamable HTTP."""
    headers: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """Of stdio: every episode starts a process of its own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of that process, besides PATH, HOME and the like: it gets no others of this one."""
    folder: str | None = None


def read_servers(rest: str) -> tuple[Server, ...]:
    """The servers that `mcp:REST` names.

    Args:
        rest: a URL, the path of a JSON file, or a command line.

    Raises:
        ConfigError: it names none, or a field of the file is unknown or has another type.
    """
    if rest.startswith(("http://", "https://")):
        return (Server(name="server", url=rest),)
    if rest.endswith(".json"):
        return _from_file(Path(rest))
    try:
        command = shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"environment 'mcp:{rest}': no command line: {error}") from error
    if not command:
        raise ConfigError(f"environment 'mcp:{rest}': expected a URL, a FILE.json, or a command line")
    return (Server(name=Path(command[0]).name, command=tuple(command)),)


@asynccontextmanager
async def connect(server: Server) -> AsyncIterator[Any]:
    """A transport to a server. What its process writes to standard error is left out."""
    if server.url is not None:
        client = create_mcp_http_client(headers=dict(server.headers)) if server.headers else None
        async with streamable_http_client(server.url, http_client=client) as streams:
            yield streams
        return
    command, *args = server.command
    parameters = StdioServerParameters(
        command=command, args=args, env=dict(server.environment), cwd=server.folder, encoding_error_handler="replace"
    )
    with open(os.devnull, "w") as nowhere:
        async with stdio_client(parameters, errlog=nowhere) as streams:
            yield streams


def _from_file(file: Path) -> tuple[Server, ...]:
    try:
        with file.open("rb") as stream:
            content = json.loads(stream.read(_MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"environment 'mcp:{file}': cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"environment 'mcp:{file}': no JSON: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f"environment 'mcp:{file}': expected {{\"mcpServers\": {{NAME: {{...}}}}}}")
    return tuple(_server(name, fields, f"environment 'mcp:{file}': {name}") for name, fields in servers.items())


def _server(name: str, fields: Any, said: str) -> Server:
    if not isinstance(fields, dict):
        raise ConfigError(f"{said} is {fields!r}; expected an object with `command` or `url`")
    for key, value in fields.items():
        if key not in _FIELDS:
            raise ConfigError(f"{said}: unknown field {key!r}{nearest(key, _FIELDS)}; expected {sorted(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]):
            raise ConfigError(f"{said}: {key} is {value!r}; expected {_FIELDS[key].__name__}")
    if ("url" in fields) == ("command" in fields):
        raise ConfigError(f"{said}: expected either `url` or `command`")
    return Server(
        name=name,
        url=fields.get("url"),
        headers=_filled(fields.get("headers", {}), said),
        command=(fields["command"], *map(str, fields.get("args", []))) if "command" in fields else (),
        environment=_filled(fields.get("env", {}), said),
        folder=fields.get("cwd"),
    )


def _filled(values: Mapping[str, Any], said: str) -> dict[str, str]:
    """Values with `${NAME}` replaced by variables of this process: secrets need not stand in files."""

    def variable(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(f"{said}: the environment variable {found[1]} is not set")
        return os.environ[found[1]]

    return {name: _VARIABLE.sub(variable, str(value)) for name, value in values.items()}
