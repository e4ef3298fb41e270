"""The policy's tokenizer, the tokens that end an answer, and the sampling parameters that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlsdk.config import ModelConfig, RolloutConfig, RunConfig
from rlsdk.data import AnswerEnds, PromptFormat
from rlsdk.interfaces import SamplingParams
from rlsdk.kit.model.hf import load_tokenizer, stop_token_ids
from rlsdk.trainer.inputs.prompt_formats import prompt_format


def load_run_tokenizer(model: ModelConfig) -> Any:
    """The policy's tokenizer."""
    return load_tokenizer(
        model.tokenizer or model.path or "",
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


def answer_ends(
    tokenizer: Any,
    form: PromptFormat,
    model_path: str | None,
    configured: Sequence[int | str] | None = None,
    *,
    revision: str | None = None,
) -> AnswerEnds:
    """The tokens that end an answer, in everything that is learned and in everything that is sampled.

    A learned answer ends as the chat template ends a turn; without a template, or where that ends turns with no token
    of its own, with the tokenizer's end-of-sequence token; and always with one at which responses stop.

    Args:
        tokenizer: of the model.
        form: of the prompts: whether the chat template is used.
        model_path: see `stop_token_ids`.
        configured: see `stop_token_ids`.
        revision: see `stop_token_ids`.

    Raises:
        ConfigError: as `stop_token_ids`.
    """
    turn_end = form.template(tokenizer).end if form.uses_chat_template(tokenizer) else None
    stops = stop_token_ids(tokenizer, model_path, configured, turn_end=turn_end, revision=revision)
    usual = (turn_end, tokenizer.eos_token_id, *stops)
    return AnswerEnds(learned=next(int(token) for token in usual if token in stops), stops=stops)


def run_ends(config: RunConfig, tokenizer: Any) -> AnswerEnds:
    """`answer_ends` of a run's policy."""
    rollout, model = config.rollout, config.model
    form = prompt_format(config)
    return answer_ends(tokenizer, form, model.path, rollout.stop_token_ids, revision=model.revision)


def sampling_params(rollout: RolloutConfig, ends: AnswerEnds) -> SamplingParams:
    """Sampling parameters of training."""
    return SamplingParams(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tuple(ends.stops),
        stop_strings=rollout.stop_strings,
    )
