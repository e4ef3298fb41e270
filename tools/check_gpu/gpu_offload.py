"""What an engine's memory does on its way off the device and back: `python gpu_offload.py DEVICE DTYPE`."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch

from rlsdk.interfaces import ModelSpec, OptimSpec, RankContext, TrainSpec
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.train.cases import Weighted, train_batch

LEFT_BYTES = 1 << 20
"""What may stay on a device of an engine that left it: buffers of libraries."""


def allocated(device: torch.device) -> int:
    gc.collect()
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def measure(device: str, dtype: str, folder: Path) -> dict[str, object]:
    """Trains a step, moves everything away and back, and trains another.

    Returns:
        Figures; `moved` says whether every weight came back bit for bit.
    """
    place = torch.device(device)
    model = write_tiny_model(folder / "model", hidden_size=256, layers=4)
    before = allocated(place)
    engine = TorchTrainEngine()
    spec = TrainSpec(model=ModelSpec(path=str(model), dtype=dtype), optim=OptimSpec(lr=1e-3), micro_batch_rows=2)
    engine.initialize(RankContext(role="actor", device=device), spec)
    batch, objective = train_batch(6), Weighted()
    engine.forward_backward(batch, objective)
    engine.optim_step()
    values = {shard.name: shard.tensor.detach().cpu().clone() for shard in engine.shards()}
    there = allocated(place)
    engine.offload(TRAIN_PARTS)
    left = allocated(place)
    engine.onload(TRAIN_PARTS)
    moved = all(torch.equal(shard.tensor.detach().cpu(), values[shard.name]) for shard in engine.shards())
    engine.forward_backward(batch, objective)
    engine.optim_step()
    engine.close()
    del engine
    gone = allocated(place)
    return {
        "dtype": dtype,
        "engine_bytes": there - before,
        "bytes_left_by_offload": left - before,
        "bytes_left_by_close": gone - before,
        "moved": moved,
        "passed": moved and max(left, gone) - before <= LEFT_BYTES and (place.type == "cpu" or there > before),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], Path(made))))
