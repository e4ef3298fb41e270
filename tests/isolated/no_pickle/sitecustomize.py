"""On the path of a run, controller and workers alike: a tensor that is pickled is an error there."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _BesideTorch(importlib.abc.MetaPathFinder):
    """Steps in when torch is imported, and out again."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_forbid(module: ModuleType) -> None:
            execute(module)
            module.Tensor.__reduce_ex__ = _refuse  # type: ignore[attr-defined]

        loader.exec_module = execute_and_forbid
        return spec


def _refuse(tensor: Any, protocol: int) -> Any:
    raise RuntimeError(f"a tensor of shape {list(tensor.shape)} is pickled: environments share no torch")


sys.meta_path.insert(0, _BesideTorch())
