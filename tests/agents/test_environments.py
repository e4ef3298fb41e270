"""An environment is played to its end whatever it or the model does, and every sampled token is accounted for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from agent_cases import Scripted, called, prompt_of, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.agents.chats.chat_format import ChatFormat
from rlsdk.agents.environments.limits import Limits
from rlsdk.agents.environments.play import EnvironmentFailedError, EnvironmentRollouter
from rlsdk.agents.environments.tools import EnvironmentClass, cut_text, tool_names
from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError, Ended, Episode, Receipt, ToolUse
from rlsdk.rollouts.groups.begun import ToolResults
from rlsdk.trainer.inputs.environments import load_environment

TOKENIZER = tokenizer_of("json_in_tags")


class Guess:
    """A number is to be guessed."""

    def reset(self, secret: int = 5, seed: int = 0, **row: Any) -> str:
        self.secret, self.seed, self.row, self.asked = secret, seed, row, 0
        self.done, self.right, self.closed = False, False, 0
        return "Guess."

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: what it may be
        """
        self.asked += 1
        self.done = self.right = number == self.secret
        return "=" if self.right else "<" if self.secret < number else ">"

    def get_reward(self) -> float:
        return float(self.right)

    def close(self) -> None:
        self.closed += 1


class Odd(Guess):
    """Tools that do what tools should not."""

    made: ClassVar[list[Odd]] = []

    def reset(self, **row: Any) -> str:
        super().reset(**row)
        self.made.append(self)
        return ""

    def fail(self) -> str:
        """Fails."""
        raise RuntimeError("the disk is full")

    async def sleep(self, seconds: float) -> str:
        """Sleeps.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return "woken"

    def block(self, seconds: float) -> str:
        """Blocks its thread.

        Args:
            seconds: how long
        """
        time.sleep(seconds)
        return "unblocked"

    def talk(self, kind: Literal["long", "none", "json", "object"]) -> Any:
        """Talks.

        Args:
            kind: of the result
        """
        return {"long": "a" * 50 + "b" * 50, "none": None, "json": {"x": [1, "é"]}, "object": object()}[kind]

    def leave(self) -> str:
        """Ends the process, if it could."""
        raise SystemExit(1)


def play(
    environment: type,
    says: Any,
    *,
    limits: Limits | None = None,
    room: int = 100_000,
    row: dict[str, Any] | None = None,
) -> tuple[Episode, Scripted]:
    policy = Scripted(TOKENIZER, says, max_model_tokens=room)
    form = ChatFormat(TOKENIZER, stop_token_ids=[TOKENIZER.eos_token_id])
    rollout = EnvironmentRollouter(
        environment=EnvironmentClass.of(environment, "e.py:E"), form=form, limits=limits or Limits()
    )
    return asyncio.run(rollout(prompt_of(**(row or {})), policy)), policy


def guess(number: object) -> str:
    return called("guess", f'{{"number": {number}}}')


def conversation(episode: Episode) -> str:
    return str(TOKENIZER.decode(np.concatenate([span.token_ids for span in episode.rows[-1].spans])))


def test_a_game_is_played_by_calls_and_scored_by_its_environment() -> None:
    episode, policy = play(Guess, [guess(8), guess(4), guess(5), "never said"], row={"secret": 5, "level": 2})
    assert (episode.ended, episode.reward, len(episode.rows)) == (Ended.AGENT, 1.0, 1)
    assert [(use.turn, use.name, use.arguments, use.result, use.failed) for use in episode.tools] == [
        (0, "guess", {"number": 8}, "<", False), (1, "guess", {"number": 4}, ">", False),
        (2, "guess", {"number": 5}, "=", False),
    ]  # fmt: skip
    assert episode.info["turns"] == episode.info["tool_calls"] == 3
    assert episode.info["ended_agent"] == 1
    assert episode.info["ended_turns"] == episode.info["tool_errors"] == 0
    spans = episode.rows[0].spans
    assert [span.sampled for span in spans] == [False, True, False, True, False, True]
    # Each turn was asked for with exactly the ids that stand before it in the row.
    for at, ids in enumerate(policy.calls):
        assert np.concatenate([span.token_ids for span in spans[: 2 * at + 1]]).tolist() == ids
    sampled = sum(len(span) for span in spans if span.sampled)
    assert episode.receipt is not None
    assert (episode.receipt.sampled, episode.receipt.trained, episode.receipt.not_trained) == (sampled, sampled, {})
    text = conversation(episode)
    assert '"name": "guess"' in text.partition("<|im_end|>")[0], "the model is told of its tools"
    assert "go\nGuess.<|im_end|>" in text, "what reset returned is behind the prompt"
    assert "<tool_response>\n<\n</tool_response>" in text


def test_reset_gets_the_row_and_the_groups_seed() -> None:
    seen: list[Guess] = []

    class Kept(Guess):
        def reset(self, secret: int = 5, seed: int = 0, **row: Any) -> str:
            seen.append(self)
            return super().reset(secret, seed, **row)

    play(Kept, ["done"], row={"secret": 7, "level": 2})
    assert (seen[0].secret, seen[0].seed, seen[0].row, seen[0].closed) == (7, 5, {"level": 2}, 1)


@pytest.mark.parametrize(
    ("says", "told", "errors", "failures"),
    [
        (guess('"x"'), "argument 'number' is 'x'; expected integer", 1, 0),
        (guess("true"), "argument 'number' is True; expected integer", 1, 0),
        (called("guess", "{}"), "missing argument 'number'; expected ['number']", 1, 0),
        (called("guess", '{"number": 8, "nmber": 2}'), "unknown argument 'nmber'; did you mean 'number'?", 1, 0),
        (called("gues", '{"number": 8}'), "no tool 'gues'; did you mean 'guess'?", 1, 0),
        (called("reset", "{}"), "no tool 'reset'", 1, 0),
        (called("_worker", "{}"), "no tool '_worker'", 1, 0),
        ('<tool_call>{"name": "guess", "numb</tool_call>', "the call could not be read", 1, 0),
        (called("fail", "{}"), "fail failed: RuntimeError: the disk is full", 0, 1),
        (called("leave", "{}"), "leave failed: RuntimeError: SystemExit: 1", 0, 1),
        (called("talk", '{"kind": "object"}'), "a tool returned object; expected text, or what JSON has", 0, 1),
        (called("talk", '{"kind": "odd"}'), "expected one of ['long', 'none', 'json', 'object']", 1, 0),
        (called("talk", '{"kind": "json"}'), '{"x": [1, "é"]}', 0, 0),
        (called("talk", '{"kind": "none"}'), "<tool_response>\n\n</tool_response>", 0, 0),
        (called("sleep", '{"seconds": 60}'), "sleep did not answer within 1 s", 0, 1),
        (called("sleep", '{"seconds": 0}'), "woken", 0, 0),
    ],
)  # fmt: skip
def test_what_a_tool_says_of_a_call(says: str, told: str, errors: int, failures: int) -> None:
    episode, _ = play(Odd, [says, guess(5)], limits=Limits(tool_s=1))
    assert told in conversation(episode)
    assert (episode.info["tool_errors"], episode.info["tool_failures"]) == (errors, failures)
    assert (episode.ended, episode.reward) == (Ended.AGENT, 1.0), "the episode goes on"
    assert "Traceback" not in conversation(episode)
    assert Odd.made[-1].closed == 1


def test_results_of_tools_without_state_come_from_the_journal() -> None:
    class Library:
        """Looks up; counts what it was asked."""

        stateless = ("look",)
        looked = 0

        def reset(self) -> None:
            self.notes: list[str] = []

        def look(self, word: str) -> str:
            """Looks a word up.

            Args:
                word: which
            """
            type(self).looked += 1
            if word == "none":
                raise KeyError(word)
            return word * 40

        def note(self, text: str) -> str:
            """Notes.

            Args:
                text: what
            """
            self.notes.append(text)
            return str(len(self.notes))

        def get_reward(self) -> float:
            return float(len(self.notes))

    says = [called("look", '{"word": "a"}'), called("note", '{"text": "a"}'), called("look", '{"word": "none"}'),
            called("look", '{"word": "abc"}') + called("note", '{"text": "b"}'), "done"]  # fmt: skip
    kept: dict[int, ToolUse] = {}

    def played(begun: Mapping[int, ToolUse], says: Sequence[str]) -> Episode:
        tokenizer = tokenizer_of("json_in_tags")
        policy = Scripted(tokenizer, says)
        policy.tools = ToolResults(begun=begun, record=kept.__setitem__)
        loop = EnvironmentRollouter(
            environment=EnvironmentClass.of(Library, "l.py:Library"), form=ChatFormat(tokenizer),
            limits=Limits(max_tool_chars=60),
        )  # fmt: skip
        return asyncio.run(loop(prompt_of(), policy))

    whole = played({}, says)
    assert (Library.looked, sorted(kept), whole.reward, whole.info["results_cut"]) == (3, [0, 2, 3], 2.0, 1.0)
    begun = {call: kept.pop(call) for call in (0, 2)}
    kept.clear()
    again = played(begun, says)
    assert (Library.looked, sorted(kept)) == (4, [3]), "only what the journal lacks is run"
    assert [row.digest for row in again.rows] == [row.digest for row in whole.rows]
    assert (again.info, again.reward) == (whole.info, whole.reward)
    assert [use.result for use in again.tools] == [use.result for use in whole.tools]
    other = played(begun, [called("look", '{"word": "b"}'), "done"])
    assert other.tools[0].result == "b" * 40, "the result of other arguments"


def test_a_tool_that_blocks_delays_no_other_episode_and_is_given_up() -> None:
    """The blocked object's later calls wait for it; its siblings do not."""
    policy = lambda: Scripted(TOKENIZER, [called("block", '{"seconds": 2}'), *[guess(5)] * 30])  # noqa: E731
    quick = lambda: Scripted(TOKENIZER, [guess(5)])  # noqa: E731
    form = ChatFormat(TOKENIZER, stop_token_ids=[TOKENIZER.eos_token_id])
    rollout = EnvironmentRollouter(
        environment=EnvironmentClass.of(Odd, "e"), form=form, limits=Limits(tool_s=0.3, max_tool_failures=99)
    )

    async def both() -> tuple[list[float], Episode]:
        done: list[float] = []
        begin = time.monotonic()

        async def sibling() -> None:
            await rollout(prompt_of(), quick())
            done.append(time.monotonic() - begin)

        blocked, *_ = await asyncio.gather(rollout(prompt_of(), policy()), *(sibling() for _ in range(8)))
        return done, blocked

    done, blocked = asyncio.run(both())
    assert max(done) < 2, "before the blocked call ends"
    assert blocked.info["tool_failures"] >= 1
    names = [thread.name for thread in threading.enumerate()]
    end = time.monotonic() + 5
    while "rlsdk-environment" in names and time.monotonic() < end:
        time.sleep(0.02)
        names = [thread.name for thread in threading.enumerate()]
    assert "rlsdk-environment" not in names, "no thread is left"


