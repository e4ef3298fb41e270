"""Counts the operations for which the host would wait for an accelerator, on a machine without one."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlsdk.kit.model import device_copies, pass_plan

WAITS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
"""Operators of torch whose result is a number of the host, or has a size that depends on values."""
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
"""Methods that copy to the host. On a CPU they reach no operator."""


class HostWaits:
    """Marks what `copy_together` sends to a device, and all that is computed from it, as if it were on an
    accelerator; records every wait for a marked tensor."""

    def __init__(self) -> None:
        self.found: list[str] = []
        """Of each wait: the operation, and the line of rlsdk that asked for it."""
        self.num_copies = 0
        self._marked: dict[int, Any] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts in this block."""

        def copy(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
            self.num_copies += 1
            joined = device_copies.join(tensors)
            self.mark(joined)
            return device_copies.split(joined, tensors)

        replaced = (patch.object(module, "copy_together", copy) for module in (pass_plan, device_copies))
        with ExitStack() as stack:
            for context in replaced:
                stack.enter_context(context)
            with _Reads(self), _Operators(self):
                yield

    def mark(self, tensor: Tensor) -> None:
        """Treats a tensor, and all that has its memory, as one on an accelerator."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._marked:
            self._marked[storage._cdata] = weakref.finalize(storage, self._marked.pop, storage._cdata, None)

    def is_marked(self, values: object) -> bool:
        """Whether a tensor among nested values is marked."""
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return any(tensor.untyped_storage()._cdata in self._marked for tensor in tensors)

    def record(self, name: str) -> None:
        """Adds a wait."""
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack() if "rlsdk" in frame.filename]
        here = [line for line in lines if not line.startswith(__file__)]
        self.found.append(f"{name} at {here[-1] if here else 'unknown'}")


class _Reads(TorchFunctionMode):
    """Finds copies to the host."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # By name: `to(other.device)` stays on the device that a CPU stands for here.
        to_host = func is Tensor.to and "cpu" in [
            leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, str)
        ]
        if (func in READS or to_host) and self.waits.is_marked(args[0]):
            self.waits.record(func.__name__)
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {})) if func is not Tensor.cpu else args[0].clone()
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds operators that wait, and marks results."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        marked = self.waits.is_marked((args, kwargs))
        name = func.overloadpacket.__name__
        if marked and (name in WAITS or _of_unknown_size(name, args, kwargs or {})):
            self.waits.record(name)
        found = func(*args, **(kwargs or {}))
        if marked:
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self.waits.mark(leaf)
        return found


def _of_unknown_size(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator must read a tensor to learn the size of its result: repeats without the size, or an index by
    a mask."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return False
