"""Tools of MCP servers as environments."""

__version__ = "0.1.0"
