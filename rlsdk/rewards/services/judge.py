"""A model as judge: it rates every response, and its verdict is the reward.

Any server with the OpenAI chat API can serve the model (`vllm serve`, `sglang`, a hosted API). Training does not change
its weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, ValidationError

from rlsdk.interfaces import RewardSample, nearest
from rlsdk.interfaces.settings import JudgeSettings
from rlsdk.rewards.scores.routing import value_at
from rlsdk.rewards.services.http_client import HttpClient, RemoteError, RemoteOptions, check_url, shown
from rlsdk.rewards.services.messages import SentScore, describe
from rlsdk.system.printable import encodable

PATTERN = r"(?i)\b(?:score|rating|verdict)\b[*\s]*[:=][*\s]*([\w.+-]+)"
"""Default pattern: `Score: 7`, `**Verdict:** yes`; the group is the verdict."""
MAX_REPLY_CHARS = 20_000
"""Number of characters at the end of a reply that are searched for the verdict."""
_NEAR = 40
"""Number of characters beside a verdict that show whether it is a whole number."""
_CONTINUES = re.compile(
    r"\w|[.,'\u2019\u066b]\d|[\u00a0\u202f]\d|[-\u2010-\u2015]\d|\s*[/\u2044\u2215\u00d7^]\s*\d|\s+\d+\s*[/\u2044]\s*\d"
    r"|\s*%|\s+(?:out\s+)?of\s+\d",
    re.IGNORECASE,
)
"""What makes a number another one: digits, `.5`, `,5`, `-8`, `/10`, ` 1/2`, `%`, ` out of 10`."""
_BEGAN = re.compile(r"(?:\d[.,'\u2019\u066b_]?|\d[eE][+-]?|\d\s*[/\u2044\u2215\u00d7^]\s*|(?:^|[^\w)\]])[-\u2212])$")
"""What makes the rest of a number: `8.`, `8/`, a sign."""
_OUT_OF = re.compile(r"(?:\s*[/\u2044\u2215]\s*|\s+(?:out\s+)?of\s+)(\d+(?:\.\d+)?)(?!\w|[.,]\d)|\s*%", re.IGNORECASE)
_PLACE = re.compile(r"\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(JudgeSettings):
    """What a judge is asked, by whom, and the scores of its verdicts."""

    model: str
    """Name of the model on the server."""
    choices: Mapping[str, float] = field(default_factory=dict)
    """Verdict -> score, case-insensitive. Empty: the verdict is a number."""


class VerdictError(ValueError):
    """There is no verdict, or no question; the message gives the reason."""


def question(sample: RewardSample, options: JudgeOptions) -> str:
    """Returns the template with its placeholders filled in. Placeholders inside inserted text are not replaced.

    Raises:
        VerdictError: the sample lacks a field of the template.
    """
    own = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer}

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        value = own[name] if name in own else value_at(sample.row, name)
        if value is None:
            raise VerdictError(
                f"the judge's template asks for {{{name}}}, which this row does not have{nearest(name, sample.row)}"
            )
        try:
            return value if isinstance(value, str) else json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise VerdictError(f"the judge's template asks for {{{name}}}, which is not JSON here: {error}") from error

    return encodable(_PLACE.sub(fill, options.template))


def verdict(reply: str, options: JudgeOptions, *, is_cut: bool = False) -> float:
    """Parses the score from a reply.

    Args:
        reply: the judge's text.
        options: pattern, choices and range.
        is_cut: the reply ended at `max_tokens`, so a number at its end may be the beginning of another one.

    Raises:
        VerdictError: the pattern does not match, or only a part of a number or word; or the verdict is not one of the
            choices, or not a number in the range.
    """
    text = reply[-MAX_REPLY_CHARS:]
    matches = [match for match in re.finditer(options.pattern or PATTERN, text) if match[1] is not None]
    if not matches:
        raise VerdictError(f"the judge's reply has no verdict: it ends in {reply[-80:]!r}")
    match = matches[-1]
    word = match[1]
    before, after = _unmatched(match)
    if options.choices:
        scores = {name.casefold(): score for name, score in options.choices.items()}
        begun, continues = (f"{pair:_<2}".isalnum() for pair in (before[-1:] + word[:1], word[-1:] + after[:1]))
        if word.casefold() not in scores or begun or continues:
            whole = f"{before[-10:]}{word}{after[:10]}" if begun or continues else word
            raise VerdictError(f"the judge's verdict is {whole!r}; expected one of {list(options.choices)}")
        return scores[word.casefold()]
    score = _score(_number(word, before, after, options.highest), options)
    if is_cut and match.end(1) == len(text) and _may_continue(word, options.highest):
        raise VerdictError(f"the judge's reply was cut after {match[0]!r} by judge.max_tokens {options.max_tokens}")
    return score


def _may_continue(word: str, highest: float) -> bool:
    """Whether another digit makes another number of the range: `1` of `10`, `0.8` of `0.85`."""
    return not word.isdecimal() or float(f"{word}0") <= highest


def _unmatched(match: re.Match[str]) -> tuple[str, str]:
    """The text right before and after the verdict; empty where the pattern says what stands there."""
    before = match.string[max(0, match.start() - _NEAR) : match.start()] if match.start(1) == match.start() else ""
    after = match.string[match.end() : match.end() + _NEAR] if match.end(1) == match.end() else ""
    return before, after


def _number(word: str, before: str, after: str, highest: float) -> float:
    """The number of a verdict, if it is the whole number that the judge wrote.

    A denominator may follow if it is the highest number: `8/10`, `8 out of 10`.
    """
    after = after.lstrip("*")  # the end of bold text
    whole = _OUT_OF.match(after)
    if whole is not None and float(whole[1] or 100) == highest:
        after = ""
    if _BEGAN.search(before) or (not word.endswith(".") and _CONTINUES.match(after)):
        shown = f"{before[-10:]}{word}{after[:10]}".strip()
        raise VerdictError(
            f"the judge's verdict is {shown!r}, of which the pattern matches only {word!r}; expected a number"
        )
    try:
        if not word.isascii() or "_" in word:
            raise ValueError
        return float(word.rstrip("."))
    except ValueError:
        raise VerdictError(f"the judge's verdict is {word!r}; expected a number") from None


def _score(number: float, options: JudgeOptions) -> float:
    if not options.lowest <= number <= options.highest:
        raise VerdictError(f"the judge's verdict is {number:g}; expected {options.lowest:g} to {options.highest:g}")
    return (number - options.lowest) / (options.highest - options.lowest)


class _Reply(BaseModel):
    """The fields of a reply that are used; servers send more."""

    model_config = ConfigDict(extra="ignore")

    class Choice(BaseModel):
        class Message(BaseModel):
            content: str | None = None

        message: Message
        finish_reason: str | None = None

    choices: list[Choice]


class _Models(BaseModel):
    class Model(BaseModel):
        id: str

    data: list[Model]


class JudgeClient:
    """Client of a service with the OpenAI chat API; satisfies `rlsdk.rewards.services.remote.Client`."""

    def __init__(self, url: str, options: RemoteOptions, judge: JudgeOptions) -> None:
        """
        Args:
            url: base URL, up to and including `/v1`.
            options: settings of requests.
            judge: the question, and how to parse the verdict.

        Raises:
            ConfigError: the URL cannot be used (`check_url`).
        """
        self.name = check_url(url).rstrip("/")
        self._judge = judge
        self._http = HttpClient(options)

    async def score(self, samples: Sequence[RewardSample]) -> Sequence[SentScore]:
        """Asks about the samples one after another. Concurrent calls run concurrently."""
        return [await self._one(sample) for sample in samples]

    async def check(self) -> None:
        """Checks that the service has the model.

        Raises:
            RemoteError: it does not have the model, or does not answer.
        """
        url = f"{self.name}/models"
        data = await self._http.get(url)
        try:
            models = [model.id for model in _Models.model_validate_json(data).data]
        except ValidationError as error:
            raise RemoteError(f"{url} did not return a list of models: {describe(error)}: {shown(data)}") from error
        if self._judge.model not in models:
            wanted = self._judge.model
            raise RemoteError(f"{self.name} has no model {wanted!r}{nearest(wanted, models)}; it has {models[:8]}")

    async def close(self) -> None:
        await self._http.close()

    async def _one(self, sample: RewardSample) -> SentScore:
        try:
            text = question(sample, self._judge)
            reply, is_cut = await self._ask(text)
            return SentScore(score=verdict(reply, self._judge, is_cut=is_cut))
        except VerdictError as error:
            return SentScore(error=str(error))

    async def _ask(self, text: str) -> tuple[str, bool]:
        """Returns the reply, and whether it was cut."""
        url, judge = f"{self.name}/chat/completions", self._judge
        system = [] if judge.system_prompt is None else [{"role": "system", "content": judge.system_prompt}]
        body = {
            "model": judge.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
            "seed": judge.seed,
        }
        data = await self._http.post(url, json.dumps(body).encode())
        try:
            reply = _Reply.model_validate_json(data)
        except ValidationError as error:
            raise RemoteError(f"{url} did not return a completion: {describe(error)}: {shown(data)}") from error
        if not reply.choices or reply.choices[0].message.content is None:
            raise RemoteError(f"{url} answered a completion without text")
        return reply.choices[0].message.content, reply.choices[0].finish_reason == "length"
