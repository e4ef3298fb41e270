"""The torch engine against a training loop on plain transformers, written out here and nowhere else."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsdk.algorithms import PolicyObjective
from rlsdk.interfaces import (
    Batch,
    Box,
    CheckpointError,
    ConfigError,
    Head,
    ModelSpec,
    ObjectiveResult,
    OptimSpec,
    RankContext,
    RlsdkError,
    TrainSpec,
    fingerprint,
)
from rlsdk.kit.guards.guarded_train import GuardedTrainEngine
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.models import random_batch, write_tiny_model
from rlsdk.testing.process.reference import load_plain_model, plain_outputs

OPTIM = OptimSpec(
    lr=1e-3,
    betas=(0.9, 0.95),
    # Above the rounding noise of gradients: with 1e-8 Adam makes a full step of the noise in an element that is 0.
    eps=1e-6,
    weight_decay=0.1,
    max_grad_norm=0.5,
    schedule="linear",
    warmup_steps=2,
    total_steps=10,
)
CTX = RankContext(role="actor", seed=3)
BATCHES = [random_batch(8, longest=24, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "plain": str(write_tiny_model(root / "plain", seed=1)),
        "tied": str(write_tiny_model(root / "tied", architecture="llama", tied=True, seed=2)),
        "other": str(write_tiny_model(root / "other", layers=3, seed=3)),
    }


@dataclass(frozen=True)
class Weighted:
    """Differs from every objective of the product: weights, entropy and two metrics."""

    entropy_coef: float = 0.1

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs", "entropy")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        weight = batch["loss_weight"]
        per_token = batch["advantages"] * outputs["log_probs"] + self.entropy_coef * outputs["entropy"]
        largest = (outputs["log_probs"].detach().abs() * batch["response_mask"]).max()
        loss = -(weight * per_token).sum()
        return ObjectiveResult(
            loss=loss, sums={"weight": weight.sum(), "rows": batch.num_rows, "loss": loss}, maxima={"nll": largest}
        )


def make(
    path: str, *, ctx: RankContext = CTX, dtype: str = "float32", head: Head = Head.LM, **spec: Any
) -> GuardedTrainEngine:
    engine = GuardedTrainEngine(TorchTrainEngine())
    limits = {} if "micro_batch_rows" in spec or "micro_batch_tokens" in spec else {"micro_batch_tokens": 10_000}
    settings = {"optim": OPTIM, **limits, **spec}
    engine.initialize(ctx, TrainSpec(model=ModelSpec(path=path, dtype=dtype, head=head), **settings))
    return engine


def weights(engine: GuardedTrainEngine) -> dict[str, Tensor]:
    return {shard.name: shard.tensor.clone() for shard in engine.shards()}


def train(engine: GuardedTrainEngine, batches: Sequence[Batch] = BATCHES) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(engine.forward_backward(batch, Weighted()).loss, engine.optim_step().grad_norm) for batch in batches]


def train_plainly(path: str, batches: Sequence[Batch] = BATCHES) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same steps by hand: one row at a time, clipping and AdamW written out."""
    model = load_plain_model(path)
    named = dict(model.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in named.items()}
    second = {name: torch.zeros_like(p) for name, p in named.items()}
    found = []
    for step, batch in enumerate(batches):
        out = plain_outputs(model, batch)
        loss = -(batch["loss_weight"] * (batch["advantages"] * out["log_probs"] + 0.1 * out["entropy"])).sum()
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in named.values()))
        lr = OPTIM.lr * (step + 1) / 2 if step < 2 else OPTIM.lr * (1 - (step - 2) / 8)
        with torch.no_grad():
            for name, p in named.items():
                gradient = p.grad * min(1.0, OPTIM.max_grad_norm / norm)
                p *= 1 - lr * OPTIM.weight_decay * (p.dim() > 1)
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
                unbiased = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.95 ** (step + 1))
                p -= lr * unbiased[0] / (unbiased[1].sqrt() + OPTIM.eps)
        found.append((loss.item(), norm))
    return found, {name: p.detach() for name, p in named.items()}


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# What it computes


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_three_steps_equal_a_plain_loop(models: dict[str, str], name: str) -> None:
    engine = make(models[name])
    found = train(engine)
    expected, parameters = train_plainly(models[name])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6)
    assert_near(weights(engine), parameters)


