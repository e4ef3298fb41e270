"""A group whose ranks are in this process, each on its own engine thread: no Ray, the same calls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import Any

from rlsdk.cluster.batches.splitting import split_groups, split_near, split_rows
from rlsdk.cluster.calls.dispatch import MethodSpec, Split, asks_whole_groups, methods_of
from rlsdk.cluster.calls.joining import joiner
from rlsdk.cluster.workers.engine_thread import EngineThread
from rlsdk.interfaces import Batch, ConfigError, DeadlineError, Parallel, nearest

_CONCURRENT_CALLS = 8


@dataclass(frozen=True, kw_only=True)
class InProcessPeer:
    """Satisfies `rlsdk.interfaces.Peer`."""

    host: Any

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return getattr(self.host, method)(*args)

    def local(self) -> Any | None:
        return self.host


@dataclass(frozen=True, kw_only=True)
class InProcessPending:
    """A call that may still be running; used in place of `Pending`."""

    futures: Mapping[int, Future[Any]]
    join: Callable[[Mapping[int, Any]], Any]
    doing: str

    def done(self) -> bool:
        return all(future.done() for future in self.futures.values())

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for every rank and joins the answers.

        Raises:
            DeadlineError: some rank did not answer in time.
            Exception: what a rank raised.
        """
        wait_for_futures(self.futures.values(), timeout=timeout_s)
        try:
            return self.join({rank: future.result(timeout=0) for rank, future in self.futures.items()})
        except FutureTimeoutError:
            raise DeadlineError(f"no answer within {timeout_s:g} s {self.doing}") from None


class InProcessGroup:
    """Used in place of `WorkerGroup`. Its hosts are built by functions that run on their engine threads."""

    def __init__(self, role: str, build: Sequence[Callable[[], Any]], *, timeout_s: float = 600.0) -> None:
        """Builds every host.

        Args:
            role: for messages.
            build: makes the host of each rank.
            timeout_s: deadline of every wait that gives none of its own.
        """
        self.role = role
        self.timeout_s = timeout_s
        self._threads = [EngineThread() for _ in build]
        self._sequences = [itertools.count() for _ in build]
        self._lock = threading.Lock()
        self._concurrent = ThreadPoolExecutor(_CONCURRENT_CALLS, thread_name_prefix=f"rlsdk-{role}")
        made = [self._in_order(rank, make) for rank, make in enumerate(build)]
        self.hosts = [future.result(timeout_s) for future in made]
        self.methods = methods_of(type(self.hosts[0]))
        parallel = [
            getattr(host, "parallel", Parallel(dp_rank=rank, dp_size=len(build)))
            for rank, host in enumerate(self.hosts)
        ]
        self._parallel = parallel
        self._collectors = [rank for rank, place in enumerate(parallel) if place.is_collector] or [0]
        self._dp_size = max(place.dp_size for place in parallel)

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return self.submit(method, *args, **kwargs).result(timeout_s or self.timeout_s)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> InProcessPending:
        spec = self._spec(method)
        row_ids = None
        arguments = [(args, kwargs)] * self.world_size
        if spec.split is Split.DATA:
            first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Batch))
            row_ids = first["row_id"]
            lengths = first.lengths.tolist()
            cut = split_rows(lengths, self._dp_size)
            if "uid" in first:
                whole = asks_whole_groups((*args, *kwargs.values()))
                cut = (split_groups if whole else split_near)(lengths, first["uid"].tolist(), self._dp_size)
            arguments = [self._part(args, kwargs, cut[place.dp_rank]) for place in self._parallel]
        ranks = range(self.world_size) if spec.split in (Split.ALL, Split.DATA) else range(1)
        futures = {rank: self._call(rank, spec, method, *arguments[rank]) for rank in ranks}
        return InProcessPending(
            futures=futures, join=joiner(spec, self._collectors, row_ids), doing=f"in {self.role}.{method}"
        )

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        spec = self._spec(method)
        futures = {rank: self._call(rank, spec, method, args, {}) for rank, args in enumerate(arguments)}
        pending = InProcessPending(futures=futures, join=joiner(MethodSpec(), [0]), doing=f"in {self.role}.{method}")
        found: list[Any] = pending.result(timeout_s or self.timeout_s)
        return found

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self._call(rank, self._spec(method), method, args, {})

    def peers(self) -> list[InProcessPeer]:
        return [InProcessPeer(host=host) for host in self.hosts]

    def close(self) -> None:
        """Closes every host, and ends their threads. Safe to call twice."""
        hosts, self.hosts = self.hosts, []
        try:
            for rank, host in enumerate(hosts):
                self._in_order(rank, host.close).result(self.timeout_s)
        finally:
            for thread in self._threads:
                thread.close(self.timeout_s)
            self._concurrent.shutdown(wait=False)

    def _part(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Sequence[int]) -> tuple[Any, Any]:
        def cut(value: Any) -> Any:
            return value.select(rows) if isinstance(value, Batch) and self._dp_size > 1 else value

        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}

    def _call(
        self, rank: int, spec: MethodSpec, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        bound = getattr(self.hosts[rank], method)
        if spec.concurrent:
            return self._concurrent.submit(bound, *args, **kwargs)
        return self._in_order(rank, lambda: bound(*args, **kwargs))

    def _in_order(self, rank: int, job: Callable[[], Any]) -> Future[Any]:
        with self._lock:
            return self._threads[rank].submit(next(self._sequences[rank]), job)

    def _spec(self, method: str) -> MethodSpec:
        spec = self.methods.get(method)
        if spec is None:
            raise ConfigError(f"{self.role} has no method {method!r}{nearest(method, self.methods)}")
        return spec
