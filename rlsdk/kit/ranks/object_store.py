"""Store of arrays that any worker of a run can fetch. The cluster package registers the store of each process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rlsdk.interfaces import RlsdkError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ObjectStore(Protocol):
    """One per process."""

    def put(self, data: NDArray[np.uint8]) -> Any:
        """Copies the bytes into the store; returns a handle that can be sent to other workers."""
        ...

    def get(self, handle: Any, timeout_s: float) -> NDArray[np.uint8]:
        """Returns the bytes in the store's own memory, read-only.

        Raises:
            DeadlineError: they did not arrive in time.
            WorkerError: they are lost, because the worker that stored them died.
        """
        ...


_stores: list[ObjectStore] = []


def use_store(store: ObjectStore | None) -> None:
    """Sets the store of this process; None: it has none any more."""
    _stores[:] = [] if store is None else [store]


def has_store() -> bool:
    """Whether this process has a store: true in the controller and the workers of a cluster."""
    return bool(_stores)


def get_store() -> ObjectStore:
    """The store of this process; raises `RlsdkError` if it has none."""
    if not _stores:
        raise RlsdkError("this process has no object store: it is neither the controller nor a worker of a cluster")
    return _stores[0]
