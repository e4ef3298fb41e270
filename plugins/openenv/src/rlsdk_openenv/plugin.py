"""Registers the environment. Imports neither it nor the library."""

from __future__ import annotations

from rlsdk.interfaces import RegisterComponent, hookimpl


@hookimpl
def rlsdk_register_environments(register: RegisterComponent) -> None:
    register(
        "openenv",
        "rlsdk_openenv.environment:environment_class",
        "An environment of an OpenEnv server: openenv:URL.",
        requires="websockets",
        install_hint="pip install rlsdk-openenv",
    )
