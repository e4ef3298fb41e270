"""What is computed once per distinct prefix is what each row would have got alone: values and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlsdk.interfaces import Batch, Head, ModelSpec
from rlsdk.kit.model import prefixes as module
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import compute_outputs
from rlsdk.kit.model.prefixes import distinct_prefixes
from rlsdk.testing.process.models import write_tiny_model

# Two tokens, so that rows meet often and part late.
ROWS = st.lists(st.lists(st.integers(5, 6), max_size=7), min_size=1, max_size=9).filter(any)


@given(ROWS)
@settings(max_examples=200)
def test_tokens_share_a_number_where_their_rows_agree_up_to_them_and_nowhere_else(rows: list[list[int]]) -> None:
    found = distinct_prefixes(Batch.from_rows(rows))
    wanted = [tuple(row[: at + 1]) for row in rows for at in range(len(row))]
    index = found.index.tolist()
    assert [[a == b for b in index] for a in index] == [[a == b for b in wanted] for a in wanted]
    assert found.first.tolist() == sorted(wanted.index(prefix) for prefix in set(wanted))
    assert [index[at] for at in found.first.tolist()] == list(range(found.count))


def test_prefixes_that_meet_in_a_hash_are_told_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collision may cost time, never a number."""
    monkeypatch.setattr(module, "_mixed", lambda values: values * 0)
    batch = Batch.from_rows([[5, 6, 7], [5, 8, 7], [5, 6, 7]])
    assert distinct_prefixes(batch).index.tolist() == list(range(9))


@pytest.fixture(scope="module", params=[Head.LM, Head.VALUE, Head.SCORE])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Head]:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"), seed=1, sharpness=2.0)
    return build_model(ModelSpec(path=str(folder), head=request.param)), request.param


def outputs_and_gradients(
    model: nn.Module, head: Head, batches: list[tuple[Batch, Tensor]], packed: bool | None
) -> tuple[Tensor, list[Tensor]]:
    """Of all batches together, each with a weight for every output."""
    names = {Head.LM: ("log_probs", "entropy"), Head.VALUE: ("values",), Head.SCORE: ("scores",)}[head]
    model.zero_grad()
    found = []
    for batch, weight in batches:
        out = compute_outputs(model, head, batch, names, packed=packed)
        (sum(out[name] for name in names) * weight).sum().backward()
        found.append(torch.stack([out[name].detach() for name in names], dim=-1))
    return torch.cat(found), [p.grad for p in model.parameters() if p.grad is not None]


@example(rows=[[6], [5, 7], [6, 5, 5]], masked=False, seed=0, packed=True)
@given(rows=ROWS, masked=st.booleans(), seed=st.integers(0, 9), packed=st.sampled_from([None, True]))
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_equal_those_of_rows_one_by_one(
    model: tuple[nn.Module, Head], rows: list[list[int]], masked: bool, seed: int, packed: bool | None
) -> None:
    network, head = model
    rows = [row for row in rows if row]
    generator = torch.Generator().manual_seed(seed)
    batch = Batch.from_rows(rows)
    if masked:
        batch = batch.with_tokens(response_mask=torch.rand(batch.num_tokens, generator=generator) < 0.6)
    weight = torch.randn(batch.num_rows if head is Head.SCORE else batch.num_tokens, generator=generator)
    one_by_one = [
        (batch.select(torch.tensor([at])), weight[at : at + 1] if head is Head.SCORE else weight[start:stop])
        for at, (start, stop) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True))
    ]
    expected, gradients = outputs_and_gradients(network, head, one_by_one, False)
    found, together = outputs_and_gradients(network, head, [(batch, weight)], packed)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert len(gradients) == len(together)
    for got, wanted in zip(together, gradients, strict=True):
        assert (got - wanted).norm() <= 3e-5 * wanted.norm() + 2e-5


def test_gradients_on_several_threads_are_the_same_bit_for_bit_every_time(
    model: tuple[nn.Module, Head],
) -> None:
    """Rows that share a prefix add to the gradient of the same hidden states. Two runs of the quickstart differed."""
    network, head = model
    name = {Head.LM: "log_probs", Head.VALUE: "values", Head.SCORE: "scores"}[head]
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(128, (40, 6), generator=generator).tolist()
    batch = Batch.from_rows([[*prompt, at, at] for prompt in prompts for at in range(16)])
    weights = torch.rand(batch.num_rows if head is Head.SCORE else batch.num_tokens, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = []
        for _ in range(8):
            network.zero_grad()
            (compute_outputs(network, head, batch, [name])[name] * weights).sum().backward()
            found.append([parameter.grad for parameter in network.parameters() if parameter.grad is not None])
    finally:
        torch.set_num_threads(threads)
        network.zero_grad()
    assert all(torch.equal(one, first) for other in found[1:] for one, first in zip(other, found[0], strict=True))
