"""Registry of installed plugins: discovery by entry points, negotiation, and error messages.

Imports only the standard library and pluggy.
"""

from __future__ import annotations

from rlsdk.registry.checks import installed_version
from rlsdk.registry.explain import spoken
from rlsdk.registry.functions import absolute, check_call, find_function, load_function, python_file
from rlsdk.registry.guard import Guard
from rlsdk.registry.isolated import (
    HOME,
    SAME,
    IsolatedPlugin,
    home,
    plain_row,
    read_record,
    record_path,
    record_paths,
    reinstall,
    version_misfit,
    versions_here,
)
from rlsdk.registry.known import FIRST_PARTY
from rlsdk.registry.negotiation import Lack, Requirements, explain_lack, lacks, require
from rlsdk.registry.portable import DOC, PLAIN_TYPES, options_class, plain_spec, spec_from_plain
from rlsdk.registry.registry import Registry
from rlsdk.registry.row import PLUGIN, ComponentKind, Isolation, Row, Source, State

__all__ = [
    "DOC",
    "FIRST_PARTY",
    "HOME",
    "PLAIN_TYPES",
    "PLUGIN",
    "SAME",
    "ComponentKind",
    "Guard",
    "IsolatedPlugin",
    "Isolation",
    "Lack",
    "Registry",
    "Requirements",
    "Row",
    "Source",
    "State",
    "absolute",
    "check_call",
    "explain_lack",
    "find_function",
    "home",
    "installed_version",
    "lacks",
    "load_function",
    "options_class",
    "plain_row",
    "plain_spec",
    "python_file",
    "read_record",
    "record_path",
    "record_paths",
    "reinstall",
    "require",
    "spec_from_plain",
    "spoken",
    "version_misfit",
    "versions_here",
]
