"""A server of notes: `server.py` over stdio, `server.py PORT` over streamable HTTP."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def say(text: str) -> str:
    """Notes a text.

    Args:
        text: what to note
    """
    notes.append(text)
    return f"[{len(notes)}]"


@server.tool()
def fail(code: int) -> str:
    """Fails."""
    raise ValueError(f"code {code}")


@server.tool()
def variables() -> list[str]:
    """Names of the variables of this process."""
    return sorted(os.environ)


@server.tool()
def leave() -> str:
    """Ends this process."""
    os._exit(1)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
