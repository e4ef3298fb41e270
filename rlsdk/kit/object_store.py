"""Arrays that any worker of a run can fetch. The cluster package provides each process with its store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rlsdk.interfaces import RlsdkError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ObjectStore(Protocol):
    """One per process."""

    def put(self, data: NDArray[np.uint8]) -> Any:
        """Copies the bytes into the store; returns a handle that calls between workers can carry."""
        ...

    def get(self, handle: Any, timeout_s: float) -> NDArray[np.uint8]:
        """The bytes, in the store's own memory: read-only.

        Raises:
            DeadlineError: not here in time.
            WorkerError: they are gone, with the worker that put them there.
        """
        ...


_stores: list[ObjectStore] = []


def use_store(store: ObjectStore | None) -> None:
    """Says what this process's store is; None: it has none any more."""
    _stores[:] = [] if store is None else [store]


def has_store() -> bool:
    """True in the controller and the workers of a cluster."""
    return bool(_stores)


def get_store() -> ObjectStore:
    """This process's store; raises `RlsdkError` where there is none."""
    if not _stores:
        raise RlsdkError("this process has no object store: it is neither the controller nor a worker of a cluster")
    return _stores[0]