@pytest.mark.parametrize(
    "cut",
    [
        {"micro_batch_rows": 1},
        {"micro_batch_rows": 3},
        {"micro_batch_rows": 100},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 40},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "micro_batch_rows": 2},
    ],
    ids=str,
)
def test_the_cut_into_micro_batches_changes_nothing(models: dict[str, str], cut: dict[str, Any]) -> None:
    engine, whole = make(models["plain"], **cut), make(models["plain"])
    for mine, theirs in zip(train(engine), train(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6)
    assert_near(weights(engine), weights(whole))


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 9), longest=st.integers(2, 40), seed=st.integers(0, 1000), limit=st.integers(1, 60))
def test_gradients_are_the_same_for_any_lengths_and_any_token_budget(
    models: dict[str, str], rows: int, longest: int, seed: int, limit: int
) -> None:
    batch = random_batch(rows, longest=longest, seed=seed)
    cut, whole = make(models["plain"], micro_batch_tokens=limit), make(models["plain"])
    mine, theirs = cut.forward_backward(batch, Weighted()), whole.forward_backward(batch, Weighted())
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-6)
    assert cut.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=1e-5)


def test_the_order_of_rows_changes_nothing(models: dict[str, str]) -> None:
    shuffled = [batch.select(torch.randperm(8, generator=torch.Generator().manual_seed(1))) for batch in BATCHES]
    one, other = make(models["plain"]), make(models["plain"])
    for mine, theirs in zip(train(one, shuffled), train(other), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6)
    assert_near(weights(one), weights(other))


def test_gradients_add_up_over_calls(models: dict[str, str]) -> None:
    parts, whole = make(models["plain"]), make(models["plain"])
    batch = BATCHES[0]
    losses = [parts.forward_backward(batch.select(rows), Weighted()).loss for rows in ([0, 3, 5], [1, 2], [4, 6, 7])]
    assert sum(losses) == pytest.approx(whole.forward_backward(batch, Weighted()).loss, rel=1e-6)
    assert parts.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=2e-6)
    assert_near(weights(parts), weights(whole))


def test_metrics_add_up_and_the_largest_counts_over_micro_batches(models: dict[str, str]) -> None:
    engine, whole = make(models["plain"], micro_batch_rows=3), make(models["plain"])
    found, expected = (e.forward_backward(BATCHES[0], Weighted()) for e in (engine, whole))
    assert (found.num_micro_batches, expected.num_micro_batches) == (3, 1)
    assert found.sums["rows"] == expected.sums["rows"] == 8
    assert found.sums["weight"] == pytest.approx(1.0)
    assert found.sums["loss"] == pytest.approx(found.loss)
    assert found.maxima["nll"] == pytest.approx(expected.maxima["nll"], rel=1e-6)


def test_tokens_off_the_mask_carry_no_gradient(models: dict[str, str]) -> None:
    """A row whose answer is masked changes nothing, whatever stands in it."""
    batch = BATCHES[0]
    silent = batch.row_of_token == 2
    masked = batch.with_tokens(
        response_mask=batch["response_mask"] & ~silent, loss_weight=torch.where(silent, 0.0, batch["loss_weight"])
    )
    without = masked.select([0, 1, 3, 4, 5, 6, 7])
    one, other = make(models["plain"]), make(models["plain"])
    assert one.forward_backward(masked, Weighted()).loss == pytest.approx(
        other.forward_backward(without, Weighted()).loss, rel=2e-6
    )
    assert one.optim_step().grad_norm == pytest.approx(other.optim_step().grad_norm, rel=2e-6)


