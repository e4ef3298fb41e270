"""The moving average of the policy: against the formula, over a resume, and over another cut into ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from test_loop import Recorder, config_of, model, registry, trainer_of

from rlsdk.interfaces import Box, CheckpointError, WeightShard
from rlsdk.registry import Registry
from rlsdk.trainer.roles.average import WeightAverage, export_average

__all__ = ["model", "registry"]
DECAY = 0.9


def weights_of(stage: Any) -> dict[str, Tensor]:
    engine = stage.learner.session.actor.group.hosts[0].engine
    return {shard.name: shard.tensor.detach().clone() for shard in engine.shards()}


def test_a_checkpoint_holds_the_average_by_the_formula(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 4, "--train.ema_decay", str(DECAY), "--train.optim.lr", "1e-2")
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, stage, _):
        seen = [weights_of(stage)]
        advance = stage.advance

        def watched() -> Any:
            metrics = advance()
            seen.append(weights_of(stage))
            return metrics

        stage.advance = watched  # type: ignore[method-assign]
        trainer.fit()
    expected = dict(seen[0])
    for weights in seen[1:]:
        expected = {name: DECAY * mean + (1 - DECAY) * weights[name] for name, mean in expected.items()}
    folder = tmp_path / "run" / "checkpoints" / "step_00000004"
    found = load_file(folder / "model_average" / "model.safetensors")
    assert found.keys() == load_file(folder / "model" / "model.safetensors").keys()
    for name, mean in expected.items():
        torch.testing.assert_close(found[name], mean, rtol=1e-6, atol=1e-7)
        assert mean.equal(seen[0][name]) or not found[name].equal(seen[-1][name])
    assert (folder / "model_average" / "config.json").is_file()

    # A run that stopped after step 2 comes to the same average.
    with trainer_of(config, registry, tmp_path / "again", Recorder()) as (trainer, stage, _):
        trainer.restore(tmp_path / "run" / "checkpoints" / "step_00000002")
        trainer.fit()
    again = load_file(tmp_path / "again" / "checkpoints" / "step_00000004" / "model_average" / "model.safetensors")
    assert all(again[name].equal(found[name]) for name in found)


def test_a_run_that_had_no_average_begins_one_at_its_checkpoint(model: str, registry: Registry, tmp_path: Path) -> None:
    plain = config_of(model, registry, 2, "--train.optim.lr", "1e-2")
    with trainer_of(plain, registry, tmp_path / "plain", Recorder()) as (trainer, _, _):
        trainer.fit()
    checkpoint = tmp_path / "plain" / "checkpoints" / "step_00000002"
    assert not (checkpoint / "model_average").exists()
    averaged = config_of(model, registry, 4, "--train.ema_decay", "0.5")
    with trainer_of(averaged, registry, tmp_path / "later", Recorder()) as (trainer, stage, _):
        trainer.restore(checkpoint)
        host = stage.learner.session.actor.group.hosts[0]  # type: ignore[attr-defined]
        for key, weights in weights_of(stage).items():
            at = next(at for at, (name, _) in host.average._boxes.items() if name == key)
            assert host.average._means[at].equal(weights.float())


class Rank:
    """An engine that holds some boxes of two tensors."""

    def __init__(self, tensors: dict[str, Tensor], boxes: list[tuple[str, Box]]) -> None:
        self.tensors, self.boxes = tensors, boxes

    def shards(self) -> Iterator[WeightShard]:
        for name, box in self.boxes:
            whole = Box.whole(tuple(self.tensors[name].shape))
            yield WeightShard(name=name, box=box, tensor=self.tensors[name][box.slices(whole)])


def cut(rows: int, cols: int, parts: int, axis: int) -> list[list[tuple[str, Box]]]:
    """`w` `[rows, cols]` cut along an axis, unevenly; `b` `[cols]` whole on every rank."""
    edges = [round((rows, cols)[axis] * at / parts) for at in range(parts + 1)]
    made = []
    for low, high in itertools.pairwise(edges):
        offset, size = ((low, 0), (high - low, cols)) if axis == 0 else ((0, low), (rows, high - low))
        made.append([("w", Box(offset, size)), ("b", Box((0,), (cols,)))])
    return made


@pytest.mark.parametrize(("before", "after"), [((3, 0), (2, 1)), ((1, 0), (3, 1)), ((4, 1), (1, 0))])
def test_another_number_of_ranks_takes_the_average_over(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    tensors = {"w": torch.randn(7, 5, dtype=torch.bfloat16), "b": torch.randn(5, dtype=torch.bfloat16)}
    ranks = [Rank(tensors, boxes) for boxes in cut(7, 5, *before)]
    averages = [WeightAverage(rank, 0.75) for rank in ranks]  # type: ignore[arg-type]
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    for _ in range(3):
        for name, tensor in tensors.items():
            tensor.add_(torch.randn(tensor.shape).to(tensor.dtype))
            expected[name] = 0.75 * expected[name] + 0.25 * tensor.float()
        for average in averages:
            average.update()
    (tmp_path / "parts").mkdir()
    for at, average in enumerate(averages):
        average.save(tmp_path / "parts" / f"rank_{at:05d}.safetensors")
    for boxes in cut(7, 5, *after):
        rank = Rank(tensors, boxes)
        taken = WeightAverage(rank, 0.75)  # type: ignore[arg-type]
        taken.load(tmp_path / "parts")
        for key, (name, box) in taken._boxes.items():
            whole = Box.whole(tuple(tensors[name].shape))
            torch.testing.assert_close(taken._means[key], expected[name][box.slices(whole)])
    (tmp_path / "model").mkdir()
    save_file({**tensors, "buffer": torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    export_average(tmp_path / "parts", tmp_path / "model", tmp_path / "average")
    found = load_file(tmp_path / "average" / "model.safetensors")
    assert found["w"].equal(expected["w"].bfloat16())
    assert found["buffer"].equal(torch.ones(2))
    if before[0] > 1:
        (tmp_path / "parts" / "rank_00001.safetensors").unlink()
        with pytest.raises(CheckpointError, match="a file of a rank is missing"):
            WeightAverage(Rank(tensors, cut(7, 5, 1, 0)[0]), 0.75).load(tmp_path / "parts")  # type: ignore[arg-type]
