"""Outputs equal transformers on each unpadded row alone, whatever the form, the cut and the mask."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from rlsdk.interfaces import Batch, ConfigError, Head, ModelSpec
from rlsdk.kit.model import logit_chunks
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import OutputModel, compute_outputs
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.reference import load_plain_model, plain_outputs

EXACT = {"rtol": 1e-6, "atol": 2e-6}
"""float32: a few units in the last place of log-probs of up to ten nats."""
LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=7)
FORMS = pytest.mark.parametrize("packed", [False, True, None], ids=["rectangle", "packed", "cheapest"])
FEW = settings(max_examples=12)


@functools.cache
def built(path: str) -> nn.Module:
    return build_model(ModelSpec(path=path))


plain_model = functools.cache(load_plain_model)


def rows_of(lengths: Sequence[int], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch.from_rows([torch.randint(0, 128, (n,), generator=generator).tolist() for n in lengths])


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Relative to the largest number of each tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=rtol * float(tensor.abs().max()) + 1e-8, msg=name)


@FORMS
@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3"])
@FEW
@given(lengths=LENGTHS, temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_log_probs_and_entropy_equal_each_row_alone(
    models: dict[str, str], name: str, packed: bool | None, lengths: list[int], temperature: float
) -> None:
    batch = rows_of(lengths).with_meta(temperature=temperature)
    model = built(models[name])
    with torch.no_grad():
        found = compute_outputs(model, Head.LM, batch, ("log_probs", "entropy"), packed=packed)
        expected = plain_outputs(plain_model(models[name]), batch)
    for output, tensor in expected.items():
        assert found[output].dtype is torch.float32
        torch.testing.assert_close(found[output], tensor, **EXACT)


@FORMS
def test_gradients_equal_each_row_alone(models: dict[str, str], packed: bool | None) -> None:
    batch = random_batch(9, longest=25, seed=4)
    weight = batch["loss_weight"] * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    model, plain = build_model(ModelSpec(path=models["qwen2"])), load_plain_model(models["qwen2"])

    def loss(found: dict[str, Tensor]) -> Tensor:
        return (weight * (found["log_probs"] - 0.3 * found["entropy"])).sum()

    mine = gradients(model, loss(compute_outputs(model, Head.LM, batch, ("log_probs", "entropy"), packed=packed)))
    assert_near(mine, gradients(plain, loss(plain_outputs(plain, batch))))


def test_off_the_mask_is_zero_and_on_it_nothing_changes(models: dict[str, str]) -> None:
    batch = random_batch(6, seed=2)
    model, names = build_model(ModelSpec(path=models["qwen2"])), ("log_probs", "entropy")
    masked = compute_outputs(model, Head.LM, batch, names)
    full = compute_outputs(model, Head.LM, batch.keep(["input_ids"]), names)
    for name in names:
        assert torch.all(masked[name][~batch["response_mask"]] == 0)
        torch.testing.assert_close(masked[name], full[name] * batch["response_mask"], **EXACT)
    assert torch.all(full["log_probs"][batch.position_ids > 0] < 0)


@settings(max_examples=15)
@given(lengths=LENGTHS, chunk=st.integers(1, 40))
def test_chunks_change_neither_outputs_nor_gradients(models: dict[str, str], lengths: list[int], chunk: int) -> None:
    batch = rows_of(lengths, seed=5)
    model = built(models["llama"])

    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        found = compute_outputs(model, Head.LM, batch, ("log_probs", "entropy"))
        loss = (found["log_probs"] * found["entropy"].detach()).sum() + found["entropy"].sum()
        return {k: v.detach() for k, v in found.items()}, gradients(model, loss)

    whole = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logit_chunks.MAX_LOGITS, "cpu", chunk * 128)
        cut = run()
    torch.testing.assert_close(cut[0], whole[0], **EXACT)
    assert_near(cut[1], whole[1])


def test_no_more_logits_than_a_chunk_exist_at_a_time(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logit_chunks.MAX_LOGITS, "cpu", 10 * 128)
    model = build_model(ModelSpec(path=models["qwen2"]))
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: sizes.append(out.numel()))
    batch = rows_of([20, 30, 17])
    compute_outputs(model, Head.LM, batch, ("log_probs",))["log_probs"].sum().backward()
    assert max(sizes) <= 10 * 128
    # Once forward, once again in the backward pass: nothing of the size of all logits was kept.
    assert sum(sizes) == 2 * (batch.num_tokens - batch.num_rows) * 128


@FORMS
def test_values_stand_at_the_token_that_is_chosen_in_that_state(models: dict[str, str], packed: bool | None) -> None:
    spec = ModelSpec(path=models["qwen2"], head=Head.VALUE)
    model, batch = build_model(spec, seed=7), rows_of([5, 1, 9, 12])
    found = compute_outputs(model, Head.VALUE, batch, ("values",), packed=packed)["values"]
    plain = plain_numbers(models["qwen2"], model, batch)
    expected = torch.cat([torch.cat([torch.zeros(1), row[:-1]]) for row in plain])
    torch.testing.assert_close(found, expected, **EXACT)


@FORMS
def test_scores_are_read_at_the_last_token(models: dict[str, str], packed: bool | None) -> None:
    spec = ModelSpec(path=models["qwen2"], head=Head.SCORE)
    model, batch = build_model(spec, seed=7), rows_of([5, 1, 9, 12])
    found = compute_outputs(model, Head.SCORE, batch, ("scores",), packed=packed)["scores"]
    expected = torch.stack([row[-1] for row in plain_numbers(models["qwen2"], model, batch)])
    torch.testing.assert_close(found, expected, **EXACT)


def plain_numbers(path: str, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Per row, what transformers' own class gives with the same weights."""
    plain = AutoModelForTokenClassification.from_pretrained(path, num_labels=1).eval()
    plain.load_state_dict(model.state_dict())
    rows = torch.split(batch["input_ids"], batch.lengths.tolist())
    return [plain(ids[None]).logits[0, :, 0].detach() for ids in rows]