def test_forward_equals_plain_transformers_in_the_order_of_the_rows(models: dict[str, str]) -> None:
    batch = BATCHES[0].with_meta(temperature=0.8)
    found = make(models["plain"], micro_batch_tokens=40).forward(batch, ("log_probs", "entropy"))
    expected = plain_outputs(load_plain_model(models["plain"]), batch)
    for name, values in found.items():
        assert not values.requires_grad
        assert values.dtype is torch.float32
        torch.testing.assert_close(values, expected[name].detach() * batch["response_mask"], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("head", "output", "size"), [(Head.VALUE, "values", 8), (Head.SCORE, "scores", 2)])
def test_value_and_score_models_learn_their_targets(models: dict[str, str], head: Head, output: str, size: int) -> None:
    @dataclass(frozen=True)
    class Squared:
        outputs: Sequence[str] = (output,)

        def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
            return ObjectiveResult(loss=(outputs[output] - 1.5).square().mean())

    batch = Batch.from_rows([[5, 6, 7], [9, 8, 7, 6, 5]])
    engine = make(models["plain"], head=head, optim=OptimSpec(lr=1e-3))
    assert engine.forward(batch, (output,))[output].shape == (size,)
    losses = []
    for _ in range(20):
        losses.append(engine.forward_backward(batch, Squared()).loss)
        engine.optim_step()
    assert losses[-1] < losses[0] / 2


def test_an_empty_batch_is_computed_and_trained_on_without_effect(models: dict[str, str]) -> None:
    engine = make(models["plain"])
    empty = BATCHES[0].select([])
    assert engine.forward(empty, ("log_probs",))["log_probs"].shape == (0,)
    assert engine.forward_backward(empty, Weighted()).loss == 0.0
    assert engine.optim_step().grad_norm == 0.0
    before = weights(make(models["plain"]))
    assert_equal(weights(engine), before)


def test_the_products_objective_trains_and_can_be_pickled(models: dict[str, str]) -> None:
    objective = pickle.loads(pickle.dumps(PolicyObjective(entropy_coef=0.01)))
    engine = make(models["plain"], micro_batch_rows=2)
    result = engine.forward_backward(BATCHES[0], objective)
    assert result.sums["loss_weight"] == pytest.approx(1.0)
    assert engine.optim_step().grad_norm > 0


# Precision


def test_bfloat16_computes_with_rounded_copies_and_trains_float32_masters(models: dict[str, str]) -> None:
    low, high = make(models["plain"], dtype="bfloat16"), make(models["plain"])
    assert {p.dtype for p in low.engine.model.parameters()} == {torch.bfloat16}
    assert {meta.dtype for meta in low.layout().tensors} == {"float32"}
    for mine, theirs in zip(train(low), train(high), strict=True):
        assert mine == pytest.approx(theirs, rel=0.1)
    assert_near(weights(low), weights(high), 5e-3)
    for name, parameter in low.engine.model.named_parameters():
        assert torch.equal(parameter, weights(low)[name].bfloat16())


def test_steps_far_below_bfloat16s_resolution_are_not_lost(models: dict[str, str]) -> None:
    engine = make(models["plain"], dtype="bfloat16", optim=OptimSpec(lr=1e-6))
    before = weights(engine)["model.embed_tokens.weight"]
    train(engine)
    moved = (weights(engine)["model.embed_tokens.weight"] - before).abs().max()
    assert 0 < float(moved) < 1e-5


def test_gradients_of_many_micro_batches_are_added_in_float32(models: dict[str, str]) -> None:
    engine, whole = make(models["plain"], dtype="bfloat16", micro_batch_rows=1), make(models["plain"])
    for each in (engine, whole):
        each.forward_backward(BATCHES[0], Weighted())
    for name, parameter in whole.engine.parameters.items():
        mine, theirs = engine.engine.parameters[name].grad, parameter.grad
        assert mine is not None
        assert theirs is not None
        assert float((mine - theirs).norm()) < 0.1 * float(theirs.norm()) + 1e-6, name
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in engine.engine.parameters.values())
    assert all(p.grad is None for p in engine.engine.model.parameters())


