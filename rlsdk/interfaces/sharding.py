"""ShardingManager: moves weights from the training layout to the inference layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlsdk.interfaces.weights import Box, SyncReceipt, TensorMeta, WeightLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One box, sent from a rank that holds it to a rank that needs it."""

    name: str
    """The target's name for it; a source that holds it under a tied name resolves the name itself."""
    box: Box
    dtype: str
    """As transferred."""
    num_bytes: int
    """As transferred."""


@dataclass(frozen=True, kw_only=True)
class QuantizedPiece:
    """A box of a tensor that is served with block scales (`BlockScales`); used to verify it."""

    transfer: Transfer
    """In `BlockScales.taken_as`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    block: tuple[int, ...]
    scales: str
    """Name of the tensor that holds its scales."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Transfers from one source rank to one target rank that are sent together."""

    source: int
    """Index into the source layouts."""
    target: int
    """Index into the target layouts."""
    transport: str
    transfers: tuple[Transfer, ...]
    num_bytes: int
    round: int
    """A target receives its buckets of one round together, from different sources. All pieces of a tensor are in one
    round or in consecutive rounds. The size bound of a bucket also holds for a round."""
    readers: tuple[int, ...] = ()
    """Indices of the targets, this one among them, that receive the same transfers from this source through one ring.
    Empty: this one alone."""


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """How weights go from one layout to another. Plain data: printable, countable, the same for the same input."""

    tensors: Mapping[str, TensorMeta]
    """Every canonical tensor that is transferred, with the dtype it is sent in."""
    parts: Sequence[Sequence[Bucket]]
    """For each target its buckets, ordered by round: the order in which it receives them. A planner may create them
    lazily."""
    num_bytes: int
    """Sum over all buckets."""
    lower_bound_bytes: int
    """Bytes that targets need and do not have in their own process; no plan can move less between processes."""
    moved_bytes: int
    """Bytes that cross a process boundary. Equal to the lower bound when the plan is minimal."""
    bucket_bytes: int
    """Maximum size of a bucket, also within one process; a larger box is split."""
    source_load: Mapping[int, int] = field(default_factory=dict)
    """Bytes that each source rank sends to other processes, without relays."""
    relays: Mapping[int, int] = field(default_factory=dict)
    """Target index -> index of a target with the same needs that may forward everything to it, bucket by bucket.
    `parts` still lists what each target would take from the sources."""
    relayed_load: Mapping[int, int] = field(default_factory=dict)
    """Bytes that each source rank sends to other processes, with these relays."""
    predicted_s: float | None = None
    """Predicted duration of the transfer with these relays: time of the busiest link of any rank at full bandwidth.
    None: not predicted."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets of all targets, by target and round. For many ranks these can be millions of objects."""
        return tuple(bucket for part in self.parts for bucket in part)


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Result of one sync, over all replicas."""

    version: int
    num_tensors: int
    """Number of tensors of the plan; the names of a tied tensor count once."""
    num_bytes: int
    """Bytes received, summed over all targets."""
    moved_bytes: int
    """Bytes of `num_bytes` that crossed a process boundary."""
    changed_tensors: int
    """Number of tensors whose fingerprint differs from that of the last sync that succeeded; at a manager's first sync
    all tensors."""
    seconds: float
    """Seconds that the sync took, checks included."""
    lower_bound_bytes: int = 0
    """Minimum number of bytes that had to cross a process boundary."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per stage, in execution order, each measured from the end of the previous stage: work that overlaps
    another stage counts only for the time it adds. The stages of the switch back to training are appended when the
    phase has ended."""
    receipts: tuple[SyncReceipt, ...] = ()
    """One per replica, in the order of the replicas."""
    transports: tuple[str, ...] = ()
    """Names of the transports used, in order of preference."""
    quantized_tensors: int = 0
    """Number of tensors that a replica serves as float8 with block scales (`BlockScales`)."""
    base_bytes: int | None = None
    """If an adapter is sent alone: the bytes of `num_bytes` that are of the weights below it, 0 if they were there
    already. None: every sync sends all weights."""
    effect: float | None = None
    """If an adapter is sent alone: the smallest `SyncReceipt.effect` of the replicas. None: not measured."""


class WeightSourceHost(Protocol):
    """What every rank of a train engine provides so that targets can fetch weights from it."""

    def weight_layout(self) -> WeightLayout:
        """What this rank holds."""
        ...

    def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        """Makes the bytes of one target's buckets available to it; all use one transport. The target calls this through
        `Peer.call` while the engine works: only once per sync if the transport sends a bucket while the previous one is
        being received. `sync` is the unique name of the sync (`Relay.sync`): weights that were made available for an
        earlier one, which some target never fetched, are not those of this one. Empty: not known. Returns the
        transport's plain handle for each.

        Raises:
            WeightSyncError: another sync has begun since this one.
        """
        ...

    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> Mapping[str, int]:
        """Fingerprint of each of these tensors, computed over this rank's own memory; fingerprints of partial boxes add
        up."""
        ...

    def weight_block_maxima(self, pieces: Sequence[QuantizedPiece]) -> Sequence[NDArray[np.float32]]:
        """For each piece, the largest magnitude in every block that the piece covers only in part
        (`rlsdk.kit.weights.block_scales.shared_blocks`), `[blocks]` in the order of the scale tensor. Other ranks hold
        the rest; the block's maximum is the largest over all of them. Called when weights are served with block
        scales."""
        ...

    def weight_block_fingerprints(
        self, pieces: Sequence[QuantizedPiece], maxima: Sequence[NDArray[np.float32]]
    ) -> Mapping[str, int]:
        """As `weight_fingerprints`, for the quantized float8 values of the pieces and for the scales of the blocks that
        they cover completely. `maxima` are the maxima of the other blocks, in the order of `weight_block_maxima`."""
        ...


class WeightTargetHost(Protocol):
    """What every replica of a rollout engine provides so that weights can be delivered to it."""

    def target_layouts(self) -> Sequence[WeightLayout]:
        """The weights that this replica needs, one layout per destination."""
        ...

    def pull_weights(
        self,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Peer],
        version: int,
        timeout_s: float,
        relay: Relay | None = None,
    ) -> SyncReceipt:
        """Fetches its buckets from the sources and loads them; `peers` by index into the source layouts. `relay` names
        the sync, the replica to fetch from instead, and the replicas to forward to; None: fetch from the sources,
        forward to none. `timeout_s`: maximum time without progress, for any single answer or part of the data."""
        ...

    def pass_on_weights(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """As `WeightSourceHost.export_weights`, for what this replica receives in this sync. Another replica calls it
        through `Peer.call` and waits at most `timeout_s` for this one to join the sync."""
        ...


class EngineGroup(Protocol):
    """The ranks of one role as a ShardingManager sees them: hosts of `WeightSourceHost` on the training side, of
    `WeightTargetHost` on the serving side. Provided by the trainer."""

    @property
    def backend(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Calls a method of the host on every rank in parallel and waits; results are in rank order.

        Args:
            method: name of a method of the host.
            timeout_s: seconds without an answer and without progress of any rank that has not answered; None: the
                deadline of the run.

        Raises:
            DeadlineError: a rank did not answer in time.
            WorkerError: a rank died, or raised an error that is not one of rlsdk's. The others are not waited for.
            RlsdkError: the error that a rank raised; the others are not waited for.
        """
        ...

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """As `run`, with separate arguments for each rank. One rank alone cannot be called or waited for."""
        ...

    def peers(self) -> Sequence[Peer]:
        """One handle per rank; handles can be sent to other workers. Request them for every sync: a restarted rank has
        a new handle."""
        ...


