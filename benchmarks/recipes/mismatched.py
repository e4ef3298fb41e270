"""A rollout engine that serves rounded weights: a stand-in for quantised serving, as far from the trainer as one likes.

Its log-probs are honest: those of the distribution that it samples from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, RegisterBackend, SyncReceipt, WeightShard, hookimpl
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine

BITS = "RLSDK_BENCHMARK_BITS"
"""Environment variable: bits of a weight that is served."""


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    register(
        BackendSpec(
            name="mismatched",
            kind=BackendKind.ROLLOUT,
            engine="benchmarks.recipes.mismatched:MismatchedEngine",
            description="The built-in rollout engine with rounded weights, for a benchmark.",
            capabilities=frozenset({Capability.SEED, Capability.ABORT, Capability.SLEEP}),
            max_ranks=1,
        )
    )


class MismatchedEngine(TransformersRolloutEngine):
    """Rounds each matrix to a few bits after every update, each row by its own largest weight."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """The receipt is that of what came: what is served differs on purpose."""
        receipt = super().update_weights(shards, version)
        levels = 2 ** (int(os.environ.get(BITS, "3")) - 1) - 1
        with self.lock:
            for parameter in self.parameters.values():
                if parameter.dim() == 2:
                    step = parameter.data.abs().amax(1, keepdim=True).clamp(min=1e-12) / levels
                    parameter.data.copy_((parameter.data / step).round() * step)
        return receipt


def install(folder: Path) -> Path:
    """Writes the metadata of a distribution that has this module as a plugin; returns the folder for Python's path."""
    path = folder / "plugin"
    info = path / "rlsdk_mismatched-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-mismatched\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[rlsdk]\nmismatched = benchmarks.recipes.mismatched\n", encoding="utf-8")
    return path