@pytest.mark.parametrize(
    ("limits", "says", "room", "ended", "turns"),
    [
        (Limits(max_turns=2), [guess(1)] * 9, 100_000, Ended.TURNS, 2),
        (Limits(max_episode_tokens=150), [guess(1)] * 9, 100_000, Ended.TOKENS, 3),
        (Limits(), [guess(1)] * 99, 4000, Ended.CONTEXT, None),
        (Limits(max_tool_failures=2), [called("fail", "{}")] * 9, 100_000, Ended.TOOL_ERROR, 2),
        (Limits(agent_s=2), [guess(1), called("sleep", '{"seconds": 9}')], 100_000, Ended.TIME, 2),
        (Limits(), ["I give up."], 100_000, Ended.AGENT, 1),
    ],
)
def test_a_limit_ends_the_episode_which_is_scored(
    limits: Limits, says: list[str], room: int, ended: Ended, turns: int | None
) -> None:
    episode, _ = play(Odd, says, limits=limits, room=room)
    assert episode.ended is ended
    assert turns is None or episode.info["turns"] == turns
    assert episode.reward == 0.0
    assert episode.truncated is (ended is not Ended.AGENT)
    assert episode.rows[0].num_tokens <= room
    assert episode.rows[0].spans[-1].sampled, "no result at the end that no turn came after"
    assert Odd.made[-1].closed == 1


