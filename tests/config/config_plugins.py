"""A backend with options of its own, and a registry that has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, LogProbKind, RegisterBackend, hookimpl
from rlsdk.registry import Registry


class Speed(StrEnum):
    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True)
class Nested:
    """A part of the options."""

    depth: int = 2
    """Of the
    nesting."""


@dataclass(frozen=True, kw_only=True)
class TurboOptions:
    """What only the backend `turbo` knows."""

    cpu_offload: bool = False
    """Keeps parameters on the host."""
    shard_size: int | None = None
    label: str = "none"
    ratio: float = 0.5
    sizes: tuple[int, ...] = ()
    """Bytes."""
    speed: Speed = Speed.SLOW
    mode: Literal["full", "hybrid"] = "full"
    where: Path | None = None
    nested: Nested = field(default_factory=Nested)


class GustOptions(BaseModel):
    """What only the backend `gust` knows, as a pydantic model."""

    model_config = {"use_attribute_docstrings": True}

    caching: bool = True
    """Of prefixes."""
    width: int


class Plugin:
    """Registers the backends of these tests."""

    @hookimpl
    def rlsdk_register_backends(self, register: RegisterBackend) -> None:
        register(
            BackendSpec(
                name="turbo",
                kind=BackendKind.TRAIN,
                engine="nowhere:Engine",
                options="config_plugins:TurboOptions",
                devices=frozenset({"cuda"}),
                dtypes=frozenset({"bfloat16"}),
                architectures=frozenset({"llama"}),
                capabilities=frozenset({Capability.ENTROPY, Capability.DATA_PARALLEL}),
            )
        )
        register(
            BackendSpec(
                name="gust",
                kind=BackendKind.ROLLOUT,
                engine="nowhere:Engine",
                options="config_plugins:GustOptions",
                log_prob_kind=LogProbKind.RAW,
                capabilities=frozenset({Capability.TENSOR_PARALLEL}),
            )
        )
        register(
            BackendSpec(
                name="calm",
                kind=BackendKind.ROLLOUT,
                engine="nowhere:Engine",
                log_prob_kind=LogProbKind.PROCESSED,
            )
        )


def make_registry() -> Registry:
    """The built-ins and `Plugin`, whatever else is installed."""
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    registry.register_module(Plugin(), distribution="rlsdk-turbo", version="1.0")
    return registry
