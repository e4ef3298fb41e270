"""Ranks that split each row compute what one process computes: outputs, and the sum of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_packed import FAMILIES, write_model
from torch import Tensor, nn

from rlsdk.interfaces import Batch, ConfigError, Head, ModelSpec, RankContext
from rlsdk.kit.model.context_parallel import ContextSplit, check_model, split_problems
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import OutputModel, compute_outputs
from rlsdk.kit.ranks.rendezvous import destroy_process_group, init_process_group
from rlsdk.testing.process.models import random_batch, write_tiny_model
from rlsdk.testing.process.reference import load_plain_model, plain_outputs
from rlsdk.testing.process.worlds import Seat, World, process_pool

OUTPUT = 4e-6
"""As in test_packed.py."""
GRADIENT = 1e-5
"""Relative to the largest gradient of a parameter, but to 1 at least."""
NAMES = {Head.LM: ("log_probs", "entropy"), Head.VALUE: ("values",), Head.SCORE: ("scores",)}


@dataclass(frozen=True)
class Found:
    """What a batch gives: by one process, or by one of several ranks."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """Summed over ranks."""
    longest: int = 0
    """Most tokens that went through a linear layer in a pass."""


def loss_of(outputs: Mapping[str, Tensor]) -> Tensor:
    """Weighs every output differently."""
    generator = torch.Generator().manual_seed(7)
    weighed = [values * torch.randn(values.shape, generator=generator) for values in outputs.values()]
    return torch.stack([values.sum() for values in weighed]).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def rank_of_split(seat: Seat, path: str, head: Head, batch: Batch, recompute: bool) -> Found:
    """A job: this rank's part of a pass forward and backward."""
    ctx = RankContext(role="actor", rank=seat.rank, world_size=seat.size, master_port=seat.port, timeout_s=60.0)
    init_process_group(ctx, "gloo")
    try:
        model = build_model(ModelSpec(path=path, head=head))
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        seen: list[int] = []
        for module in model.base_model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
        outputs = OutputModel(model, head, ContextSplit(seat.rank, seat.size, dist.group.WORLD))
        part, plan = outputs.send(batch, torch.device("cpu"))
        found = outputs(part, NAMES[head], plan=plan)
        loss_of(found).backward()  # type: ignore[no-untyped-call]
        gradients = gradients_of(model)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        return Found({name: values.detach() for name, values in found.items()}, gradients, max(seen, default=0))
    finally:
        destroy_process_group(ctx)


def split(size: int, path: str, batch: Batch, head: Head = Head.LM, *, recompute: bool = False) -> list[Found]:
    found: list[Found] = World(size, Seat(backend="torch")).run(rank_of_split, path, head, batch, recompute)
    return found


def alone(path: str, batch: Batch, head: Head = Head.LM) -> Found:
    """One process; for a language model, plain transformers on each row."""
    if head is Head.LM:
        model: Any = load_plain_model(path, attn_implementation="eager")
        outputs = plain_outputs(model, batch)
        if "response_mask" in batch:
            outputs = {name: values * batch["response_mask"] for name, values in outputs.items()}
    else:
        model = build_model(ModelSpec(path=path, head=head))
        outputs = compute_outputs(model, head, batch, NAMES[head], packed=False)
    loss_of(outputs).backward()  # type: ignore[no-untyped-call]
    return Found({name: values.detach() for name, values in outputs.items()}, gradients_of(model))


def assert_equal(ranks: Sequence[Found], expected: Found) -> None:
    for rank in ranks:
        for name, values in expected.outputs.items():
            torch.testing.assert_close(rank.outputs[name], values, rtol=0, atol=OUTPUT)
    assert ranks[0].gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(ranks[0].gradients[name], gradient, rtol=0, atol=GRADIENT * scale, msg=name)


@pytest.fixture(scope="module", autouse=True)
def _end_processes() -> Any:
    yield
    for size in (2, 3):
        process_pool(size).close()


@pytest.fixture(scope="module")
def six_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six heads share two keys and values: three ranks get a head's keys twice."""
    folder = tmp_path_factory.mktemp("six")
    return str(write_tiny_model(folder, hidden_size=96, num_attention_heads=6, head_dim=16, seed=4))


