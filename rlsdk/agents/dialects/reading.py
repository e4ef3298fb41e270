"""Fields of requests, checked by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from rlsdk.agents.sessions.requests import Refusal
from rlsdk.interfaces.errors import nearest

SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
                      "repetition_penalty", "logit_bias", "reasoning_effort", "verbosity", "parallel_tool_calls",
                      "reasoning", "thinking"})  # fmt: skip
"""Settings of sampling, in any dialect: the run's own are used, and these are counted."""
UNUSED = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                    "prompt_cache_retention", "truncation", "include", "background", "betas"})  # fmt: skip
"""Fields without influence on an answer."""


def refuse(param: str, value: object, expected: str, *, code: str = "invalid_value") -> NoReturn:
    """Raises the `Refusal` of a field."""
    shown = json.dumps(value, default=str, ensure_ascii=False)[:120]
    raise Refusal(f"{param}: {shown}: expected {expected}", code=code, param=param)


def check_fields(body: Mapping[str, Any], known: Collection[str], lenient: Collection[str]) -> None:
    """Refuses a field that has a value and is not known."""
    for name, value in body.items():
        if value is None or name in known or name in SAMPLING or name in UNUSED or name in lenient:
            continue
        raise Refusal(
            f"{name}: this gateway does not know the field{nearest(name, known)}; to ignore it, add it to "
            "gateway.lenient",
            code="unknown_parameter", param=name,
        )  # fmt: skip


def overridden(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the settings of sampling in a request."""
    return tuple(sorted(name for name in body if name in SAMPLING and body[name] is not None))


def positive(body: Mapping[str, Any], name: str, most: int | None = None) -> int | None:
    """A positive integer; None: not given."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        refuse(name, value, "a positive integer" + ("" if most is None else f", at most {most}"))
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A boolean; False: not given."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(name, value, "true or false")
    return bool(value)


def texts(body: Mapping[str, Any], name: str, most: int = 16) -> tuple[str, ...]:
    """A text or a list of texts."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or len(found) > most or not all(isinstance(text, str) and text for text in found):
        refuse(name, value, f"a text, or a list of at most {most} texts")
    return tuple(found)


def content(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message: a text, None, or parts of text; anything else is refused."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        refuse(where, value, "a text, or a list of parts of text")
    found = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            refuse(f"{where}.{at}", part, f"a part of type {' or '.join(kinds)}; only text can be trained on")
        found.append(part["text"])
    return "".join(found)


def arguments(value: Any, where: str) -> dict[str, Any]:
    """The arguments of a call, from the JSON text of an object."""
    try:
        if isinstance(found := json.loads(value or "{}"), dict):
            return found
    except (TypeError, ValueError, RecursionError):
        pass
    refuse(where, value, "the JSON text of an object")


def objects(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects; empty: not given."""
    value = body.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, Mapping) for item in value)):
        refuse(name, value, "a list of objects")
    return value or []


def tool(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool as chat templates take it."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"{where}.name", name, "a name")
    described: dict[str, Any] = {"name": name}
    if function.get("description") is not None:
        described["description"] = function["description"]
    described["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": described}


def reads_calls(body: Mapping[str, Any]) -> bool:
    """Whether the model's calls are looked for. `required` and a named tool count as `auto`: forcing a call would
    change the distribution that is sampled."""
    choice = body.get("tool_choice")
    if choice is None or isinstance(choice, Mapping) or choice in ("auto", "required", "any"):
        return True
    if choice == "none":
        return False
    refuse("tool_choice", choice, "none, auto, required, or a tool")
