"""Putting ranks' results together, and holding them against one process."""

from __future__ import annotations

from typing import Any

import torch

from rlsdk.interfaces import Box


def whole(ranks: list[dict[str, Any]], copies: int = 1) -> dict[str, torch.Tensor]:
    """Every tensor, put together from the ranks' shards; each element must come from exactly `copies` ranks, equal to
    the bit."""
    shapes = {meta.name: meta.shape for rank in ranks for meta in rank["layout"].tensors}
    out = {name: torch.zeros(shape) for name, shape in shapes.items()}
    times = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for rank in ranks:
        for name, box, tensor in rank["shards"]:
            place = box.slices(Box.whole(shapes[name]))
            assert torch.equal(torch.where(times[name][place] > 0, out[name][place], tensor.float()), tensor.float())
            out[name][place] = tensor.float()
            times[name][place] += 1
    assert all(bool((count == copies).all()) for count in times.values())
    return out


def difference(ranks: list[dict[str, Any]], expected: dict[str, Any], copies: int = 1) -> dict[str, float]:
    """Largest differences of ranks from one process, by what is compared; ranks agree to the bit. `copies`: ranks that
    hold each element of a weight."""
    for rank in ranks:
        assert all(rank[key] == ranks[0][key] for key in ("losses", "norms", "lrs"))
    steps = slice(-len(ranks[0]["norms"]), None)
    assert ranks[0]["lrs"] == expected["lrs"][steps]
    parameters = whole(ranks, copies)
    mine = {row: values for rank in ranks for row, values in rank["log_probs"].items()}
    assert mine.keys() == expected["log_probs"].keys()
    losses = zip(ranks[0]["losses"], expected["losses"][-len(ranks[0]["losses"]) :], strict=True)
    return {
        "loss": max(abs(a - b) for a, b in losses),
        "norm": max(abs(a / b - 1) for a, b in zip(ranks[0]["norms"], expected["norms"][steps], strict=True)),
        "parameter": max(float((parameters[name] - t).abs().max()) for name, _, t in expected["shards"]),
        "output": max(float((values - expected["log_probs"][row]).abs().max()) for row, values in mine.items()),
    }
