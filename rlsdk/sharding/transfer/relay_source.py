"""A replica as a source for other replicas: forwards weights while it is receiving them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlsdk.interfaces import Bucket, Relay, Transfer, WeightSyncError
from rlsdk.sharding.transfer.forwarding import Forwarder, merged_rounds
from rlsdk.sharding.transports.table import make_transport
from rlsdk.sharding.transports.transport import Outgoing, Transport


def from_parent(buckets: Sequence[Bucket], relay: Relay, order: Mapping[str, int]) -> list[Bucket]:
    """The buckets that a replica receives from the previous one in a chain, instead of those that the first replica of
    the chain receives from the sources."""
    return [
        Bucket(
            source=relay.source,
            target=relay.target,
            transport=relay.transport,
            transfers=tuple(transfers),
            num_bytes=sum(transfer.num_bytes for transfer in transfers),
            round=number,
        )
        for number, transfers in enumerate(merged_rounds(buckets, order))
    ]


class RelaySource:
    """One per replica. `export` is called on threads other than the pull's, one for each target that receives from this
    replica."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._forwarders: dict[int, Forwarder] = {}
        self._left: dict[int, deque[Outgoing]] = {}
        self._transports: dict[int, Transport] = {}
        self._manager = ""
        self._sync = ""
        """Name of the sync in progress, or of the last one."""
        self._broken = ("", "")
        """The last sync that failed here, and why."""

    def begin(
        self, rounds: Mapping[int, Sequence[Sequence[Transfer]]], relay: Relay, timeout_s: float, device: str
    ) -> dict[int, Forwarder]:
        """Starts a sync: the children can receive these rounds as they are put.

        Args:
            rounds: by child, from `merged_rounds`.
            relay: names the sync.
            timeout_s: longest wait for one round to arrive or to be taken.
            device: device on which the weights arrive.

        Returns:
            The forwarder of each child.
        """
        made = {child: Forwarder(mine, timeout_s, torch.device(device)) for child, mine in rounds.items()}
        if relay.manager != self._manager:
            self.close()
            self._manager = relay.manager
        with self._changed:
            for transport in self._transports.values():
                transport.start_sync()
            self._sync = relay.sync
            self._forwarders, self._left = made, {child: deque(f.outgoing) for child, f in made.items()}
            self._changed.notify_all()
        return made

    def export(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """As `WeightSource.export`, for the next rounds of one of the children.

        Args:
            buckets: buckets of one child.
            sync: name of the sync; the pull of this replica may not have begun yet.
            timeout_s: longest wait for the pull to begin.

        Raises:
            WeightSyncError: this sync failed here, or no pull begins that forwards to the child.
        """
        target, name = buckets[0].target, buckets[0].transport
        end = time.monotonic() + timeout_s
        with self._changed:
            while self._sync != sync or target not in self._left:
                broken, why = self._broken
                if broken == sync:
                    raise WeightSyncError(why)
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise WeightSyncError(f"target {target} asked for weights that are not passed on to it")
            left, forwarder = self._left[target], self._forwarders[target]
            asked = [left.popleft() for _ in buckets[: len(left)]]
            if not left:
                del self._left[target]
            transport = self._transports.get(target)
            if transport is None or transport.name != name:
                if transport is not None:
                    transport.close()
                transport = self._transports[target] = make_transport(name)
        if [[(t.box.size, t.dtype) for t in b.transfers] for b in buckets] != [list(o.metas) for o in asked]:
            forwarder.fail("the two replicas do not agree on what is passed on")
            raise WeightSyncError(f"target {target} asked for other weights than those that are passed on to it")
        return transport.export(asked)

    def fail(self, sync: str, why: str) -> None:
        """Aborts the children's pulls too, including those of children that call later."""
        with self._changed:
            self._broken, self._left = (sync, why), {}
            for forwarder in self._forwarders.values():
                forwarder.fail(why)
            self._changed.notify_all()

    def close(self) -> None:
        """Frees the memory that transports hold."""
        held, self._transports = self._transports, {}
        for transport in held.values():
            transport.close()
