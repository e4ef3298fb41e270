"""Converts samples to vLLM's requests, and vLLM's outputs to progress of samples.

Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from rlsdk.interfaces import ConfigError, FinishReason, PromptLogProbs
from rlsdk_vllm.samples import MIN_P_ARGUMENT, PRIOR_ARGUMENT, SEED_ARGUMENT, Sample

LEAST_TEMPERATURE = 0.01
"""Lowest temperature above 0 at which vLLM samples."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class Progress(NamedTuple):
    """New tokens of a sample."""

    key: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    """Version of the weights that each token was sampled with."""
    finished: FinishReason | None
    prompt: PromptLogProbs | None = None
    """Of the given tokens: with the first new one."""


def sampling_params(sample: Sample) -> Any:
    """vLLM's parameters of one sample. The caller searches for stop strings: the engine has no tokenizer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = sample.request.sampling
    if 0 < asked.temperature < LEAST_TEMPERATURE:
        # vLLM would raise it to the lowest temperature, with only a log message.
        raise ValueError(f"temperature {asked.temperature}: expected 0, or {LEAST_TEMPERATURE} or more")
    return SamplingParams(
        n=1,
        max_tokens=sample.limit,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        extra_args={
            SEED_ARGUMENT: sample.seed,
            MIN_P_ARGUMENT: asked.min_p,
            PRIOR_ARGUMENT: len(sample.request.response_ids),
        },
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        prompt_logprobs=sample.request.prompt_log_probs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def prompt_of(sample: Sample) -> dict[str, Any]:
    """The prompt of a sample in vLLM's format; it includes response tokens of the request."""
    return {"type": "token", "prompt_token_ids": [*sample.request.prompt_ids, *sample.request.response_ids]}


def progress_of(key: str, output: Any) -> Progress:
    """Progress of a sample from a `vllm.RequestOutput`."""
    made = output.outputs[0]
    finished = None if made.finish_reason is None else REASONS.get(made.finish_reason)
    if made.finish_reason is not None and finished is None:
        raise RuntimeError(f"vLLM ended request {key!r} with {made.finish_reason!r}")
    prompt = _prompt_log_probs(output.prompt_logprobs) if output.prompt_logprobs else None
    if made.logprobs is None:
        return Progress(key, made.token_ids, (), (), finished, prompt)
    # The plugin's sampler puts versions in the place of ranks.
    return Progress(key, made.token_ids, made.logprobs.logprobs, made.logprobs.ranks, finished, prompt)


def _prompt_log_probs(given: Any) -> PromptLogProbs:
    """The log-probs of a prompt from vLLM's `FlatLogprobs`: the first position, which has none, is empty; all others
    have the given token, and then the most probable ones."""
    columns = (len(given.start_indices) - 1, max(len(given.token_ids) // max(len(given.start_indices) - 1, 1), 1))
    ids = np.array(given.token_ids, np.int64).reshape(columns)
    found = np.array(given.logprobs, np.float32).reshape(columns)
    return PromptLogProbs(log_probs=found[:, 0], top_ids=ids[:, 1:], top_log_probs=found[:, 1:])


@contextmanager
def explained_refusal(sample: Sample) -> Iterator[None]:
    """Raises `ConfigError` if vLLM refuses a request."""
    try:
        yield
    except Exception as error:
        # The exception class differs between versions of vLLM.
        raise ConfigError(f"request {sample.request.request_id!r}: vLLM refuses it: {error}") from error
