"""Replicas that serve the wrong weights, or report false receipts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rlsdk.interfaces import Box, SyncReceipt
from rlsdk.testing.sharding.lab import WatchedRolloutHost

Lie = Callable[[WatchedRolloutHost, SyncReceipt, Callable[[], SyncReceipt]], SyncReceipt]
"""(host, its receipt of the previous sync, function that pulls the weights) -> receipt."""


def lies() -> Mapping[str, Lie]:
    """Ways in which a replica can fail to serve the weights that it was sent, by name."""
    return {
        "keeps all as it was": _keeps_all,
        "keeps one tensor": lambda host, old, pull: _keeps(host, pull, "norm.weight", slice(None)),
        "keeps one number": lambda host, old, pull: _keeps(host, pull, "scale", ()),
        "keeps one element of its experts": lambda host, old, pull: _keeps(
            host, pull, "layers.0.experts.up", (-1, -1, -1)
        ),
        "keeps the end of a long row": lambda host, old, pull: _keeps(
            host, pull, "layers.1.wide.weight", (slice(None), slice(-20, None))
        ),
        "serves two tensors in each other's place": _exchanged,
        "serves zeros": _zeros,
        "names another version": lambda host, old, pull: replace(pull(), version=0),
        "names a later version": lambda host, old, pull: _later(pull()),
        "does not account for one tensor": lambda host, old, pull: _accounts(pull(), without="layers.1.wide.weight"),
        "accounts for nothing": lambda host, old, pull: replace(pull(), fingerprints={}),
        "says that of one tensor which is of another": _mislabelled,
        "has a fingerprint of the bytes that came before": lambda host, old, pull: _of_before(pull(), old),
    }


def damages(name: str) -> Lie:
    """Serves the weights as sent, except for the last element of this tensor."""

    def lie(host: WatchedRolloutHost, old: SyncReceipt | None, pull: Callable[[], SyncReceipt]) -> SyncReceipt:
        receipt = pull()
        _, _, tensor = next(served for served in reversed(_served(host)) if served[0] == name)
        last = (-1,) * tensor.dim()
        tensor[last] = ~tensor[last] if tensor.dtype is torch.bool else tensor[last] + 1
        return _with_own_fingerprints(host, receipt)

    return lie


def _served(host: WatchedRolloutHost) -> list[tuple[str, Box, torch.Tensor]]:
    return host.serving.served


def _with_own_fingerprints(host: WatchedRolloutHost, receipt: SyncReceipt) -> SyncReceipt:
    """A truthful receipt of the wrong weights that the host serves."""
    return replace(receipt, fingerprints=host.serving.fingerprints())


def _keeps_all(host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]) -> SyncReceipt:
    before = [tensor.clone() for _, _, tensor in _served(host)]
    receipt = pull()
    for (_, _, tensor), kept in zip(_served(host), before, strict=True):
        tensor.copy_(kept)
    return _with_own_fingerprints(host, receipt)


def _keeps(host: WatchedRolloutHost, pull: Callable[[], SyncReceipt], name: str, part: Any) -> SyncReceipt:
    before = {(n, box): tensor.clone() for n, box, tensor in _served(host) if n == name}
    receipt = pull()
    for n, box, tensor in _served(host):
        if n == name:
            tensor[part] = before[n, box][part]
    return _with_own_fingerprints(host, receipt)


def _exchanged(host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]) -> SyncReceipt:
    receipt = pull()
    a, b = (t for n, _, t in _served(host) if n in ("layers.0.qkv.bias", "layers.1.qkv.bias"))
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return _with_own_fingerprints(host, receipt)


def _zeros(host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]) -> SyncReceipt:
    receipt = pull()
    for _, _, tensor in _served(host):
        tensor.zero_()
    return _with_own_fingerprints(host, receipt)


def _later(receipt: SyncReceipt) -> SyncReceipt:
    return replace(receipt, version=receipt.version + 1)


def _accounts(receipt: SyncReceipt, without: str) -> SyncReceipt:
    return replace(receipt, fingerprints={n: v for n, v in receipt.fingerprints.items() if n != without})


def _mislabelled(host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]) -> SyncReceipt:
    receipt = pull()
    found = dict(receipt.fingerprints)
    found["norm.weight"], found["scale"] = found["scale"], found["norm.weight"]
    return replace(receipt, fingerprints=found)


def _of_before(receipt: SyncReceipt, old: SyncReceipt | None) -> SyncReceipt:
    last = "scale"
    before = old.fingerprints[last] if old is not None else receipt.fingerprints[last] ^ 1
    return replace(receipt, fingerprints={**receipt.fingerprints, last: before})
