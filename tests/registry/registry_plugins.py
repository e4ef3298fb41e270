"""Plugins for the tests of the registry, and what finds them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlsdk.registry import Registry, Row

Install = Callable[..., Path]

BACKEND = """
from rlsdk.interfaces import BackendKind, BackendSpec, hookimpl

@hookimpl
def rlsdk_register_backends(register):
    register(BackendSpec(name={name!r}, kind=BackendKind.{kind}, engine="{module}_engine:Engine"{more}))
"""


def backend_source(module: str, name: str = "acme", kind: str = "TRAIN", more: str = "") -> str:
    """Source of a light entry module that registers one backend."""
    return BACKEND.format(module=module, name=name, kind=kind, more=f", {more}" if more else "")


def rows_of(registry: Registry, distribution: str) -> list[Row]:
    return [row for row in registry.rows() if row.source.distribution == distribution]
