"""Adapts reward functions written for other libraries, which it recognises by the names of their parameters.

| library | signature | called with |
|---|---|---|
| TRL | `fn(prompts, completions, **columns) -> list of floats` | several samples; each column of the rows is a list |
| verl | `fn(data_source, solution_str, ground_truth, extra_info) -> float or {"score": float}` | one sample |

Sources: `reward_funcs` of TRL's GRPOTrainer; `custom_reward_function` of verl.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rlsdk.interfaces import ConfigError, RewardSample, nearest
from rlsdk.rewards.scores.outcomes import values_in_order


class Form(StrEnum):
    """The library for which a reward function was written."""

    OWN = "rlsdk"
    TRL = "TRL"
    VERL = "verl"


MARKS = {Form.TRL: "completions", Form.VERL: "solution_str"}
"""The parameter that identifies each form."""
AVAILABLE = {
    Form.TRL: frozenset({"prompts", "completions"}),
    Form.VERL: frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
}
"""Parameters of a form that are always available; further parameters of TRL functions are columns of the rows."""
BATCH_OF = "completions"
"""What TRL functions get several of, for messages."""
UNAVAILABLE = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""Parameters that only TRL's own trainer can pass."""


def form_of(parameters: Collection[str]) -> Form:
    """Returns the form of a function with parameters of these names."""
    return next((form for form, mark in MARKS.items() if mark in parameters), Form.OWN)


def parameters_of(signature: inspect.Signature) -> tuple[dict[str, bool], bool]:
    """Returns the name of each parameter -> whether it is required; and whether there is `**kwargs`."""
    every = signature.parameters.values()
    named = {p.name: p.default is p.empty for p in every if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return named, any(p.kind is p.VAR_KEYWORD for p in every)


def describe_form(form: Form, name: str) -> str:
    """Returns one line for users: the recognised signature, and how the function is called."""
    how = {
        Form.TRL: "called with prompts, completions and the rows' columns as lists; None counts as 0",
        Form.VERL: "called with data_source, solution_str, ground_truth and extra_info of the row",
    }
    return f"reward {name} has {form}'s signature; {how[form]}"


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself; of an async one, a function that awaits it, on an event loop of each call's own."""
    if not inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return asyncio.run(function(*args, **options))

    return call


def adapt(function: Callable[..., Any], options: Mapping[str, Any], label: str) -> Callable[..., Any]:
    """Returns a function that rlsdk can call: `function` itself, or a wrapper if it was written for another library.

    Args:
        function: the user's function.
        options: additional keyword arguments of its calls.
        label: name of the function in messages.

    Raises:
        ConfigError: it requires an argument that only the other library's trainer has, or does not accept an option.
    """
    try:
        named, takes_any = parameters_of(inspect.signature(function))
    except (TypeError, ValueError):
        return function  # a built-in function without a signature
    form = form_of(named)
    if form is Form.OWN:
        return function
    check_form(form, named, takes_any=takes_any, options=options, label=label)
    return _trl(function, None if takes_any else set(named)) if form is Form.TRL else _verl(function, named, takes_any)


def check_form(
    form: Form, parameters: Mapping[str, bool], *, takes_any: bool, options: Mapping[str, Any], label: str
) -> None:
    """Checks that rlsdk can pass all arguments that a function of another library requires.

    Args:
        form: form of the function.
        parameters: name -> whether it is required.
        takes_any: whether it has `**kwargs`.
        options: additional keyword arguments of its calls.
        label: name of the function in messages.

    Raises:
        ConfigError: a required argument is not available, or the function does not accept an option.
    """
    required = {name for name, is_required in parameters.items() if is_required}
    lacking = required & UNAVAILABLE if form is Form.TRL else required - AVAILABLE[form] - set(options)
    if lacking:
        raise ConfigError(f"{label} has {form}'s signature and requires {sorted(lacking)}, which rlsdk does not pass")
    for option in options:
        if option not in parameters and not takes_any:
            raise ConfigError(
                f"{label} has no option {option!r}{nearest(option, parameters)}; it has {list(parameters)}"
            )


def _trl(function: Callable[..., Any], takes: set[str] | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(samples: Sequence[RewardSample], **options: Any) -> Any:
        columns = dict.fromkeys(key for sample in samples for key in sample.row)
        given: dict[str, Any] = {name: [sample.row.get(name) for sample in samples] for name in columns}
        given |= options
        given["prompts"] = [_prompt(sample) for sample in samples]
        given["completions"] = [_completion(sample) for sample in samples]
        values = function(**{name: value for name, value in given.items() if takes is None or name in takes})
        values = values_in_order(values, len(samples), BATCH_OF)
        return [0.0 if value is None else value for value in values]

    call.batched = True  # type: ignore[attr-defined]  # the mark of a `BatchRewardFn`
    call.batch_of = BATCH_OF  # type: ignore[attr-defined]
    return call


def _prompt(sample: RewardSample) -> Any:
    prompt = sample.row.get("prompt")
    return sample.prompt if prompt is None else prompt


def _completion(sample: RewardSample) -> Any:
    """Returns a list with one message if the prompt is a list of messages, else the text."""
    is_chat = isinstance(sample.row.get("prompt"), list)
    return [{"role": "assistant", "content": sample.response}] if is_chat else sample.response


def _verl(function: Callable[..., Any], named: Collection[str], takes_any: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(sample: RewardSample, **options: Any) -> Any:
        row, nested = sample.row, sample.row.get("reward_model")
        truth = nested.get("ground_truth") if isinstance(nested, Mapping) else None
        given = {
            "data_source": row.get("data_source", ""),
            "solution_str": sample.response,
            "ground_truth": sample.answer if truth is None else truth,
            "extra_info": row.get("extra_info") or {},
            **options,
        }
        value = function(**{name: given[name] for name in given if takes_any or name in named})
        return value["score"] if isinstance(value, Mapping) and "score" in value else value

    return call
