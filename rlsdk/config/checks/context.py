"""Context length of models, and runs that exceed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsdk.config.derived.roles import Role
from rlsdk.config.problem import Problem
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import RolloutSpec
from rlsdk.interfaces.spelling import Setting, spell

_LENGTHS = ("max_position_embeddings", "n_positions")
_STRETCHED = ("linear", "dynamic", "yarn")
"""Kinds of rotary scaling that multiply the length by their factor; for others (llama3, longrope) the length includes
it."""


def context_tokens(fields: Mapping[str, Any]) -> int | None:
    """Context length of a model by its `config.json`, including scaling of rotary positions; None if the file does not
    say."""
    for part in (fields, fields.get("text_config")):
        found = _of_text_model(part) if isinstance(part, Mapping) else None
        if found is not None:
            return found
    return None


def _of_text_model(fields: Mapping[str, Any]) -> int | None:
    length = next((fields[name] for name in _LENGTHS if _is_length(fields.get(name))), None)
    if length is None:
        return None
    return max(
        int(length), *(_stretched(int(length), fields.get(name)) for name in ("rope_scaling", "rope_parameters"))
    )


def _stretched(length: int, scaling: Any) -> int:
    """Length after scaling of rotary positions; 0 without scaling."""
    if not isinstance(scaling, Mapping):
        return 0
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind is None:  # one scaling per kind of layer
        return max((_stretched(length, part) for part in scaling.values()), default=0)
    if kind not in _STRETCHED or isinstance(factor, bool) or not isinstance(factor, int | float):
        return 0
    before = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((before if isinstance(before, int) else length) * factor)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def fitted_lengths(config: RunConfig, context: int | None) -> tuple[RunConfig, Sequence[str]]:
    """The configuration with default limits of tokens lowered to a model's context length, and a line about it.

    A limit that was set to another value is never changed: what does not fit then is left to `context_problems`.

    Args:
        config: the run.
        context: tokens that the policy has positions for; None: unknown.
    """
    rollout, prompt, response = config.rollout, config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if context is None or config.max_model_tokens <= context or rollout.max_model_tokens is not None:
        return config, ()
    usual_prompt = prompt == type(config.data).model_fields["max_prompt_tokens"].default
    usual_response = response == type(rollout).model_fields["max_response_tokens"].default
    if usual_prompt and usual_response:
        prompt, response = context // 2, context - context // 2
    elif usual_prompt:
        prompt = context - response
    elif usual_response:
        response = context - prompt
    if min(prompt, response) < 1 or prompt + response > context:
        return config, ()
    lowered = {
        "data": config.data.model_copy(update={"max_prompt_tokens": prompt}),
        "rollout": rollout.model_copy(update={"max_response_tokens": response}),
    }
    said = (
        f"data.max_prompt_tokens {prompt} and rollout.max_response_tokens {response}: the model has {context} positions"
    )
    return config.model_copy(update=lowered), [said]


def context_problems(config: RunConfig, role: Role, fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of rows longer than the context length of a role's model: its outputs there are noise, or an engine
    fails.

    Args:
        config: the run.
        role: reads or generates the rows.
        fields: of its model's `config.json`.
    """
    # A rollout engine serves the actor's model, which is checked once; a judge reads questions of its own.
    context = None if role.is_sampling else context_tokens(fields)
    needed = role.spec.max_model_tokens if isinstance(role.spec, RolloutSpec) else config.max_model_tokens
    if context is None or needed <= context:
        return
    if config.max_model_tokens <= context:
        yield Problem(
            role.fields["path"],
            f"{role.model.path!r} has positions for {context} tokens, and its rollout engine needs {needed}: rows, and "
            "one token more; shorten them (rollout.max_response_tokens), or let a train engine read them",
        )
        return
    rollout, prompt = config.rollout, config.data.max_prompt_tokens
    if rollout.max_model_tokens is not None:
        field, what = "rollout.max_model_tokens", f"{rollout.max_model_tokens}"
        fix = f"`{Setting(field, context)}`"
    else:
        field = "rollout.max_response_tokens"
        what = f"{rollout.max_response_tokens}: with data.max_prompt_tokens {prompt} that is {config.max_model_tokens}"
        room = context - prompt
        fix = (
            f"`{Setting(field, room)}`"
            if room >= 1
            else f"`{spell(Setting('data.max_prompt_tokens', context // 2), Setting(field, context - context // 2))}`"
        )
    yield Problem(
        field,
        f"{what} tokens, more than the {context} that the model of role {role.name!r} ({role.fields['path']} "
        f"{role.model.path!r}) has positions for; at most {fix}",
    )
