"""Registers the environment. Imports neither it nor the library."""

from __future__ import annotations

from rlsdk.interfaces import RegisterComponent, hookimpl


@hookimpl
def rlsdk_register_environments(register: RegisterComponent) -> None:
    register(
        "mcp",
        "rlsdk_mcp.environment:environment_class",
        "Tools of MCP servers: mcp:URL, mcp:COMMAND LINE, or mcp:FILE.json with `mcpServers`.",
        requires="mcp",
        install_hint="pip install rlsdk-mcp",
    )
