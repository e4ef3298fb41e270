"""ShardingManager: how weights go from the training layout to the inference layout."""

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
    """One box, from the rank that holds it to the rank that wants it."""

    name: str
    """As the target calls it; a source that holds it under a tied name resolves that itself."""
    box: Box
    dtype: str
    """On the wire."""
    num_bytes: int
    """On the wire."""


@dataclass(frozen=True, kw_only=True)
class QuantizedPiece:
    """A box of a tensor that is served with block scales (`BlockScales`), for its proof."""

    transfer: Transfer
    """In `BlockScales.taken_as`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    block: tuple[int, ...]
    scales: str
    """Name of its tensor of scales."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Transfers from one source rank to one target rank that move together."""

    source: int
    """Index into the source layouts."""
    target: int
    """Index into the target layouts."""
    transport: str
    transfers: tuple[Transfer, ...]
    num_bytes: int
    round: int
    """Buckets of one target with the same round, from different sources, are taken together: all pieces of a name are
    in one round, or in rounds that follow each other. A round is bounded like a bucket."""


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """How weights go from one layout to another. Plain data: printable, countable, the same for the same input."""

    tensors: Mapping[str, TensorMeta]
    """Every canonical tensor that moves, with its dtype on the wire."""
    parts: Sequence[Sequence[Bucket]]
    """For each target its buckets, by round: the order in which it takes them. A planner may make them when they are
    asked for."""
    num_bytes: int
    """Sum over all buckets."""
    lower_bound_bytes: int
    """What targets lack in their own process; no plan can move less between processes."""
    moved_bytes: int
    """Bytes that cross a process boundary. Equal to the lower bound when the plan is minimal."""
    bucket_bytes: int
    """Bound on a bucket; a single larger box is cut."""
    source_load: Mapping[int, int] = field(default_factory=dict)
    """Bytes that each source rank sends where nothing is relayed."""
    relays: Mapping[int, int] = field(default_factory=dict)
    """Index of a target -> index of the target that may pass on to it all that it takes, bucket by bucket: they want
    the same. `parts` holds what each takes from the sources all the same."""
    relayed_load: Mapping[int, int] = field(default_factory=dict)
    """Bytes that each source rank sends with these relays."""
    predicted_s: float | None = None
    """Of the move, with these relays: the busiest link of any rank, kept full. None: not predicted."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Of all targets, by target and round. Of a plan for many ranks these are millions of objects."""
        return tuple(bucket for part in self.parts for bucket in part)


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one sync did, over all replicas."""

    version: int
    num_tensors: int
    num_bytes: int
    """That reached all targets together."""
    moved_bytes: int
    """Of those, what crossed a process boundary."""
    changed_tensors: int
    """Tensors whose fingerprint differs from the last sync's."""
    seconds: float
    lower_bound_bytes: int = 0
    """Least that had to cross a process boundary."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage, in the order in which they ran, each from the end of the one before: work that went on beside
    another stage counts by what it took longer. The stages of the way back follow when the phase has ended."""
    receipts: tuple[SyncReceipt, ...] = ()
    transports: tuple[str, ...] = ()
    """Names of those by which the bytes came, in order of preference."""
    quantized_tensors: int = 0
    """Of the tensors, those that a replica serves as float8 with block scales (`BlockScales`)."""


class WeightSourceHost(Protocol):
    """What every rank of a train engine serves, for weights to be taken from it."""

    def weight_layout(self) -> WeightLayout:
        """What this rank holds."""
        ...

    def export_weights(self, buckets: Sequence[Bucket]) -> Sequence[Mapping[str, Any]]:
        """Makes the bytes of buckets of one target, all of one transport, available to it. The target calls this
        through `Peer.call` while the engine works: once in a sync where the transport sends a bucket while the one
        before is taken. Returns the transport's plain handle of each."""
        ...

    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> Mapping[str, int]:
        """Fingerprint of each of these tensors, computed over this rank's own memory: partial ones of boxes add up."""
        ...

    def weight_block_maxima(self, pieces: Sequence[QuantizedPiece]) -> Sequence[NDArray[np.float32]]:
        """Of each piece, the largest magnitudes in the blocks of which it has a part only
        (`rlsdk.kit.block_scales.shared_blocks`), `[blocks]` in the order of the tensor of scales: others have the rest,
        and the greatest of all is the block's. Asked where weights are served with block scales."""
        ...

    def weight_block_fingerprints(
        self, pieces: Sequence[QuantizedPiece], maxima: Sequence[NDArray[np.float32]]
    ) -> Mapping[str, int]:
        """As `weight_fingerprints`, of the float8 values that the pieces come to, and of the scales of the blocks that
        they have whole. `maxima` are those of the other blocks, in the order of `weight_block_maxima`."""
        ...


