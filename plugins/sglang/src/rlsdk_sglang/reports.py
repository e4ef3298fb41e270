"""Converts samples to SGLang's requests, and SGLang's reports to progress of samples. Tested: 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsdk.interfaces import FinishReason
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


def progress_of(report: Mapping[str, Any], seen: int) -> Progress:
    """New tokens of a report. A report contains only these, or all tokens if the server was started differently."""
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
    )


def _new(values: Sequence[Any], seen: int, total: int) -> Sequence[Any]:
    """Returns the values after the first `seen`, from a list of all `total` values or of the new ones only. SGLang's
    report of an abort repeats the last token if there is no new one."""
    first = seen if len(values) >= total else 0
    return values[first : first + total - seen]