class Peer(Protocol):
    """A rank of another role, callable from inside a worker. Picklable."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Runs a method of that rank beside what its engine does, and waits for the result, at most `timeout_s`. All
        methods of `WeightSourceHost` but `weight_layout` can be called so, and `WeightTargetHost.pass_on_weights`.

        Raises:
            DeadlineError: no answer in time.
            WorkerError: the process has died.
        """
        ...

    def local(self) -> Any | None:
        """The role object itself if it is in the calling process, else None."""
        ...


@dataclass(frozen=True, kw_only=True)
class Relay:
    """A replica's part in a sync: its name, and whom the replica receives from and forwards to."""

    parent: Peer | None = None
    """The replica that it receives everything from; None: the sources."""
    source: int = 0
    """Index of the parent in the list of peers: the number of sources plus the parent's index among targets."""
    target: int = 0
    """Index of this replica among all targets."""
    transport: str = ""
    """Transport from the parent to this replica."""
    manager: str = ""
    """Name of the manager that planned it. State that is kept by index from sync to sync belongs to that manager's
    replicas."""
    sync: str = ""
    """Unique name of this sync."""
    children: tuple[int, ...] = ()
    """Indices of the targets that receive from this one."""
    first: int = 0
    """Index of the target in its chain that receives from the sources; the buckets are addressed to it."""
    places: tuple[Relay, ...] = ()
    """For a replica whose workers receive their own parts: one `Relay` per worker that is in a chain. Then only
    `places`, `manager` and `sync` are used."""


