"""On the path of a run, controller and workers alike: a tensor that Ray pickles is an error there.

What an engine pickles for its own processes, which are of its own environment, is its own business.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

RAYS_PICKLER = "ray/_private/serialization.py"


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
            tensor: Any = vars(module)["Tensor"]
            tensor.__reduce_ex__ = _refusing(tensor.__reduce_ex__)

        loader.exec_module = execute_and_forbid
        return spec


def _refusing(reduce: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """How tensors say what they are pickled as, but not to Ray."""

    def reduce_ex(tensor: Any, protocol: int) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.endswith(RAYS_PICKLER):
                raise RuntimeError(f"a tensor of shape {list(tensor.shape)} is pickled: environments share no torch")
            frame = frame.f_back
        return reduce(tensor, protocol)

    return reduce_ex


def _run_next() -> None:
    """Python takes the first module of this name only: runs the next one on the path, such as an engine's stand-ins."""
    here = os.path.dirname(__file__)
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _BesideTorch())
_run_next()
