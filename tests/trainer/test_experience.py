"""From prompts and samples to the batch: nothing lost, nothing swapped, nothing drawn from hidden state."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, SamplingParams, VersionRun
from rlsdk.trainer.experience import (
    cut_mini_batches,
    make_batch,
    make_requests,
    make_sft_batch,
    request_seed,
    scatter_loss_weights,
)
from rlsdk.trainer.hosts import Samples

TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=6)


def output(request: GenerationRequest, index: int, tokens: list[int]) -> GenerationOutput:
    return GenerationOutput(
        request_id=request.request_id,
        sample_index=index,
        token_ids=np.array(tokens, np.int64),
        log_probs=-np.array(tokens, np.float32),
        finish_reason=FinishReason.LENGTH if len(tokens) == 6 else FinishReason.STOP,
        versions=(VersionRun(len(tokens), len(tokens)),),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[list[list[int]]], list[list[int]]]:
    """Prompts, responses by prompt, and a share of the prompts for each of some replicas."""
    prompts = draw(st.lists(TOKENS, min_size=1, max_size=6))
    n = draw(st.integers(1, 3))
    responses = [draw(st.lists(TOKENS, min_size=n, max_size=n)) for _ in prompts]
    owner = [draw(st.integers(0, 2)) for _ in prompts]
    return prompts, responses, [[at for at, o in enumerate(owner) if o == r] for r in range(3)]


@given(steps(), st.randoms())
def test_rows_hold_their_own_prompt_and_response_whoever_finished_first(step, random) -> None:  # type: ignore[no-untyped-def]
    prompts, responses, shares = step
    requests = make_requests(prompts, SamplingParams(), n=len(responses[0]), seed=(0,))
    parts = []
    for share in shares:
        outputs = [output(requests[at], i, r) for at in share for i, r in enumerate(responses[at])]
        random.shuffle(outputs)
        parts.append(Samples.pack([requests[at] for at in share], outputs))
    batch = make_batch(prompts, Samples.merge(parts, shares), temperature=0.5).validate()
    expected = [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    assert batch.num_rows == len(expected)
    for row, (prompt, response) in enumerate(expected):
        one = batch.select([row])
        assert one["input_ids"].tolist() == prompt + response
        assert one["response_mask"].tolist() == [False] * len(prompt) + [True] * len(response)
        assert one["rollout_log_probs"].tolist() == [0.0] * len(prompt) + [-float(t) for t in response]
        assert one["policy_version"].item() == len(response)
        assert one["truncated"].item() == (len(response) == 6)
    assert batch["uid"].tolist() == [at for at, group in enumerate(responses) for _ in group]
    assert batch.temperature == 0.5


@given(st.integers(1, 50), st.integers(1, 8), st.integers(0, 5))
def test_mini_batches_hold_every_row_once_and_differ_by_one_row_at_most(rows: int, parts: int, seed: int) -> None:
    cut = cut_mini_batches(rows, parts, seed=(seed,))
    assert sorted(torch.cat(cut).tolist()) == list(range(rows))
    sizes = [len(part) for part in cut]
    assert len(cut) == parts
    assert max(sizes) - min(sizes) <= 1
    again = cut_mini_batches(rows, parts, seed=(seed,))
    assert all(torch.equal(a, b) for a, b in zip(cut, again, strict=True))


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    seeds = {
        request_seed(run, name, step, at)
        for run in range(3)
        for name in ("a", "b")
        for step in range(5)
        for at in range(5)
    }
    assert len(seeds) == 3 * 2 * 5 * 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, "train", 2, 3) == 8573780293393194795


def test_supervised_rows_learn_the_answer_alone() -> None:
    batch = make_sft_batch([[1, 2], [3]], [[4], [5, 6]]).validate()
    assert batch["input_ids"].tolist() == [1, 2, 4, 3, 5, 6]
    assert batch["response_mask"].tolist() == [False, False, True, False, True, True]


@given(st.lists(st.integers(1, 5), min_size=2, max_size=10), st.integers(1, 2))
def test_loss_weights_stand_with_their_own_rows(lengths: list[int], parts: int) -> None:
    prompts = [[row] for row in range(len(lengths))]
    batch = make_sft_batch(prompts, [[0] * length for length in lengths])
    cut = cut_mini_batches(len(lengths), parts, seed=(0,))
    weights = [batch.select(rows)["input_ids"].float() + 1 for rows in cut]
    assert torch.equal(scatter_loss_weights(batch, cut, weights)["loss_weight"], batch["input_ids"].float() + 1)
