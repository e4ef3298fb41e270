"""Runs Megatron-Core on a CPU: replaces the CUDA calls that it makes unconditionally.

Megatron-Core hard-codes the device (`torch.cuda.current_device()`, `device="cuda"`, `.cuda()`) in some thirty places.
`on_cpu` replaces these during a call into Megatron and restores everything when the call ends, so that no other code
in the process is affected. torch's own CPU kernels compute the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_CUDA_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
"""Results of `Tensor.type()` on a GPU: Megatron's optimizers and modules compare with these names."""


def device_scope(device: torch.device) -> AbstractContextManager[None]:
    """Context of every call into Megatron: none on CUDA, the replacements on a CPU."""
    return on_cpu() if device.type == "cpu" else nullcontext()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replaces CUDA with the CPU in this thread's tensor functions and in `torch.cuda`; reentrant."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in _replacements():
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        with _CpuMode():
            yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


class _CpuMode(TorchFunctionMode):
    """Turns requests for CUDA tensors into requests for CPU tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPES.get(args[0].dtype) or func(*args)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        return func(*args)


def _listed(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


class _Stream:
    """A stream whose work is always complete; it is its own event."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import random as megatron_random

    def random_state(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    exchange = torch.distributed.all_to_all_single

    def exchange_by_lists(*args: Any, **kwargs: Any) -> Any:
        # Megatron converts sizes to lists when it copies them from the device; on a CPU they stay tensors. The backward
        # pass calls this too, outside the function mode.
        sizes = {name: _listed(value) for name, value in kwargs.items() if name.endswith("split_sizes")}
        return exchange(*args, **{**kwargs, **sizes})

    def nothing(*args: object, **kwargs: object) -> None:
        pass

    yield torch.distributed, "all_to_all_single", exchange_by_lists
    yield torch.cuda, "current_device", lambda: _CPU
    yield torch.cuda, "synchronize", nothing
    yield torch.cuda, "empty_cache", nothing
    yield torch.cuda, "manual_seed", torch.manual_seed
    yield torch.cuda, "get_rng_state", random_state
    yield torch.cuda.random, "get_rng_state", random_state
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "stream", lambda stream: nullcontext()
    yield torch.cuda, "current_stream", _Stream
    yield torch.cuda, "default_stream", _Stream
    yield megatron_random, "_set_cuda_rng_state", set_random_state