def test_the_order_of_rows_does_not_matter(models: dict[str, str]) -> None:
    batch = rows_of([3, 17, 8, 1, 11])
    order = torch.tensor([4, 2, 0, 3, 1])
    model = build_model(ModelSpec(path=models["qwen3"]))
    straight = compute_outputs(model, Head.LM, batch, ("log_probs",))["log_probs"]
    shuffled = compute_outputs(model, Head.LM, batch.select(order), ("log_probs",))["log_probs"]
    torch.testing.assert_close(shuffled, straight[batch.token_index(order)], **EXACT)


@pytest.mark.parametrize("head", list(Head))
def test_a_batch_without_rows_gives_empty_outputs_and_zero_gradients(models: dict[str, str], head: Head) -> None:
    model = OutputModel(build_model(ModelSpec(path=models["qwen2"], head=head)), head)
    names = {Head.LM: ("log_probs", "entropy"), Head.VALUE: ("values",), Head.SCORE: ("scores",)}[head]
    found = model(Batch.from_rows([]), names)
    assert {name: list(values.shape) for name, values in found.items()} == {name: [0] for name in names}
    grads = gradients(model, sum(values.sum() for values in found.values()))  # type: ignore[arg-type]
    assert len(grads) == len(list(model.parameters()))
    assert all(torch.all(grad == 0) for grad in grads.values())


def test_rows_without_response_tokens_give_zero_gradients(models: dict[str, str]) -> None:
    model, batch = build_model(ModelSpec(path=models["qwen2"])), rows_of([4, 6])
    batch = batch.with_tokens(response_mask=torch.zeros(10, dtype=torch.bool))
    found = compute_outputs(model, Head.LM, batch, ("log_probs",))["log_probs"]
    assert torch.all(found == 0)
    assert all(torch.all(grad == 0) for grad in gradients(model, found.sum()).values())


def test_half_precision_models_give_float32_outputs(models: dict[str, str]) -> None:
    batch = rows_of([6, 9, 4])
    model = build_model(ModelSpec(path=models["qwen2"], dtype="bfloat16"))
    found = compute_outputs(model, Head.LM, batch, ("log_probs", "entropy"))
    expected = plain_outputs(load_plain_model(models["qwen2"]), batch)
    for name, values in found.items():
        assert values.dtype is torch.float32
        torch.testing.assert_close(values, expected[name], rtol=0, atol=0.1)


def test_an_output_of_another_head_is_refused_with_the_nearest_name(models: dict[str, str]) -> None:
    model, batch = build_model(ModelSpec(path=models["qwen2"])), rows_of([3])
    with pytest.raises(ConfigError, match=r"'log_prob'; did you mean 'log_probs'\?: a model with head 'lm' gives"):
        compute_outputs(model, Head.LM, batch, ("log_prob",))
    with pytest.raises(ConfigError, match="output 'values'"):
        compute_outputs(model, Head.LM, batch, ("values",))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(models: dict[str, str], temperature: float) -> None:
    model = build_model(ModelSpec(path=models["qwen2"]))
    with pytest.raises(ConfigError, match="log-probs need one above 0"):
        compute_outputs(model, Head.LM, rows_of([3]).with_meta(temperature=temperature), ("log_probs",))
