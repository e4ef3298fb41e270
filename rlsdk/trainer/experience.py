"""From prompts and samples to the batch that is trained on: pure functions, no engine and no Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlsdk.interfaces import Batch, GenerationRequest, SamplingParams
from rlsdk.trainer.hosts import Samples


def request_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part; the same on every machine and in every run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def make_requests(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, n: int, seed: Sequence[int | str]
) -> list[GenerationRequest]:
    """One request per prompt; its seed is drawn from `seed` and its position, so a resumed run samples the same."""
    return [
        GenerationRequest(
            request_id=str(at),
            prompt_ids=tuple(prompt),
            n=n,
            sampling=SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=sampling.stop_token_ids,
                stop_strings=sampling.stop_strings,
                seed=request_seed(*seed, at),
            ),
        )
        for at, prompt in enumerate(prompts)
    ]


def make_batch(prompts: Sequence[Sequence[int]], samples: Samples, *, temperature: float) -> Batch:
    """Joins prompts and responses into rows, one per sample: `input_ids`, `response_mask`, `rollout_log_probs`,
    `uid` (position of the prompt in the step), `policy_version`, `truncated`."""
    prompt_lengths = np.array([len(p) for p in prompts], np.int64)[samples.request]
    lengths = prompt_lengths + samples.lengths
    starts = np.cumsum(lengths) - lengths
    offset = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    mask = offset >= np.repeat(prompt_lengths, lengths)
    input_ids = np.empty(len(mask), np.int64)
    input_ids[mask] = samples.token_ids
    arrays = [np.asarray(p, np.int64) for p in prompts]
    input_ids[~mask] = np.concatenate([arrays[r] for r in samples.request]) if len(samples.request) else ()
    log_probs = np.zeros(len(mask), np.float32)
    log_probs[mask] = samples.log_probs
    return Batch(
        lengths=torch.from_numpy(lengths),
        tokens={
            "input_ids": torch.from_numpy(input_ids),
            "response_mask": torch.from_numpy(mask),
            "rollout_log_probs": torch.from_numpy(log_probs),
        },
        rows={
            "row_id": torch.arange(len(lengths)),
            "uid": torch.from_numpy(samples.request),
            "policy_version": torch.from_numpy(samples.policy_version),
            "truncated": torch.from_numpy(samples.truncated),
        },
        meta={"temperature": temperature},
    )


def make_sft_batch(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Batch:
    """Rows of prompt and answer; `response_mask` is True on the answer, which is what is learned."""
    batch = Batch.from_rows([[*p, *a] for p, a in zip(prompts, answers, strict=True)])
    starts = torch.tensor([len(p) for p in prompts])
    return batch.with_tokens(response_mask=batch.position_ids >= torch.repeat_interleave(starts, batch.lengths))


def cut_mini_batches(num_rows: int, num_parts: int, *, seed: Sequence[int | str]) -> list[Tensor]:
    """Row indices of each mini-batch: a random cut into parts whose sizes differ by one at most. Every row once."""
    generator = torch.Generator().manual_seed(request_seed(*seed))
    order = torch.randperm(num_rows, generator=generator)
    return [part.sort().values for part in order.tensor_split(num_parts)]


def with_signal(batch: Batch, rows: Tensor) -> Tensor:
    """Those of `rows` `[M]` with an advantage that is not 0 on some token; the first of all where none has one.

    One row is always left: with a gradient of zeros the optimizer's moments decay as they would have.
    """
    strength = batch.row_sum(batch["advantages"].abs())[rows]
    kept = rows[strength > 0]
    return kept if len(kept) else rows[:1]


def scatter_loss_weights(batch: Batch, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Batch:
    """Adds `loss_weight`: each part's own weights, put where its rows stand in the whole batch."""
    flat = torch.zeros(batch.num_tokens)
    for rows, weight in zip(parts, weights, strict=True):
        flat[batch.token_index(rows)] = weight
    return batch.with_tokens(loss_weight=flat)