class WeightTargetHost(Protocol):
    """What every replica of a rollout engine serves, for weights to be brought to it."""

    def target_layouts(self) -> Sequence[WeightLayout]:
        """What this replica wants at each of its places."""
        ...

    def pull_weights(
        self,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Peer],
        version: int,
        timeout_s: float,
        relay: Relay | None = None,
    ) -> SyncReceipt:
        """Takes its buckets from the sources and loads them; `peers` by index into the source layouts. `relay` says
        from which replica they come instead, and to which they go on; None: from the sources, and to nobody.
        `timeout_s`: longest wait without progress, for any one answer or part of what comes."""
        ...

    def pass_on_weights(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """As `WeightSourceHost.export_weights`, of what this replica takes in this sync: another replica calls it,
        through `Peer.call`, and waits at most `timeout_s` until this one takes part."""
        ...


class EngineGroup(Protocol):
    """The ranks of one role as a ShardingManager sees them: hosts of `WeightSourceHost` on the training side, of
    `WeightTargetHost` on the serving side. Provided by the trainer."""

    @property
    def backend(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Calls a method of the host on every rank at once and waits: results in rank order."""
        ...

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """As `run`, with arguments of its own for each rank."""
        ...

    def peers(self) -> Sequence[Peer]:
        """A handle per rank that can be sent to another worker."""
        ...


class Peer(Protocol):
    """A rank of another role, callable from inside a worker. Picklable."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Runs a concurrent method of that rank and waits for its result, at most `timeout_s`.

        Raises:
            DeadlineError: no answer in time.
            WorkerError: the process is gone.
        """
        ...

    def local(self) -> Any | None:
        """The role object itself when it lives in the calling process, else None."""
        ...


@dataclass(frozen=True, kw_only=True)
class Relay:
    """A replica's part in passing weights on."""

    parent: Peer | None = None
    """The replica that it takes all from; None: the sources."""
    source: int = 0
    """By what the parent goes among sources: their number and its own index among targets."""
    target: int = 0
    """Index of the replica's place among all targets."""
    transport: str = ""
    """From the parent to here."""
    manager: str = ""
    """Names the manager that planned it. What is kept from sync to sync, by index, is of its replicas."""
    sync: str = ""
    """Names this sync, and no other."""
    children: tuple[int, ...] = ()
    """Indices of the targets that take from this one."""
    first: int = 0
    """Index of the target of its chain that takes from the sources: the buckets are made out to it."""
    places: tuple[Relay, ...] = ()
    """Of a replica whose workers take their own parts: the part of each of its places that is in a chain. Besides them
    only `manager` and `sync` count then."""


class ShardingManager(ABC):
    """Plans how weights go to the rollout engines, and brings them there. One object in the controller, bound to one
    training group and one rollout group. Whose memory is on a device, and when, is the trainer's business: both sides
    have their weights there when it calls `sync`."""

    def __init__(
        self,
        train: EngineGroup,
        rollout: EngineGroup,
        *,
        timeout_s: float = 600.0,
        bucket_bytes: int = 64 << 20,
        transports: Sequence[str] | None = None,
    ) -> None:
        """What the trainer passes; a subclass with more parameters gives each a default.

        Args:
            train: the training side.
            rollout: the serving side.
            timeout_s: seconds without progress in a stage of a sync.
            bucket_bytes: bound of what one target takes at once.
            transports: names, in order of preference, of those that may be used. None: all.
        """
        self.train = train
        self.rollout = rollout
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self.transports = None if transports is None else tuple(transports)

    @abstractmethod
    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        """Which boxes go from where to where. Pure: no device, no communication.

        Raises:
            LayoutError: a wanted box is held by nobody, shapes differ, or a tensor that is trained would not be served
                as it is: no target asks for it, or asks for whole numbers in place of floating ones.
        """

    @abstractmethod
    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """Carries the plan out; on return every replica serves `version`, and its receipt was checked against the
        source: every tensor covered, every fingerprint equal. Weights are brought at every call, whatever was served
        before: a replica may have been started anew. A sync that failed counts for nothing, and may be repeated.

        Args:
            plan: made for the layouts of these two groups.
            version: what every replica serves afterwards.
            expect_change: whether weights that are all as they were at the last sync are an error. None: when `version`
                is higher than then. The trainer knows better: a step without signal changes nothing.

        Raises:
            WeightSyncError: not covered, not equal, or unchanged though a change was expected.
        """

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """Has every replica serve the training side's weights as `version`: what the trainer calls.

        This default asks both sides for their layouts at every call. They stay as they are for the life of the groups,
        so a manager may remember them.

        Raises:
            LayoutError: as `plan`.
            WeightSyncError: as `sync_weights`.
        """
        source: list[WeightLayout] = self.train.run(WeightSourceHost.weight_layout.__name__, timeout_s=self.timeout_s)
        replicas = self.rollout.run(WeightTargetHost.target_layouts.__name__, timeout_s=self.timeout_s)
        target = [layout for layouts in replicas for layout in layouts]
        return self.sync_weights(self.plan(source, target), version, expect_change=expect_change)
