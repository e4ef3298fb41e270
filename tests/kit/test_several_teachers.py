"""The divergence where each row has a teacher of its own: of another width, vocabulary and temperature, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsdk.interfaces import Batch, ModelSpec
from rlsdk.kit.model import logit_chunks
from rlsdk.kit.model.divergence import load_teacher_head
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import OutputModel, TeacherHead, _divergence_of
from rlsdk.kit.model.prefixes import distinct_prefixes
from rlsdk.testing.process.models import write_tiny_model

TEMPERATURES = {"teacher_temperature": 1.6, "teacher_temperature.1": 0.7}
SHAPES: list[dict[str, Any]] = [{}, {"hidden_size": 64, "vocab_size": 160}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A policy and two teachers."""
    folder = tmp_path_factory.mktemp("models")
    teachers = [write_tiny_model(folder / f"{at}", seed=2 + at, sharpness=2.0, **one) for at, one in enumerate(SHAPES)]
    return [write_tiny_model(folder / "policy", seed=1), *teachers]


def heads(folders: list[Path]) -> dict[int, TeacherHead]:
    specs = [ModelSpec(path=str(folder), dtype="float32") for folder in folders[1:]]
    return {at: TeacherHead(load_teacher_head(spec, torch.device("cpu"))) for at, spec in enumerate(specs)}


def plain(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """`[m]`, with probabilities: nothing of this project."""
    q, p = policy[:, :128].softmax(-1), teacher[:, :128].softmax(-1)
    if beta == 0.0:
        return (p * (p / q).log()).sum(-1)
    if beta == 1.0:
        return (q * (q / p).log()).sum(-1)
    mean = beta * p + (1 - beta) * q
    return beta * (p * (p / mean).log()).sum(-1) + (1 - beta) * (q * (q / mean).log()).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_values_and_gradients_are_those_of_the_plain_formula_in_float64(beta: float, folders: list[Path]) -> None:
    generator = torch.Generator().manual_seed(3)
    teachers = {at: TeacherHead(head.model.double()) for at, head in heads(folders).items()}
    states = torch.randn(9, 128, generator=generator, dtype=torch.float64)
    numbers = torch.tensor([0, 1, 1, -1, 0, 1, 0, 0, -1])
    logits = torch.randn(9, 128, generator=generator, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(9, generator=generator, dtype=torch.float64)
    found = _divergence_of(teachers, {**TEMPERATURES, "divergence_beta": beta}, logits, states, numbers)
    (given,) = torch.autograd.grad((found * slope).sum(), logits)
    expected = torch.zeros(9, dtype=torch.float64)
    for at, folder in enumerate(folders[1:]):
        weight: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).get_output_embeddings().weight
        mine = numbers == at
        theirs = states[mine][:, : weight.shape[1]] @ weight.detach().T / list(TEMPERATURES.values())[at]
        expected[mine] = plain(logits[mine], theirs, beta)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # logits of a head are float32
    (right,) = torch.autograd.grad((expected * slope).sum(), logits)
    torch.testing.assert_close(given, right, rtol=1e-6, atol=1e-8)
    assert not given[numbers == -1].any()


def test_each_row_has_the_divergence_from_its_own_teacher(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with equal tokens, of which each has another teacher or none, in chunks of three tokens."""
    monkeypatch.setitem(logit_chunks.MAX_LOGITS, "cpu", 3 * 128)
    row, other = [5, 9, 40, 7, 8], [5, 9, 40, 30]
    batch = Batch.from_rows([row, row, other, row, other])
    numbers = torch.tensor([1, 0, 1, -1, 0])
    mask = batch.position_ids > 1
    batch = batch.with_tokens(response_mask=mask, teacher_index=numbers[batch.row_of_token])
    states = torch.zeros(batch.num_tokens, 128)
    specs = [ModelSpec(path=str(folder), dtype="float32") for folder in folders]
    with torch.no_grad():
        for at, spec in enumerate(specs[1:]):
            own = OutputModel(build_model(spec))(batch, ("hidden_states",))["hidden_states"]
            states[batch["teacher_index"] == at, : own.shape[1]] = own[batch["teacher_index"] == at]
    taught = batch.with_tokens(teacher_states=states).with_meta(**TEMPERATURES, divergence_beta=0.4)
    model = OutputModel(build_model(specs[0]))
    model.teachers = heads(folders)
    found = model(taught, ("divergence",))["divergence"]
    assert distinct_prefixes(batch).count == 5 + 5 + 1 + 5 + 1
    plains = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    for at, (start, end) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
        if (number := int(numbers[at])) < 0:
            continue
        ids = batch["input_ids"][start:end][None]
        with torch.no_grad():
            ours, theirs = (plains[one](ids).logits[0, 1:-1] for one in (0, 1 + number))
        expected = plain(ours, theirs / list(TEMPERATURES.values())[number], 0.4)
        torch.testing.assert_close(found[start + 2 : end], expected, rtol=1e-4, atol=1e-5)
