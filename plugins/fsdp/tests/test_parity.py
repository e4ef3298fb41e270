"""The same numbers as one process of plain torch, for every split, cut and form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from comparing import EXACT, compare, good, reference, whole
from worlds import NUM_ROWS, OBJECTIVES, OPTIM, Case

from rlsdk.interfaces import Batch
from rlsdk.testing.process.models import random_batch

PARITY = [
    *((1, name) for name in ("all rows", "micro 3", "adapter")),
    *(
        (2, name)
        for name in (
            "all rows", "micro 1", "micro 3", "by tokens", "packed", "padded", "two calls", "two calls sharded",
            "kept gathered", "one group", "recomputed", "idle rank", "host", "offload and onload", "after a failure",
            "random", "value", "score", "tied", "odd vocabulary", "gpt2", "gemma3", "mixture",
            "adapter", "adapter rank 1", "adapter offloaded",
            "split rows", "split rows micro 1", "split rows sharded", "split rows recomputed",
            "split rows after a failure", "split rows value", "split rows score", "split rows mixture",
            "split rows adapter",
        )
    ),
    *(
        (4, name)
        for name in (
            "all rows", "micro 1", "micro 3", "value", "hybrid", "hybrid micro 1", "hybrid micro 3", "hybrid sharded",
            "hybrid idle rank", "copies only", "split rows", "split rows idle rank",
            "split rows hybrid", "split rows over 4",
        )
    ),
    (3, "split rows"),
]  # fmt: skip

LOW = ("bfloat16", "bfloat16 passes", "bfloat16 weights", "split rows bfloat16")


@pytest.mark.parametrize(("world", "name"), PARITY)
def test_losses_gradient_norms_and_parameters_equal_one_process(
    world: int, name: str, worlds: Mapping[int, list[Case]], results: Any
) -> None:
    case = next(case for case in worlds[world] if case.name == name)
    difference = compare(results[world, name], reference(case))
    print(f"{world} x {name}: {difference}")
    assert difference.loss <= EXACT
    assert difference.norm <= EXACT
    assert difference.parameter <= EXACT
    assert difference.output <= EXACT


def test_one_process_of_plain_transformers_says_the_same(models: dict[str, str], results: Any) -> None:
    """No code of this project but the objective: padded rows, an attention mask, log-softmax, AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["plain"], dtype=torch.float32, attn_implementation="eager")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False)
    ranks = good(results[2, "all rows"])
    for step in range(2):
        batch = random_batch(NUM_ROWS, seed=10 + step * 10)
        loss = OBJECTIVES["log_probs"](plain_outputs(model, batch), batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = OPTIM.lr * (step + 1) / 2
        optimizer.step()
        optimizer.zero_grad()
        assert ranks[0]["losses"][step] == pytest.approx(float(loss.detach()), abs=EXACT)
        assert ranks[0]["norms"][step] == pytest.approx(float(norm), rel=EXACT)
    found = whole(ranks)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter, atol=EXACT), name


def plain_outputs(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Log-probs and entropy, flat, at the tokens they speak of."""
    padded = batch.padded("input_ids")
    mask = torch.arange(padded.shape[1])[None] < batch.lengths[:, None]
    logs = model(input_ids=padded, attention_mask=mask.long()).logits.log_softmax(-1)
    chosen = logs[:, :-1].gather(2, padded[:, 1:, None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)[:, :-1]
    zeros = torch.zeros(len(padded), 1)
    return {"log_probs": torch.cat([zeros, chosen], 1)[mask], "entropy": torch.cat([zeros, entropy], 1)[mask]}


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_stays_near_float32(name: str, results: Any) -> None:
    same_rows = "split rows recomputed" if name.startswith("split rows") else "micro 3"
    low, high = good(results[2, name])[0], good(results[2, same_rows])[0]
    assert low["norms"] == pytest.approx(high["norms"], rel=0.05)
    assert low["losses"] == pytest.approx(high["losses"], abs=0.01)
    assert low["before"].dtype is torch.float32
    assert 0 < float((low["before"] - high["before"]).abs().max()) < 0.1


def test_weights_are_held_in_float32_unless_told_otherwise(results: Any) -> None:
    held = {name: {meta.dtype for meta in good(results[2, name])[0]["layout"].tensors} for name in LOW}
    assert held == {
        "bfloat16": {"float32"},
        "bfloat16 passes": {"float32"},
        "bfloat16 weights": {"bfloat16"},
        "split rows bfloat16": {"float32"},
    }


def test_passes_are_counted_alike_on_all_ranks_and_bounded_by_tokens(results: Any) -> None:
    """Rank 0 has more rows than rank 1; both make as many passes."""
    by_tokens = good(results[2, "by tokens"])
    assert [rank["micro_batches"] for rank in by_tokens] == [by_tokens[0]["micro_batches"]] * 2
    assert min(by_tokens[0]["micro_batches"]) >= 2
    assert good(results[2, "all rows"])[0]["micro_batches"] == [1, 1]
    assert good(results[2, "micro 1"])[1]["micro_batches"] == [7, 7]


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(results: Any) -> None:
    for rank in good(results[2, "skipped"]):
        assert rank["bad"].skipped
        assert rank["unchanged"]
        assert not rank["good"].skipped
        assert rank["good"] == rank["expected"]
        assert rank["same"]


def test_memory_lent_to_the_host_is_gone_from_the_device_until_it_is_back(results: Any) -> None:
    for rank in good(results[2, "offload and onload"]):
        before, meanwhile = rank["offload_bytes"]
        assert before > 0
        assert meanwhile == 0
