"""Old names of public modules: each still imports for interface 2.1, with a warning that gives the new name."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED: Mapping[str, str] = {
    "rlsdk.trainer.learner.policy_gradient": "rlsdk.trainer.learner.policy_gradient",
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