BATCHES = st.builds(
    lambda rows, shared, masked: (rows, shared, masked),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(0, 12),
    st.booleans(),
)


def batch_of(lengths: Sequence[int], shared: int, *, masked: bool) -> Batch:
    """Rows of these lengths after a common prefix."""
    generator = torch.Generator().manual_seed(sum(lengths) + shared)
    ids = torch.randint(3, 128, (shared + sum(lengths),), generator=generator)
    parts = torch.split(ids[shared:], list(lengths))
    batch = Batch.from_rows([[*ids[:shared].tolist(), *part.tolist()] for part in parts])
    mask = torch.rand(batch.num_tokens, generator=generator) < 0.4
    return batch.with_tokens(response_mask=mask & (batch.position_ids > 0)) if masked else batch


@settings(max_examples=8)
@given(BATCHES, st.sampled_from([2, 3]))
@example(([1], 0, False), 3)  # nothing is predicted, and two ranks have padding only
@example(([40], 0, False), 3)  # one row
@example(([1, 1], 20, True), 2)
def test_any_packing_gives_outputs_and_gradients_of_plain_transformers(
    six_heads: str, given_rows: tuple[list[int], int, bool], size: int
) -> None:
    lengths, shared, masked = given_rows
    batch = batch_of(lengths, shared, masked=masked)
    ranks = split(size, six_heads, batch)
    assert_equal(ranks, alone(six_heads, batch))
    assert max(rank.longest for rank in ranks) <= -(-batch.num_tokens // size)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_packs_can_be_split(family: str, tmp_path: Path) -> None:
    """Windows, score caps, sinks (a parameter of each head), learned positions, values wider than keys, experts."""
    config_class, extra = FAMILIES[family]
    path = write_model(tmp_path, config_class, **extra)
    batch = Batch.from_rows([[7, 8, 9, *ids.tolist()] for ids in torch.arange(3, 60).split([17, 9, 2, 29])])
    assert_equal(split(2, path, batch), alone(path, batch))


@pytest.mark.parametrize("head", [Head.VALUE, Head.SCORE])
@pytest.mark.parametrize("size", [2, 3])
def test_values_and_scores(six_heads: str, head: Head, size: int) -> None:
    batch = random_batch(5, seed=3)
    assert_equal(split(size, six_heads, batch, head), alone(six_heads, batch, head))


def test_activations_are_recomputed_over_all_ranks(six_heads: str) -> None:
    batch = random_batch(5, seed=3)
    assert_equal(split(2, six_heads, batch, recompute=True), alone(six_heads, batch))


@pytest.mark.parametrize("group", ["text_config", None])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_attention_heads": 6}, "4 does not divide the model's 6 attention heads; expected one of [1, 2, 3, 6]"),
        ({"n_head": 6}, "4 does not divide the model's 6 attention heads"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "4: the model's rotary embedding is 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "rotary embedding is 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rotary embedding is 'dynamic'"),
    ],
)
def test_models_that_ranks_cannot_split_are_refused(fields: dict[str, Any], group: str | None, told: str) -> None:
    (problem,) = split_problems({group: fields} if group else fields, 4)
    assert told in problem


def test_fields_that_fit_are_not_refused() -> None:
    yarn = {"num_attention_heads": 8, "rope_parameters": {"rope_type": "yarn"}, "rope_scaling": None}
    assert split_problems(yarn, 4) == split_problems({}, 4) == []


def test_a_model_that_cannot_pack_is_refused_by_name(six_heads: str) -> None:
    model = build_model(ModelSpec(path=six_heads), empty=True)
    check_model(model, 3, packs=True)
    check_model(model, 1, packs=False)
    with pytest.raises(ConfigError, match="context_parallel: 2 splits packed rows, and the layers of Qwen2ForCausalLM"):
        check_model(model, 2, packs=False)
    with pytest.raises(ConfigError, match="context_parallel: 4 does not divide the model's 6 attention heads"):
        check_model(model, 4, packs=True)
