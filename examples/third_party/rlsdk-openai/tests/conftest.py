"""The conformance kit's fixtures and options, and its report."""

from __future__ import annotations

pytest_plugins = ["rlsdk.testing.plugin"]
