"""The ranks of one role as one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlsdk.cluster.batches.batch_ref import BatchRef
from rlsdk.cluster.calls.dispatch import Join, MethodSpec, Split, asks_whole_groups
from rlsdk.cluster.calls.handle import WorkerHandle
from rlsdk.cluster.calls.joining import joiner
from rlsdk.cluster.calls.messages import Call, Packed
from rlsdk.cluster.calls.pending import Pending, Request, answer
from rlsdk.cluster.calls.relay import Relays, by_node
from rlsdk.cluster.ray_cluster.daemons import check_daemons
from rlsdk.cluster.workers.peer import WorkerPeer
from rlsdk.interfaces import Batch, BatchError, ConfigError, Parallel, RankContext, nearest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank."""

    worker: WorkerHandle
    ctx: RankContext
    parallel: Parallel


class WorkerGroup:
    """Calls methods of a role's hosts as their `@dispatch` declarations say. Made by `Cluster.create_group`."""

    def __init__(
        self,
        role: str,
        members: Sequence[Member],
        methods: Mapping[str, MethodSpec],
        *,
        put: Callable[[Batch], BatchRef],
        timeout_s: float,
    ) -> None:
        self.role = role
        self.members = list(members)
        self.methods = methods
        self.timeout_s = timeout_s
        self._put = put
        self._collectors = [m.ctx.rank for m in members if m.parallel.is_collector] or [0]
        self._dp_size = max(m.parallel.dp_size for m in members)
        self._bystanders = [self._request(member.ctx.rank, None) for member in members]
        self._unanswered: list[list[Any]] = [[] for _ in members]
        self._relays = Relays()

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def contexts(self) -> list[RankContext]:
        return [member.ctx for member in self.members]

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Calls a method and waits; the method's declaration says on which ranks and what is returned.

        Raises:
            DeadlineError: some rank did not answer within `timeout_s` (None: the cluster's).
            WorkerError: a rank died, or raised an error that is not one of rlsdk's.
            RlsdkError: the error that a rank raised.
            ConfigError: no such method; names the nearest.
        """
        return self.submit(method, *args, **kwargs).result(timeout_s)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """As `run`, without waiting. Calls of one group run in the order of submission."""
        spec = self._spec(method)
        if spec.split is Split.DATA:
            return self._submit_data(method, spec, args, kwargs)
        shared = tuple(self._shared(value) for value in args)
        shared_by_name = {name: self._shared(value) for name, value in kwargs.items()}
        if spec.split is Split.ALL:
            ranks = range(self.world_size)
        else:
            rank = 0 if spec.split is Split.RANK_ZERO else self._idlest()
            ranks = range(rank, rank + 1)
        return self._send(spec, {rank: self._call(rank, method, shared, shared_by_name) for rank in ranks})

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Calls a method on every rank with its own arguments; results in rank order, whatever is declared.

        Raises:
            ConfigError: not one tuple of arguments per rank.
        """
        spec = self._spec(method)
        if len(arguments) != self.world_size:
            raise ConfigError(
                f"{self.role}.{method}: got arguments for {len(arguments)} ranks, the group has {self.world_size}"
            )
        calls = {
            rank: self._call(rank, method, tuple(self._shared(value) for value in args), {})
            for rank, args in enumerate(arguments)
        }
        results: list[Any] = self._send(MethodSpec(concurrent=spec.concurrent), calls).result(timeout_s)
        return results

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """Calls a method on one rank; the future holds its answer, or raises as `run` does. It has no deadline."""
        check_daemons()
        spec = self._spec(method)
        shared = tuple(self._shared(value) for value in args)
        call = self._call(rank, method, shared, {})
        request = self._request(rank, self.members[rank].worker.call(call, concurrent=spec.concurrent))
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # the caller may stop waiting; the answer still arrives

        def done(found: Future[Any]) -> None:
            try:
                result.set_result(answer(request, f"in {self.role}.{method}", found.result))
            except Exception as error:
                result.set_exception(error)

        request.ref.future().add_done_callback(done)
        return result

    def death(self, rank: int) -> BaseException | None:
        """Reason why the process of a rank died; None while it lives. Does not block."""
        return self.members[rank].worker.death()

    def replace(self, rank: int, member: Member) -> None:
        """Replaces the dead process of a rank by a new one."""
        self._relays.forget(self.members[rank].worker.worker_id)
        self.members[rank] = member
        self._bystanders[rank] = self._request(rank, None)
        self._unanswered[rank] = []

    def peers(self) -> list[WorkerPeer]:
        """A handle per rank that can be sent to another worker."""
        return [
            WorkerPeer(
                actor=member.worker.actor,
                worker_id=member.worker.worker_id,
                role=self.role,
                rank=member.ctx.rank,
                where=member.worker.where(),
            )
            for member in self.members
        ]

    def _spec(self, method: str) -> MethodSpec:
        spec = self.methods.get(method)
        if spec is None:
            raise ConfigError(
                f"{self.role} has no method {method!r}{nearest(method, self.methods)}; it has {sorted(self.methods)}"
            )
        return spec

    def _submit_data(self, method: str, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        """Splits every batch among the arguments by the same rows; groups stay whole if another argument requires
        it."""
        values: dict[int | str, Any] = dict(enumerate(args))
        values.update(kwargs)
        batches = {key: self._stored(value) for key, value in values.items() if isinstance(value, Batch | BatchRef)}
        if not batches:
            raise BatchError(
                f"{self.role}.{method} splits a batch over its ranks, but no argument is a Batch or BatchRef"
            )
        first = next(iter(batches.values()))
        for key, batch in batches.items():
            if batch.num_rows != first.num_rows:
                raise BatchError(
                    f"{self.role}.{method}: batches to split have {first.num_rows} rows, but argument {key!r} has "
                    f"{batch.num_rows}"
                )
        cut = first.cut(self._dp_size, whole_groups=asks_whole_groups(values.values()))
        parts = {key: batch.shares(cut, self._nodes_of_share()) for key, batch in batches.items()}
        shared = {key: value if key in parts else Packed.of(value) for key, value in values.items()}
        calls = {}
        for member in self.members:
            mine = dict(shared)
            node = member.worker.known().node_id
            mine.update((key, part[member.parallel.dp_rank][node]) for key, part in parts.items())
            positional = tuple(mine[at] for at in range(len(args)))
            rank = member.ctx.rank
            calls[rank] = self._call(rank, method, positional, {name: mine[name] for name in kwargs})
        return self._send(spec, calls, row_ids=first.row_ids)

    def _send(self, spec: MethodSpec, calls: Mapping[int, Call], row_ids: torch.Tensor | None = None) -> Pending:
        """Sends the calls. `row_ids`: ids of the rows that the calls share."""
        # Ranks that share rows are lost together; others, which are replaced one by one, each get their own message.
        workers = {rank: self.members[rank].worker for rank in calls}
        together = by_node(workers) if row_ids is not None else ([rank] for rank in calls)
        requests = [self._ask(ranks, calls, concurrent=spec.concurrent) for ranks in together]
        if spec.split is Split.ANY:
            self._unanswered[requests[0].rank].append(requests[0].ref)
        method = next(iter(calls.values())).method
        return Pending(
            requests,
            doing=f"in {self.role}.{method}",
            join=joiner(spec, self._collectors, row_ids),
            timeout_s=self.timeout_s,
            bystanders=self._bystanders,
            first_done=spec.join is Join.FIRST_DONE,
        )

    def _ask(self, ranks: Sequence[int], calls: Mapping[int, Call], *, concurrent: bool) -> Request:
        """Sends one message: to one rank, or through the first of several ranks on one node."""
        workers = [self.members[rank].worker for rank in ranks]
        if len(ranks) == 1:
            return self._request(ranks[0], workers[0].call(calls[ranks[0]], concurrent=concurrent))
        ref = self._relays.send(workers, [calls[rank] for rank in ranks], concurrent=concurrent)
        return replace(self._request(ranks[0], ref), relayed=tuple(self._request(rank, None) for rank in ranks))

    def _nodes_of_share(self) -> list[frozenset[str]]:
        """Nodes of each data-parallel rank."""
        nodes: list[set[str]] = [set() for _ in range(self._dp_size)]
        for member in self.members:
            nodes[member.parallel.dp_rank].add(member.worker.known().node_id)
        return [frozenset(on) for on in nodes]

    def _call(self, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return Call(role=self.members[rank].ctx.role, method=method, args=args, kwargs=kwargs)

    def _request(self, rank: int, ref: Any) -> Request:
        return Request(ref=ref, worker=self.members[rank].worker, role=self.role, rank=rank)

    def _shared(self, value: Any) -> Any:
        """Stores a batch once that goes whole to several ranks."""
        return self._stored(value).stored() if isinstance(value, Batch | BatchRef) else value

    def _stored(self, value: Batch | BatchRef) -> BatchRef:
        return value if isinstance(value, BatchRef) else self._put(value)

    def _idlest(self) -> int:
        """The rank with the fewest unanswered calls, lowest number first."""
        import ray

        for rank, refs in enumerate(self._unanswered):
            if refs:
                _, self._unanswered[rank] = ray.wait(refs, num_returns=len(refs), timeout=0)
        return min(range(self.world_size), key=lambda rank: len(self._unanswered[rank]))
