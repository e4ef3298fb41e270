"""Messages between controller and worker, besides batches."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsdk.cluster.calls.dispatch import MethodSpec
from rlsdk.interfaces import Parallel, RankContext, RlsdkError, WorkerError


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """A worker's description of a host that it has just made."""

    parallel: Parallel
    methods: Mapping[str, MethodSpec]


@dataclass(frozen=True, kw_only=True)
class CreateHost:
    """Makes the host of a role."""

    host: str
    """`package.module:Class`."""
    ctx: RankContext
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Calls a method of the host of a role."""

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Packed:
    """An argument that goes to every rank, pickled once: Ray would pickle it again for each.

    It is sent like Ray's own messages, which are pickles, between processes of one run only.
    """

    data: bytes

    @classmethod
    def of(cls, value: Any) -> Any:
        """Packs a value; numbers and text stay unchanged."""
        from ray import cloudpickle

        return value if isinstance(value, str | int | float | None) else cls(cloudpickle.dumps(value))

    def load(self) -> Any:
        """The argument."""
        return pickle.loads(self.data)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception that is sent back to the controller."""

    error: bytes | None
    """The exception itself, pickled, when it is one of rlsdk's own."""
    summary: str
    """Type and message."""
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Converts an exception to a form that can be sent, whatever it holds."""
        return cls(
            error=_pickled(error) if isinstance(error, RlsdkError) else None,
            summary="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(error)),
        )

    def to_error(self, where: str) -> RlsdkError:
        """The exception to raise in the controller; `where` says which role, rank and node it comes from."""
        error = self._original()
        if error is None:
            error = WorkerError(f"{where} raised {self.summary}")
        else:
            error.add_note(f"raised by {where}")
        error.__cause__ = RemoteTracebackError(self.traceback)
        return error

    def _original(self) -> RlsdkError | None:
        if self.error is None:
            return None
        try:
            error = pickle.loads(self.error)
        except Exception:  # its class cannot be imported here: a plugin of another environment
            return None
        return error if isinstance(error, RlsdkError) else None


class RemoteTracebackError(Exception):
    """The traceback of a worker, as text: the cause of the error that the controller raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data