class Broken(Guess):
    where: ClassVar[str] = ""

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).where:

            def fail(*args: Any, **kwargs: Any) -> None:
                raise KeyError("no such thing")

            return fail
        return super().__getattribute__(name)


@pytest.mark.parametrize("hook", ["reset", "get_reward"])
def test_a_hook_that_raises_costs_the_sample(hook: str) -> None:
    class Fails(Broken):
        where = hook

    with pytest.raises(EnvironmentFailedError, match=rf"'e.py:E': {hook} failed: KeyError: 'no such thing'") as error:
        play(Fails, [guess(5)])
    assert error.value.kind == "environment"


def test_a_row_without_what_reset_needs_is_named() -> None:
    class Needs(Guess):
        def reset(self, secert: int) -> str:  # type: ignore[override]
            return str(secert)

    with pytest.raises(EnvironmentFailedError, match=r"needs 'secert'.*did you mean 'secret'\?; it has \['secret'\]"):
        play(Needs, [guess(5)], row={"secret": 3})


@pytest.mark.parametrize(("value", "reward", "parts"), [
    (None, None, {}), (True, 1.0, {}), ({"a": 0.5, "b": 1}, 1.5, {"reward/a": 0.5, "reward/b": 1.0}),
])  # fmt: skip
def test_scores_are_numbers_parts_or_nothing(value: Any, reward: float | None, parts: dict[str, float]) -> None:
    class Scores(Guess):
        def get_reward(self) -> Any:
            return value

    episode, _ = play(Scores, ["x"])
    assert episode.reward == reward
    assert {name: number for name, number in episode.info.items() if name.startswith("reward/")} == parts


