"""How a pytest session has the kit's plugin. Imports nothing, for the plugin does not import suites."""

PLUGIN = "rlsdk.testing.plugin"
"""As sessions name it."""
COLLECTOR = "rlsdk-collector"
"""Name of the plugin's object in a session that has it."""
