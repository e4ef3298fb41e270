"""Checks of requests, and error messages for those that cannot be served."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlsdk.interfaces import ConfigError, GenerationRequest, SamplingParams
from rlsdk.interfaces.generation import TEMPERATURES

LEAST_TOP_P = 2.0**-126
"""Smallest `top_p` that is not 0 as a 32-bit number."""


def check_requests(
    requests: Sequence[GenerationRequest],
    *,
    max_model_tokens: int,
    vocabulary: int,
    scores_prompts: bool = False,
    adapters: Collection[int] | None = None,
) -> None:
    """Checks every request before the first is run.

    Args:
        requests: of one call.
        max_model_tokens, vocabulary: of the engine.
        scores_prompts: it claims `Capability.PROMPT_LOG_PROBS`.
        adapters: versions of the adapter that it keeps; None: it does not claim `Capability.ADAPTER_VERSIONS`.

    Raises:
        ConfigError: names the request, the field, its value and what was expected.
    """
    names = [request.request_id for request in requests]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two requests have the request_id {twice!r}; each needs one of its own")
    checked: set[int] = set()  # requests of one step share their parameters, which are checked once
    for request in requests:
        fault = _prompt_fault(request, max_model_tokens, vocabulary)
        if fault is None and id(request.sampling) not in checked:
            checked.add(id(request.sampling))
            fault = _sampling_fault(request.sampling)
        fault = fault or _room_fault(request, max_model_tokens) or _scores_fault(request, vocabulary, scores_prompts)
        fault = fault or _adapter_fault(request.adapter_version, adapters)
        if fault is not None:
            raise ConfigError(f"request {request.request_id!r}: {fault}")


def response_limit(request: GenerationRequest, max_model_tokens: int) -> int:
    """Most new tokens of each sample: `max_tokens`, or what the context length leaves."""
    room = max_model_tokens - len(request.prompt_ids)
    return min(request.sampling.max_tokens, room) - len(request.response_ids)


def _room_fault(request: GenerationRequest, max_model_tokens: int) -> str | None:
    if not request.response_ids or response_limit(request, max_model_tokens) >= 1:
        return None
    return (
        f"response_ids of {len(request.response_ids)} tokens behind a prompt of {len(request.prompt_ids)} leave no "
        f"room for one more: max_tokens is {request.sampling.max_tokens}, max_model_tokens {max_model_tokens}"
    )


def _scores_fault(request: GenerationRequest, vocabulary: int, scores_prompts: bool) -> str | None:
    count = request.prompt_log_probs
    if count is None:
        return None
    if not scores_prompts:
        return f"prompt_log_probs {count}; expected None, because this engine computes none"
    return None if 0 <= count <= vocabulary else f"prompt_log_probs {count}; expected 0 to {vocabulary}, or None"


def _adapter_fault(version: int | None, adapters: Collection[int] | None) -> str | None:
    if version is None or (adapters is not None and version in adapters):
        return None
    if adapters is None:
        return f"adapter_version {version}; expected None, because this engine serves the newest weights alone"
    return (
        f"adapter_version {version} is not kept; expected one of {sorted(adapters)}, or None for the newest "
        "(RolloutSpec.adapter_versions says how many are kept)"
    )


def _prompt_fault(request: GenerationRequest, max_model_tokens: int, vocabulary: int) -> str | None:
    ids = request.prompt_ids
    if not 1 <= len(ids) < max_model_tokens:
        return f"a prompt of {len(ids)} tokens; expected 1 to {max_model_tokens - 1} (max_model_tokens less one)"
    for name, tokens in (("prompt_ids", ids), ("response_ids", request.response_ids)):
        if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
            return f"{name} from {min(tokens)} to {max(tokens)}; the model knows 0 to {vocabulary - 1}"
    if request.first_sample < 0:
        return f"first_sample {request.first_sample}; expected 0 or more"
    return f"n {request.n}; expected 1 or more" if request.n < 1 else None


def _sampling_fault(sampling: SamplingParams) -> str | None:
    lowest, highest = TEMPERATURES
    is_greedy = sampling.temperature == 0
    expected = {
        "max_tokens": (sampling.max_tokens >= 1, "1 or more"),
        "temperature": (
            is_greedy or lowest <= sampling.temperature <= highest,
            f"0 (greedy) or more, from {lowest:g} to {highest:g}",
        ),
        "top_p": (LEAST_TOP_P <= sampling.top_p <= 1, "above 0, up to 1 (off)"),
        "top_k": (sampling.top_k >= 0, "0 (off) or more"),
        "min_p": (0 <= sampling.min_p <= 1, "0 (off) to 1"),
        "stop_strings": (all(sampling.stop_strings), "no empty string"),
    }
    for name, (fits, what) in expected.items():
        if not fits:
            return f"{name} {getattr(sampling, name)!r}; expected {what}"
    return None