def test_a_score_that_is_no_number_costs_the_sample() -> None:
    class Scores(Guess):
        def get_reward(self) -> Any:
            return float("nan")

    with pytest.raises(EnvironmentFailedError, match="get_reward is nan; expected a finite number"):
        play(Scores, ["x"])


def test_turn_rewards_stand_on_the_last_token_of_their_turns() -> None:
    class Turns(Guess):
        def turn_reward(self) -> float:
            return self.asked / 4

    episode, _ = play(Turns, [guess(1), guess(2), guess(5)])
    assert episode.token_rewards is not None
    ends = np.cumsum([len(span) for span in episode.rows[0].spans[1:]]) - 1
    assert episode.token_rewards[ends[::2]].tolist() == [0.25, 0.5, 0.75]
    assert np.count_nonzero(episode.token_rewards) == 3


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([guess(1), guess(5), "<tool_call>", "no call", guess(2) + guess(3), called("x", "{}")]),
             min_size=1, max_size=6),
    st.integers(600, 1500), st.integers(20, 400), st.booleans(),
)  # fmt: skip
def test_every_sampled_token_is_trained_once_or_not_with_the_reason(
    says: list[str], room: int, most: int, renders_again: bool
) -> None:
    class Rewrites(ChatFormat):
        """A template that rewrites the past at every other result."""

        def extend(self, ids: Any, messages: Any, new: Any, tools: Any) -> Any:
            return None if renders_again and len(messages) % 4 == 2 else super().extend(ids, messages, new, tools)

    policy = Scripted(TOKENIZER, [*says, "end"], max_model_tokens=room)
    form = Rewrites(TOKENIZER, stop_token_ids=[TOKENIZER.eos_token_id])
    rollout = EnvironmentRollouter(
        environment=EnvironmentClass.of(Guess, "e"), form=form, limits=Limits(max_episode_tokens=most)
    )
    episode = asyncio.run(rollout(prompt_of(), policy))
    receipt = episode.receipt
    assert receipt is not None
    sampled = [span for row in episode.rows for span in row.spans if span.sampled]
    assert len(sampled) == len(policy.calls), "each turn is sampled in one row"
    assert sum(map(len, sampled)) == receipt.trained == receipt.sampled <= most
    assert len(receipt.digests) == len(episode.rows) == episode.info["rows"]
    assert receipt == Receipt(
        sampled=receipt.sampled, trained=receipt.trained, digests=receipt.digests, rendered_again=receipt.rendered_again
    )


def test_a_class_that_is_no_environment_is_refused_by_name() -> None:
    class NoHint:
        def reset(self) -> None: ...

        def go(self, where) -> str:  # type: ignore[no-untyped-def]
            """Goes.

            Args:
                where: to
            """
            return "x"

    class NoDocstring:
        def reset(self) -> None: ...

        def go(self, where: str) -> str:
            return where

    class Rest:
        def rest(self) -> None: ...

    for wrong, message in (
        (NoHint, r"tool `go` cannot be described to a model: .*where.*type hint"),
        (NoDocstring, r"tool `go` cannot be described to a model: .*docstring"),
        (Rest, r"has no method `reset`; did you mean 'rest'\?"),
        (Guess(), r"expected a class: one object is made for each sample"),
    ):
        with pytest.raises(ConfigError, match=message):
            EnvironmentClass.of(wrong, "e.py:E")
    assert tool_names(Odd) == ["guess", "fail", "sleep", "block", "talk", "leave"]


@given(st.text(max_size=200), st.integers(1, 120))
def test_a_long_result_keeps_its_beginning_and_end(text: str, most: int) -> None:
    cut = cut_text(text, most)
    if len(text) <= most:
        assert cut == text
        return
    begin, _, rest = cut.partition("\n[... ")
    end = rest.partition(" characters left out ...]\n")[2]
    assert text.startswith(begin) or "\n[... " in text
    assert text.endswith(end) or "characters left out" in text
    assert f"{len(text) - most} characters left out" in cut


def test_an_environment_of_a_plugin_that_is_not_there_is_named_with_its_field() -> None:
    config = RunConfig().model_copy(deep=True)
    rollout = config.rollout.model_copy(update={"environment": "mpc:server"})
    with pytest.raises(ConfigError, match=r"rollout.environment 'mpc:server': environment 'mpc' is not installed"):
        load_environment(config.model_copy(update={"rollout": rollout}))
