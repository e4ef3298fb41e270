"""Putting ranks' results together, and holding them against one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from worlds import Case, drive, spec_of

from rlsdk.interfaces import Box, RankContext
from rlsdk.reference.torch_engine import TorchTrainEngine

EXACT = 1e-5
"""float32: relative to the largest number compared, but to 1 at least."""
LOG_PROBS = 2e-6
"""float32, before any step: relative to the size of log-probs, which is near 5."""


@lru_cache(maxsize=64)
def _reference(case: Case) -> dict[str, Any]:
    engine = TorchTrainEngine()
    engine.initialize(RankContext(role="actor", seed=5), spec_of(case))
    return drive(engine, case)


def reference(case: Case) -> dict[str, Any]:
    """What one process of the built-in engine makes of the same rows."""
    return _reference(case.as_reference())


def good(ranks: list[Any]) -> list[Any]:
    """The same, where no rank failed."""
    for rank, found in enumerate(ranks):
        assert "error" not in found, f"rank {rank}: {found.get('trace')}"
    return ranks


def whole(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every tensor, put together from the ranks' shards; each element must come from somebody, and copies agree."""
    shapes = {meta.name: meta.shape for rank in ranks for meta in rank["layout"].tensors}
    out = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for rank in ranks:
        for name, box, tensor in rank["shards"]:
            place = out[name][box.slices(Box.whole(shapes[name]))]
            known = ~place.isnan()
            assert torch.equal(place[known], tensor.float()[known]), f"copies of {name} differ"
            place.copy_(tensor)
    assert not any(tensor.isnan().any() for tensor in out.values())
    return out


def by_row(found: dict[str, Any], key: str, name: str) -> dict[int, torch.Tensor]:
    """An output of each row, by its identity."""
    per_row = name == "scores"
    parts = found[key][name].split(1 if per_row else found["lengths"].tolist())
    return dict(zip(found["row_ids"].tolist(), parts, strict=True))


@dataclass(frozen=True)
class Difference:
    """Largest differences of a case to one process."""

    loss: float
    norm: float
    """Relative."""
    parameter: float
    before: float
    """Of outputs before the first step."""
    after: float


def compare(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> Difference:
    """Holds every rank against one process; also that ranks agree with one another to the bit."""
    for rank in good(ranks):
        for key in ("losses", "norms", "sums", "maxima", "lrs", "micro_batches"):
            assert rank[key] == ranks[0][key], f"ranks disagree on {key}"
        assert rank["collector"] or not rank["before"]
    assert ranks[0]["lrs"] == expected["lrs"]
    for mine, theirs in zip(ranks[0]["sums"], expected["sums"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for mine, theirs in zip(ranks[0]["maxima"], expected["maxima"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    parameters = whole(ranks)
    assert parameters.keys() == {name for name, _, _ in expected["shards"]}
    outputs: dict[str, list[float]] = {"before": [], "after": []}
    rows = 0
    for rank in (rank for rank in ranks if rank["collector"]):
        rows += len(rank["row_ids"])
        for key, found in outputs.items():
            for name in rank[key]:
                told = by_row(expected, key, name)
                found += [float((tensor - told[row]).abs().max()) for row, tensor in by_row(rank, key, name).items()]
    assert rows == len(expected["row_ids"])
    return Difference(
        loss=max(abs(a - b) for a, b in zip(ranks[0]["losses"], expected["losses"], strict=True)),
        norm=max(abs(a / b - 1) for a, b in zip(ranks[0]["norms"], expected["norms"], strict=True)),
        parameter=max(
            float((parameters[name] - tensor).abs().max()) / max(float(tensor.abs().max()), 1.0)
            for name, _, tensor in expected["shards"]
        ),
        before=max(outputs["before"]),
        after=max(outputs["after"]),
    )