class ShardingManager(ABC):
    """Plans the transfer of weights to the rollout engines and carries it out. One object in the controller, bound to
    one training group and one rollout group. The trainer decides when weights are on a device; when it calls `sync`,
    both sides have theirs there."""

    def __init__(
        self,
        train: EngineGroup,
        rollout: EngineGroup,
        *,
        timeout_s: float = 600.0,
        bucket_bytes: int = 64 << 20,
        transports: Sequence[str] | None = None,
    ) -> None:
        """Called by the trainer with these arguments; a subclass with more parameters must give each a default.

        Args:
            train: the training side.
            rollout: the serving side.
            timeout_s: seconds without progress in a stage of a sync.
            bucket_bytes: maximum number of bytes that one target receives at once.
            transports: names of the allowed transports, in order of preference. None: all.
        """
        self.train = train
        self.rollout = rollout
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self.transports = None if transports is None else tuple(transports)

    @abstractmethod
    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        """Decides which boxes each source sends to each target. Pure: no device, no communication. The plan depends
        on all of both layouts: names, boxes, nodes, processes and devices. A tensor is sent in the narrower of the
        source's dtype and the target's; in the target's if both are equally wide. Targets may want a tensor in
        different dtypes if it is sent to all of them in one.

        Raises:
            LayoutError: no source holds a box that a target needs, shapes differ, a tensor would be sent in several
                dtypes, or a trained tensor would not be served: no target needs it, or a target wants integers instead
                of floating-point numbers.
        """

    @abstractmethod
    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """Executes the plan. On return every replica serves `version`, and its receipt was checked against the source:
        every tensor covered, every fingerprint equal. Every call transfers the weights, whatever was served before,
        since a replica may have been restarted. Nothing is tried twice in a sync: a failed one does not count and may
        be repeated, by the trainer. No sync leaves threads or copies of weights behind, whether it succeeds or fails.

        Args:
            plan: made for the layouts of these two groups.
            version: the version that every replica serves afterwards.
            expect_change: whether it is an error if no weight changed since the last sync. None: yes if `version` is
                higher than at the last sync. The trainer passes it explicitly: a step without a training signal changes
                nothing.

        Raises:
            WeightSyncError: a tensor is not covered or not equal, or nothing changed although a change was expected.
            WorkerError: a source or a replica has died. No replica is left out.
            DeadlineError: a stage made no progress for `timeout_s`.
        """

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """Makes every replica serve the training side's weights as `version`. Called by the trainer.

        This default requests the layouts of both sides at every call. Layouts do not change during the life of the
        groups, so a manager may cache them.

        Raises:
            LayoutError: as `plan`.
            WeightSyncError: as `sync_weights`.
        """
        source: list[WeightLayout] = self.train.run(WeightSourceHost.weight_layout.__name__, timeout_s=self.timeout_s)
        replicas = self.rollout.run(WeightTargetHost.target_layouts.__name__, timeout_s=self.timeout_s)
        target = [layout for layouts in replicas for layout in layouts]
        return self.sync_weights(self.plan(source, target), version, expect_change=expect_change)
