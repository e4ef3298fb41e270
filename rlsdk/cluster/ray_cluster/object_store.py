"""Ray's object store, for packages that do not import Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlsdk.interfaces import DeadlineError, WorkerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RayObjectStore:
    """Satisfies `rlsdk.kit.ranks.object_store.ObjectStore`."""

    def put(self, data: NDArray[np.uint8]) -> Any:
        import ray

        return ray.put(data)

    def get(self, handle: Any, timeout_s: float) -> NDArray[np.uint8]:
        import ray

        try:
            data: NDArray[np.uint8] = ray.get(handle, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"the object store did not bring the bytes within {timeout_s:g} s") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the object store could not bring the bytes: {error}") from error
        return data
