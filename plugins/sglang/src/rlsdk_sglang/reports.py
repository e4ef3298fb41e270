"""Converts samples to SGLang's requests, and SGLang's reports to progress of samples. Tested: 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsdk.interfaces import FinishReason, PromptLogProbs
from rlsdk_sglang.samples import Sample

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True)
class Progress:
    """New tokens of one report."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finished: FinishReason | None
    versions: Sequence[tuple[int, int]] | None
    """Runs of (version, number of tokens) of a finished sample."""
    prompt: PromptLogProbs | None = None
    """Of the given tokens."""


def sampling_params(sample: Sample) -> dict[str, Any]:
    """SGLang's parameters of one sample. The caller searches for stop strings: the engine has no tokenizer."""
    asked = sample.request.sampling
    return {
        "max_new_tokens": sample.limit,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "min_p": asked.min_p,
        "stop_token_ids": list(asked.stop_token_ids),
        "sampling_seed": sample.seed,
    }


def prompt_fields(count: int) -> dict[str, Any]:
    """Fields of a request that ask for log-probs of its tokens, and of the `count` most probable ones."""
    return {"logprob_start_len": 0, "top_logprobs_num": count}


def progress_of(report: Mapping[str, Any], seen: int, prompt: int | None = None) -> Progress:
    """New tokens of a report. A report contains only these, or all tokens if the server was started differently.

    Args:
        report: of SGLang.
        seen: tokens of reports before.
        prompt: most probable tokens that were asked for in the places of given ones; None: nothing is read of these.
    """
    about = report["meta_info"]
    ended = about["finish_reason"]
    total = about["completion_tokens"]
    log_probs = [entry[0] for entry in _new(about["output_token_logprobs"], seen, total)]
    tokens = list(_new(report["output_ids"], seen, total))
    if ended is not None and ended["type"] == "abort" and ended.get("status_code") is not None:
        raise ValueError(ended.get("message"))
    spans = about.get("weight_versions") if ended is not None else None
    return Progress(
        token_ids=tokens,
        log_probs=log_probs[: len(tokens)],
        finished=None if ended is None else REASONS[ended["type"]],
        versions=[(int(span["version"]), span["end"] - span["start"]) for span in spans] if spans else None,
        prompt=None if prompt is None or not tokens else _prompt_log_probs(about, prompt),
    )


def _prompt_log_probs(about: Mapping[str, Any], count: int) -> PromptLogProbs:
    """What a report says of the given tokens: (log-prob, id, text) each; the first one has no log-prob."""
    chosen = np.array([entry[0] for entry in about["input_token_logprobs"][1:]], np.float32)
    places = about["input_top_logprobs"][1:] if count else [[]] * len(chosen)
    ids = np.array([[entry[1] for entry in place[:count]] for place in places], np.int64)
    best = np.array([[entry[0] for entry in place[:count]] for place in places], np.float32)
    shape = (len(chosen), count)
    return PromptLogProbs(log_probs=chosen, top_ids=ids.reshape(shape), top_log_probs=best.reshape(shape))


def _new(values: Sequence[Any], seen: int, total: int) -> Sequence[Any]:
    """Returns the values after the first `seen`, from a list of all `total` values or of the new ones only. SGLang's
    report of an abort repeats the last token if there is no new one."""
    first = seen if len(values) >= total else 0
    return values[first : first + total - seen]