def test_a_frozen_model_is_held_in_its_own_dtype_and_refuses_to_train(models: dict[str, str]) -> None:
    engine = make(models["plain"], dtype="bfloat16", optim=None)
    assert {meta.dtype for meta in engine.layout().tensors} == {"bfloat16"}
    assert engine.forward(BATCHES[0], ("log_probs",))["log_probs"].dtype is torch.float32
    for call in (lambda: engine.forward_backward(BATCHES[0], Weighted()), engine.optim_step):
        with pytest.raises(ConfigError, match="'actor' is frozen: it was built without an OptimSpec"):
            call()
    with pytest.raises(ConfigError, match="is frozen"):
        engine.reset_optimizer(OPTIM)


# Steps that go wrong


def test_a_gradient_that_is_not_finite_is_skipped_and_leaves_no_trace(models: dict[str, str]) -> None:
    engine, other = make(models["plain"]), make(models["plain"])
    poisoned = BATCHES[1].with_tokens(advantages=torch.full_like(BATCHES[1]["advantages"], math.inf))
    train(engine, BATCHES[:1])
    engine.forward_backward(poisoned, Weighted())
    step = engine.optim_step()
    assert step.skipped
    assert not math.isfinite(step.grad_norm)
    assert train(engine, BATCHES[1:]) == train(other, BATCHES)[1:]
    assert_equal(weights(engine), weights(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_objective_that_raises_is_heard_and_its_gradients_are_dropped(models: dict[str, str], dtype: str) -> None:
    calls = []

    class Failing(Weighted):
        def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
            calls.append(batch.num_rows)
            if len(calls) == 3:
                raise ZeroDivisionError("of the user's own making")
            return super().__call__(outputs, batch)

    engine = make(models["plain"], micro_batch_rows=2, dtype=dtype)
    with pytest.raises(ZeroDivisionError, match="of the user's own making"):
        engine.forward_backward(BATCHES[0], Failing())
    assert engine.optim_step().grad_norm == 0.0


def test_a_batch_without_the_objectives_fields_says_what_it_has(models: dict[str, str]) -> None:
    with pytest.raises(RlsdkError, match="no field 'loss_weight'"):
        make(models["plain"]).forward_backward(Batch.from_rows([[1, 2, 3]]), Weighted())


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


# Memory and refusals


def test_what_is_offloaded_is_refused_until_it_is_back_and_then_nothing_changed(models: dict[str, str]) -> None:
    engine, other = make(models["plain"]), make(models["plain"])
    engine.forward_backward(BATCHES[0], Weighted())
    other.forward_backward(BATCHES[0], Weighted())
    engine.offload(("optimizer", "gradients"))
    list(engine.shards())
    engine.forward(BATCHES[0], ("log_probs",))
    with pytest.raises(RlsdkError, match=r"\['optimizer', 'gradients'\] .* are offloaded; call onload"):
        engine.optim_step()
    engine.offload(("weights",))
    engine.offload()
    for call in (lambda: list(engine.shards()), lambda: engine.forward(BATCHES[0], ("log_probs",))):
        with pytest.raises(RlsdkError, match="are offloaded"):
            call()
    engine.onload()
    assert engine.optim_step() == other.optim_step()
    assert train(engine, BATCHES[1:]) == train(other, BATCHES[1:])
    assert_equal(weights(engine), weights(other))


def test_an_unknown_part_is_refused_with_the_nearest_name(models: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="'weight'; did you mean 'weights'"):
        make(models["plain"]).offload(("weight",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ctx": RankContext(role="actor", world_size=2)}, "runs in one process, but the actor pool has 2 devices"),
        ({"dtype": "float16"}, "trains in 'float32' or 'bfloat16'"),
        ({"micro_batch_rows": 1, "micro_batch_tokens": 1}, "expected one of them"),
        ({"micro_batch_tokens": None}, "expected one of them"),
        ({"engine_kwargs": {"turbo": True}}, r"pass \['turbo'\] to"),
        ({"optim": OptimSpec(schedule="cosine")}, "total_steps"),
    ],
)
def test_what_it_cannot_do_is_refused_at_the_start(
    models: dict[str, str], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(models["plain"], **change)


def test_closing_twice_is_safe_and_frees_the_model(models: dict[str, str]) -> None:
    engine = make(models["plain"])
    engine.close()
    engine.close()
    assert not hasattr(engine, "model")
