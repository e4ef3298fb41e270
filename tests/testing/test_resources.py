"""What a process holds is measured, whatever else is among its objects."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from rlsdk.testing.process.resources import num_tensors, objects, only_new_objects, storages, tensor_bytes

SIZE = 1 << 20


class Untouchable:
    """Answers no question, not even for its class."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __hash__(self) -> int:
        raise AssertionError("asked for its hash")

    def __bool__(self) -> bool:
        raise AssertionError("asked for its truth")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")


class UntouchableKind(type):
    """A class of classes that answer nothing either."""

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __hash__(cls) -> int:
        raise AssertionError("asked for its hash")

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")


class UntouchableTensor(torch.Tensor):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")


class LazyModule(ModuleType):
    """Would be imported by a look at its class."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(name)


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(SIZE)


def kind_that_answers_nothing() -> object:
    return UntouchableKind("Kind", (), {"__module__": 7})()


def proxy_of_what_is_gone() -> object:
    return weakref.proxy(threading.Event())


STRANGE: dict[str, Callable[[], object]] = {
    "fake tensor": fake_tensor,
    "meta tensor": lambda: torch.empty(SIZE, device="meta"),
    "functional tensor": lambda: torch._to_functional_tensor(torch.empty(0)),
    "sparse tensor": lambda: torch.zeros(SIZE).to_sparse(),
    "parameter of a lazy layer": UninitializedParameter,
    "object that answers nothing": Untouchable,
    "class that answers nothing": kind_that_answers_nothing,
    "lazy module": lambda: LazyModule("lazy"),
    "proxy": proxy_of_what_is_gone,
}


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with only_new_objects():
        yield


@pytest.mark.parametrize("name", STRANGE)
def test_memory_is_measured_beside_any_object_without_asking_it(name: str) -> None:
    before, many, count = tensor_bytes(), objects().total(), num_tensors()
    kept = [STRANGE[name](), object.__new__(Untouchable)]
    weight = torch.zeros(SIZE)
    assert tensor_bytes() - before == weight.nbytes
    assert (weight.data_ptr(), weight.nbytes) in storages()
    assert objects().total() > many
    assert num_tensors() >= count + 1
    del kept


def test_memory_of_every_kind_of_tensor_counts_once() -> None:
    before = tensor_bytes()
    whole = torch.zeros(SIZE)
    kept = [whole[3:], torch.nn.Parameter(whole), whole.as_subclass(UntouchableTensor)]
    assert tensor_bytes() - before == whole.nbytes
    del kept


def test_views_of_one_block_count_as_the_largest_of_them() -> None:
    before = tensor_bytes()
    block = bytearray(SIZE)
    kept = [torch.frombuffer(block, dtype=torch.uint8, count=count) for count in (SIZE, 100, SIZE // 2)]
    assert tensor_bytes() - before == SIZE
    del kept


def test_the_part_of_a_distributed_tensor_counts_and_not_its_whole() -> None:
    before = tensor_bytes()
    part = torch.zeros(SIZE)
    whole = cast("torch.Tensor", torch.Tensor._make_wrapper_subclass(DTensor, (64 * SIZE,), dtype=torch.float32))
    assert tensor_bytes() - before == part.nbytes
    del whole
