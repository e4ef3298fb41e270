"""Registers the backend. Imports no engine, so that listing plugins stays quick."""

from __future__ import annotations

from rlsdk.interfaces import BackendKind, BackendSpec, LogProbKind, RegisterBackend, hookimpl


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="openai",
            interface=(2, 0),
            kind=BackendKind.ROLLOUT,
            engine="rlsdk_openai.engine:OpenAiRolloutEngine",
            options="rlsdk_openai.config:OpenAiOptions",
            description="An OpenAI-compatible completions server: evaluates and generates with its model.",
            # None claimed, since the protocol promises none of them: seeds are best effort, a stop text is left out of
            # the answer, and a request that is ended early loses what it had.
            capabilities=frozenset(),
            max_ranks=1,
            takes_weights=False,
            log_prob_kind=LogProbKind.RAW,
        )
    )
