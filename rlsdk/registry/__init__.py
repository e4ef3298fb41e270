"""What is installed: discovery by entry points, negotiation, and the errors a person reads.

Importing this loads the standard library and pluggy only.
"""

from __future__ import annotations

from rlsdk.registry.checks import installed_version
from rlsdk.registry.explain import spoken
from rlsdk.registry.known import FIRST_PARTY
from rlsdk.registry.negotiation import Lack, Requirements, explain_lack, lacks, require
from rlsdk.registry.registry import Registry
from rlsdk.registry.row import PLUGIN, ComponentKind, Row, Source, State

__all__ = [
    "FIRST_PARTY",
    "PLUGIN",
    "ComponentKind",
    "Lack",
    "Registry",
    "Requirements",
    "Row",
    "Source",
    "State",
    "explain_lack",
    "installed_version",
    "lacks",
    "require",
    "spoken",
]
