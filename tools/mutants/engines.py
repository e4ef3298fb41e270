"""Right engines, the sources that make them, and the suite that should see a change in those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """Whose sources are changed."""

    suite: str
    """Class of `rlsdk.testing`."""
    settings: str
    """Attributes of the suite."""
    files: Sequence[str]
    first: Sequence[str]
    """Tests that are run on every mutant: one that fails them all serves nothing."""
    all_run: bool = False
    """The engine works in other processes, where statements are not noted: every test is run."""


def _named(folder: str, *names: str) -> list[str]:
    return [f"{folder}/{name}.py" for name in names]


ROLLOUT = "timeout_s = 20.0\n    leak_calls = 12"
TRAIN = "leak_steps = 15"
TRAIN_FIRST = ("test_outputs_log_probs", "test_gradient", "test_clipping")
MANAGER = "arguments = {'bucket_bytes': 2048}\n    bucket_bytes = 2048"
ENGINES = {
    "transformers": Engine(
        suite="RolloutConformance",
        settings=f"backend = 'transformers'\n    {ROLLOUT}",
        files=[
            *_named("rlsdk/reference", "decoding", "jobs", "loading", "lockstep", "rows", "running"),
            *_named("rlsdk/reference", "transformers_rollout"),
            *_named("rlsdk/kit/generation", "sampling", "stop_text", "requests"),
            "rlsdk/kit/model/packed.py",
        ],
        first=("test_log_probs", "test_samples", "test_max_tokens"),
    ),
    "torch": Engine(
        suite="TrainConformance",
        settings=f"backend = 'torch'\n    {TRAIN}",
        files=[
            "rlsdk/reference/torch_engine.py",
            *_named("rlsdk/kit/model", "outputs", "packed", "prefixes", "microbatch", "optim"),
            *_named("rlsdk/kit/files", "export", "atomic_files"),
            "rlsdk/system/atomic.py",
        ],
        first=TRAIN_FIRST,
    ),
    "fsdp": Engine(
        suite="TrainConformance",
        settings=f"backend = 'fsdp'\n    {TRAIN}",
        files=_named("plugins/fsdp/src/rlsdk_fsdp", "checkpoint", "engine", "shards", "wrapping"),
        first=TRAIN_FIRST,
        all_run=True,
    ),
    # Transports between processes have tests of their own: the suite moves what is in one.
    "sharding": Engine(
        suite="ShardingConformance",
        settings=f"backend = '*+*'\n    {MANAGER}",
        files=[
            "rlsdk/sharding/manager.py",
            *_named("rlsdk/sharding/plan", "balance", "box_table", "boxes", "cache", "holders", "matching"),
            *_named("rlsdk/sharding/plan", "packed_plan", "planner", "readers", "relays", "routes", "scales"),
            *_named("rlsdk/sharding/transfer", "calls", "fetching", "forwarding", "gathering", "receiving"),
            *_named("rlsdk/sharding/transfer", "relay_source", "source", "target", "verify", "worker_progress"),
            *_named("rlsdk/sharding/transports", "ring", "ring_memory", "ring_transport", "table", "transport", "wire"),
        ],
        first=("test_constructor", "test_bitwise", "test_cover"),
    ),
}
