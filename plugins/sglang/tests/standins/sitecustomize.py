"""Stand-ins for what SGLang imports and a machine without a GPU cannot have: compiled kernels, and torchvision.

Test material. On PYTHONPATH, so that every process gets it. Nothing that computes is replaced: SGLang's own torch path
runs, and a stand-in that is called raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

LACKING = ("sgl_kernel", "torchvision")


class StandIn(types.ModuleType):
    """A module whose functions and classes can be imported, and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self.__name__ == "sgl_kernel" and not name.endswith("_cpu")):
            raise AttributeError(name)

        def lacking(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has no build for this machine")

        return lacking


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        top = name.partition(".")[0]
        if name not in LACKING and top != "torchvision":
            return None
        # What is there, is used.
        if importlib.machinery.PathFinder.find_spec(top) is not None or not _asked_by_sglang():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=top == "torchvision")

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sgl_kernel":
            module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu  # type: ignore[attr-defined]


class Pinless:
    """`torch` for SGLang's adapters, which ask for pinned memory, and a machine without an accelerator has none."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("tensor", "empty", "zeros", "arange"):
            return found

        def without(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

        return without


class Adapters(importlib.abc.MetaPathFinder):
    """Takes pinned memory out of SGLang's modules of adapters, and out of no other module."""

    busy = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if not name.startswith("sglang.srt.lora.") or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            if "torch" in vars(module):
                import torch

                module.torch = Pinless()  # type: ignore[attr-defined]
                torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _asked_by_sglang() -> bool:
    """transformers and others look whether torchvision is there, and must find that it is not."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and "/site-packages/sglang/" in frame.f_code.co_filename


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """The one kernel that SGLang's torch path needs: notes where each request's new tokens are kept."""
    done = 0
    for row, low, high in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, low:high] = out_cache_loc[done : done + high - low].to(req_to_token.dtype)
        done += high - low


sys.meta_path.insert(0, Finder())
sys.meta_path.insert(0, Adapters())
