"""Invariants of every successful sync and of every executed plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlsdk.interfaces import Box, ReshardPlan, SyncReport

Held = Mapping[str, tuple[Tensor, ...]]


class Synced(Protocol):
    """A manager and its groups after a sync, and the weights that it should have transferred: a `Trial`."""

    truth: dict[str, Tensor]
    """Name in the sources -> the whole tensor in their dtype."""
    tied: dict[str, str]

    @property
    def sources(self) -> Sequence[Any]: ...

    @property
    def replicas(self) -> Sequence[Any]: ...

    def plan(self) -> ReshardPlan: ...

    def differing(self) -> list[str]: ...


def held_by_sources(trial: Synced) -> Held:
    """Name in the sources -> copies of all their boxes of this tensor, by rank."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for host in trial.sources:
        engine: Any = host.engine
        for name, _, tensor in engine.held:
            found[name] = (*found.get(name, ()), tensor.detach().clone())
    return found


def wrong_sync(trial: Synced, report: SyncReport, version: int, before: Held | None) -> list[str]:
    """False statements of a report, and boxes that did not arrive.

    Args:
        trial: the trial after its sync.
        report: the report of the sync.
        version: the requested version.
        before: weights of the sources at the last successful sync; None: there was none.
    """
    held, plan = held_by_sources(trial), trial.plan()
    changed = sum(_has_changed(trial, name, meta.dtype, held, before) for name, meta in plan.tensors.items())
    expected = {
        "version": (report.version, version),
        "num_tensors": (report.num_tensors, len(plan.tensors)),
        "num_bytes": (report.num_bytes, plan.num_bytes),
        "moved_bytes": (report.moved_bytes, plan.moved_bytes),
        "lower_bound_bytes": (report.lower_bound_bytes, plan.lower_bound_bytes),
        "changed_tensors": (report.changed_tensors, changed),
        "receipts": (len(report.receipts), len(trial.replicas)),
    }
    faults = [f"{name} {said}, expected {right}" for name, (said, right) in expected.items() if said != right]
    versions = [receipt.version for receipt in report.receipts]
    faults += [f"receipts of versions {versions}"] if set(versions) - {version} else []
    return faults + (trial.differing() if _hold_truth(trial) else [])


def _has_changed(trial: Synced, name: str, dtype: str, held: Held, before: Held | None) -> bool:
    """Whether a tensor has changed, in the dtype in which it is sent."""
    if before is None:
        return True
    own, kind = trial.tied.get(name, name) if name not in held else name, getattr(torch, dtype)
    pairs = zip(held[own], before[own], strict=True)
    return not all(same_bits(now.to(kind), then.to(kind)) for now, then in pairs)


def _hold_truth(trial: Synced) -> bool:
    """Whether every source holds the right weights: none is stale on purpose."""
    for host in trial.sources:
        engine: Any = host.engine
        for name, box, tensor in engine.held:
            whole = trial.truth[name]
            if not same_bits(tensor, whole[box.slices(Box.whole(tuple(whole.shape)))]):
                return False
    return True


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal: zeros of different signs differ, and NaN may be equal."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )
