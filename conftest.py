"""Settings of every test, of the core and of the plugins."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["rlsdk.testing.plugin"]
"""The conformance kit's: here, where it is there for every folder of tests."""

# A test says nothing about speed: on a busy machine any example can take long.
settings.register_profile("rlsdk", deadline=None)
settings.load_profile("rlsdk")
