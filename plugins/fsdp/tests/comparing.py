"""Putting ranks' results together, and holding them against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from worlds import Case, drive, spec_of

from rlsdk.interfaces import Box, RankContext
from rlsdk.reference.torch_engine import TorchTrainEngine

EXACT = 1e-5
"""float32: relative to the largest number compared, but to 1 at least."""


def reference(case: Case) -> dict[str, Any]:
    """What one process of the built-in engine makes of the same rows."""
    engine = TorchTrainEngine()
    engine.initialize(RankContext(role="actor", seed=5), spec_of(case))
    return drive(engine, case.as_reference())


def good(ranks: list[Any]) -> list[Any]:
    """The same, where no rank failed."""
    for rank, found in enumerate(ranks):
        assert "error" not in found, f"rank {rank}: {found.get('trace')}"
    return ranks


def whole(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every tensor, put together from the ranks' shards; each element must come from somebody."""
    shapes = {meta.name: meta.shape for rank in ranks for meta in rank["layout"].tensors}
    out = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for rank in ranks:
        for name, box, tensor in rank["shards"]:
            out[name][box.slices(Box.whole(shapes[name]))] = tensor.float()
    assert not any(tensor.isnan().any() for tensor in out.values())
    return out


def by_row(found: dict[str, Any], key: str) -> dict[int, torch.Tensor]:
    """Outputs of each row, by its identity."""
    if len(found[key]) == len(found["row_ids"]) != int(found["lengths"].sum()):
        parts: tuple[torch.Tensor, ...] = found[key].split(1)
    else:
        parts = found[key].split(found["lengths"].tolist())
    return dict(zip(found["row_ids"].tolist(), parts, strict=True))


@dataclass(frozen=True)
class Difference:
    """Largest differences of a case to one process."""

    loss: float
    norm: float
    """Relative."""
    parameter: float
    output: float


def compare(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> Difference:
    """Holds every rank against one process; also that ranks agree with one another to the bit."""
    for rank in good(ranks):
        for key in ("losses", "norms", "sums", "maxima", "lrs", "micro_batches"):
            assert rank[key] == ranks[0][key], f"ranks disagree on {key}"
    assert ranks[0]["lrs"] == expected["lrs"]
    for mine, theirs in zip(ranks[0]["sums"], expected["sums"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for mine, theirs in zip(ranks[0]["maxima"], expected["maxima"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    parameters = whole(ranks)
    assert parameters.keys() == {name for name, _, _ in expected["shards"]}
    outputs = [
        float((tensor - by_row(expected, key)[row]).abs().max())
        for key in ("before", "after")
        for rank in ranks
        for row, tensor in by_row(rank, key).items()
    ]
    assert len(outputs) == 2 * len(expected["row_ids"]) * ranks[0]["place"].cp_size
    return Difference(
        loss=max(abs(a - b) for a, b in zip(ranks[0]["losses"], expected["losses"], strict=True)),
        norm=max(abs(a / b - 1) for a, b in zip(ranks[0]["norms"], expected["norms"], strict=True)),
        parameter=max(
            float((parameters[name] - tensor).abs().max()) / max(float(tensor.abs().max()), 1.0)
            for name, _, tensor in expected["shards"]
        ),
        output=max(outputs),
    )
