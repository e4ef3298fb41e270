"""What the torch engine hands out and takes back: shards, exports, checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_cases import BATCHES, CTX, Weighted, _one_thread, assert_equal, make, models, train, weights
from transformers import AutoModelForCausalLM

from rlsdk.interfaces import Box, CheckpointError, OptimSpec, fingerprint
from rlsdk.testing.process.models import random_batch

__all__ = ["_one_thread", "models"]

# Weights


def test_shards_follow_the_layout_and_are_views_of_the_weights(models: dict[str, str]) -> None:
    engine = make(models["tied"])
    layout, shards = engine.layout(), list(engine.shards())
    assert [(shard.name, shard.box) for shard in shards] == list(layout.boxes)
    assert all(shard.box == Box.whole(tuple(shard.tensor.shape)) for shard in shards)
    assert layout.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in {meta.name for meta in layout.tensors}
    prints = [fingerprint(shard.tensor, shard.box) for shard in shards]
    train(engine, BATCHES[:1])
    assert layout == engine.layout()
    assert [shard.tensor.data_ptr() for shard in shards] == [shard.tensor.data_ptr() for shard in engine.shards()]
    assert all(a != fingerprint(s.tensor, s.box) for a, s in zip(prints, shards, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_read_by_transformers_and_computes_the_same(
    models: dict[str, str], tmp_path: Path, dtype: str
) -> None:
    engine = make(models["tied"], dtype=dtype)
    train(engine)
    engine.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read.dtype is getattr(torch, dtype)
    assert_equal(
        {n: p.detach() for n, p in read.named_parameters()}, {n: p.to(read.dtype) for n, p in weights(engine).items()}
    )
    again = make(str(tmp_path), dtype=dtype, optim=None)
    assert torch.equal(*(e.forward(BATCHES[0], ("log_probs",))["log_probs"] for e in (engine, again)))


def test_random_initialisation_follows_the_seed(models: dict[str, str]) -> None:
    first, again, other = (
        weights(make(models["plain"], ctx=dataclasses.replace(CTX, seed=seed), init_from_config=True))
        for seed in (1, 1, 2)
    )
    assert_equal(first, again)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# Checkpoints


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(models: dict[str, str], tmp_path: Path, dtype: str) -> None:
    straight = make(models["plain"], dtype=dtype)
    whole = train(straight)
    first = make(models["plain"], dtype=dtype)
    train(first, BATCHES[:2])
    torch.manual_seed(99)
    first.save_checkpoint(tmp_path)
    drawn = torch.rand(3)
    resumed = make(models["plain"], dtype=dtype, ctx=dataclasses.replace(CTX, seed=8), init_from_config=True)
    train(resumed, [random_batch(3, seed=50)])
    resumed.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert train(resumed, BATCHES[2:]) == whole[2:]
    assert resumed.forward_backward(BATCHES[0], Weighted()) == straight.forward_backward(BATCHES[0], Weighted())
    assert resumed.optim_step() == straight.optim_step()
    assert_equal(weights(resumed), weights(straight))


def test_a_checkpoint_from_before_the_first_step_forgets_the_steps_of_the_engine_that_loads_it(
    models: dict[str, str], tmp_path: Path
) -> None:
    make(models["plain"]).save_checkpoint(tmp_path)
    engine = make(models["plain"])
    train(engine)
    engine.forward_backward(BATCHES[0], Weighted())
    engine.load_checkpoint(tmp_path)
    assert train(engine) == train(make(models["plain"]))


def test_a_checkpoint_holds_no_pickle_and_loads_after_it_was_deleted(models: dict[str, str], tmp_path: Path) -> None:
    engine = make(models["plain"])
    train(engine)
    engine.save_checkpoint(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}
    again = make(models["plain"])
    again.load_checkpoint(tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(b"")
    assert train(again) == train(engine)


def test_a_checkpoint_of_a_trained_model_loads_into_a_frozen_one(models: dict[str, str], tmp_path: Path) -> None:
    engine = make(models["plain"])
    train(engine)
    engine.save_checkpoint(tmp_path)
    frozen = make(models["plain"], optim=None)
    frozen.load_checkpoint(tmp_path)
    assert_equal(weights(frozen), weights(engine))


def test_a_checkpoint_of_another_model_is_refused_with_the_first_tensor(models: dict[str, str], tmp_path: Path) -> None:
    make(models["other"]).save_checkpoint(tmp_path)
    engine = make(models["plain"])
    before = weights(engine)
    with pytest.raises(CheckpointError, match=r"saved from another model: \d+ tensors differ, first 'model\.layers\.2"):
        engine.load_checkpoint(tmp_path)
    assert_equal(weights(engine), before)


@pytest.mark.parametrize(
    "name", ["exp_avg/model.norm.weight", "exp_avg_sq/model.norm.weight", "step/model.norm.weight", "random"]
)
def test_a_tensor_under_a_damaged_name_is_refused_and_not_left_out(
    models: dict[str, str], tmp_path: Path, name: str
) -> None:
    engine = make(models["plain"])
    train(engine)
    engine.save_checkpoint(tmp_path)
    file = tmp_path / "state.safetensors"
    content = file.read_bytes()
    assert content.count(f'"{name}"'.encode()) == 1
    file.write_bytes(content.replace(f'"{name}"'.encode(), f'"{name[:-1]}~"'.encode()))
    before = weights(engine)
    with pytest.raises(CheckpointError, match="damaged"):
        engine.load_checkpoint(tmp_path)
    assert_equal(weights(engine), before)


@pytest.mark.parametrize("damage", ["nothing", "no state", "no tensors", "cut tensors", "not json", "lacks a weight"])
def test_a_checkpoint_that_is_not_whole_is_refused(models: dict[str, str], tmp_path: Path, damage: str) -> None:
    engine = make(models["plain"])
    if damage != "nothing":
        engine.save_checkpoint(tmp_path)
    tensors = tmp_path / "state.safetensors"
    if damage == "no state":
        (tmp_path / "state.json").unlink()
    elif damage == "no tensors":
        tensors.unlink()
    elif damage == "cut tensors":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif damage == "not json":
        (tmp_path / "state.json").write_text("{")
    elif damage == "lacks a weight":
        kept = load_file(tensors)
        kept.pop("weight/model.norm.weight")
        save_file({name: tensor.clone() for name, tensor in kept.items()}, tensors)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path)


def test_resetting_the_optimizer_starts_afresh_with_the_weights_as_they_are(models: dict[str, str]) -> None:
    engine = make(models["plain"])
    train(engine)
    before = weights(engine)
    engine.reset_optimizer(OptimSpec(lr=5e-4, warmup_steps=5))
    assert_equal(weights(engine), before)
    engine.forward_backward(BATCHES[0], Weighted())
    assert engine.optim_step().lr == pytest.approx(1e-4)
    # The first AdamW step after a reset moves each element by the learning rate: no moment of before is left.
    moved = (weights(engine)["lm_head.weight"] - before["lm_head.weight"]).abs()
    assert float(moved.max()) == pytest.approx(1e-4, rel=1e-2)
