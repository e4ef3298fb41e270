"""Old names of public modules: each still imports for interface 2.1, with a warning that gives the new name."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

KIT: Mapping[str, str] = {
    "ranks": "companions error_agreement metric_sums object_store other_nodes progress rendezvous replica_devices "
    "shared_memory waiting",
    "files": "export hub model_files weight_files",
    "weights": "block_scales delivery file_tensors staging tensor_origins weight_fit weight_tracing weight_updates",
    "model": "hf microbatch optim outputs packed prefixes tokenizers",
    "memory": "forecast kv_cache memory_parts offload pass_memory worker_forecast",
    "generation": "requests sampling serving stop_text",
    "guards": "guarded_rollout guarded_train",
}
"""Folder of `rlsdk.kit` -> modules that stood in the kit itself."""
MOVED: Mapping[str, str] = {
    **{f"rlsdk.kit.{name}": f"rlsdk.kit.{folder}.{name}" for folder, names in KIT.items() for name in names.split()},
    "rlsdk.kit.atomic": "rlsdk.kit.files.atomic_files",
    "rlsdk.kit.balance": "rlsdk.cluster.batches.balance",
    "rlsdk.kit.interrupts": "rlsdk.system.interrupts",
    "rlsdk.kit.output": "rlsdk.kit.files.write_errors",
    "rlsdk.kit.quantities": "rlsdk.system.quantities",
    "rlsdk.testing.local_groups": "rlsdk.testing.sharding.local_groups",
    "rlsdk.testing.models": "rlsdk.testing.process.models",
    "rlsdk.testing.reference": "rlsdk.testing.process.reference",
    "rlsdk.testing.tensor_engines": "rlsdk.testing.sharding.tensor_engines",
    "rlsdk.trainer.policy_gradient": "rlsdk.trainer.learner.policy_gradient",
}
"""Old module -> its new name."""
UNTIL = "interface 2.2"
"""When the old names go."""


def keep_old_names(moved: Mapping[str, str] = MOVED) -> None:
    """Makes the old names importable, in this process."""
    sys.meta_path.append(_OldNames(moved))


class _OldNames(MetaPathFinder):
    """Asked last, so that a module that exists is never hidden."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = moved

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = self.moved.get(fullname)
        return ModuleSpec(fullname, _Renamed(new), origin=new) if new is not None else None


class _Renamed(Loader):
    """Gives the very module that has the new name: its classes and its state are the same under both."""

    def __init__(self, new: str) -> None:
        self.new = new
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(
            f"{spec.name} is now {self.new}; the old name goes with {UNTIL}: change the import",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has put the old name's there
