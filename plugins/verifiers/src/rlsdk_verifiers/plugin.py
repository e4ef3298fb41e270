"""Registers the data source. Imports neither it nor the library."""

from __future__ import annotations

from rlsdk.interfaces import RegisterComponent, hookimpl


@hookimpl
def rlsdk_register_datasets(register: RegisterComponent) -> None:
    register(
        "verifiers",
        "rlsdk_verifiers.tasks:load_rows",
        "Tasks of a taskset of verifiers; rollout.agent: rlsdk_verifiers:play plays them.",
        requires="verifiers",
        install_hint="pip install rlsdk-verifiers",
    )
