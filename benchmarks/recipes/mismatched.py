"""The plugin `mismatched`: a rollout engine that serves rounded weights, a stand-in for quantised serving.

Its log-probs are honest: those of the distribution that it samples from. This module is its entry point.
"""

from __future__ import annotations

from pathlib import Path

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, RegisterBackend, hookimpl


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="mismatched",
            kind=BackendKind.ROLLOUT,
            engine="benchmarks.recipes.mismatched_engine:MismatchedEngine",
            description="The built-in rollout engine with rounded weights, for a benchmark.",
            capabilities=frozenset({Capability.SEED, Capability.ABORT, Capability.SLEEP}),
            max_ranks=1,
        )
    )


def install(folder: Path) -> Path:
    """Writes the metadata of a distribution that has this module as a plugin; returns the folder for Python's path."""
    path = folder / "plugin"
    info = path / "rlsdk_mismatched-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-mismatched\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[rlsdk]\nmismatched = benchmarks.recipes.mismatched\n", encoding="utf-8")
    return path
