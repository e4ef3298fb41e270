"""Sessions without a server: histories, rows, seeds, answers that were lost, the account of tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_sampler import END, Script, form_of

from rlsdk.agents.sessions.history import as_sent, chain
from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.agents.sessions.requests import Answer, Ask, Refusal
from rlsdk.agents.sessions.row_tree import RowTree, TurnNode
from rlsdk.agents.sessions.rows import rows_of
from rlsdk.agents.sessions.session import Session
from rlsdk.interfaces import AssistantMessage, Ended, Episode, FinishReason, Span, ToolCall, Trajectory, VersionRun

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b":2,  "a": 40}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sent(answer: Answer, at: int = 0) -> dict[str, Any]:
    """A turn as a client sends it back, arguments read."""
    message = as_sent(answer.choices[at].message)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


class Player:
    """An agent of one session."""

    def __init__(self, texts: Sequence[str], limits: EpisodeLimits | None = None, **script: Any) -> None:
        self.script = Script(texts, **script)
        self.limits = limits or EpisodeLimits()
        self.session = Session(form_of(), self.script, self.limits)
        self.count = 0

    def ask(self, messages: Sequence[Any], *, digest: bytes | None = None, retry: bool = False, **ask: Any) -> Any:
        self.count += 1
        key = digest or str(self.count).encode()
        return self.session.request(Ask(messages=tuple(messages), **ask), key, is_retry=retry)

    async def say(self, messages: Sequence[Any], **ask: Any) -> Answer:
        answer: Answer = await self.ask(messages, **ask).answer
        return answer

    def episode(self) -> Episode:
        rows = rows_of(self.session.tree, self.limits, overlapped=self.session.overlapped)
        sampled = sum(len(node.span) for node in self.session.tree.nodes)
        receipt = rows.receipt(sampled, self.session.rendered_again, self.session.counts)
        return Episode(rows=rows.rows, chains=rows.chains, scales=rows.scales, receipt=receipt)


def play(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 20))


def texts(episode: Episode, *, sampled: bool = True) -> list[list[str]]:
    tokenizer = Script([]).tokenizer
    return [[tokenizer.decode(span.token_ids) for span in row.spans if span.sampled is sampled] for row in episode.rows]


def test_a_tool_turn_is_continued_by_ids_whatever_the_client_makes_of_it() -> None:
    player = Player([f"Let me see.\n\n{CALL}", "42"])

    async def work() -> None:
        first = await player.say([user("40 + 2?")], tools=(ADD,))
        turn = sent(first)
        (call,) = turn["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"a": 40, "b": 2}}
        assert turn["content"] == "Let me see.\n\n"
        turn["tool_calls"] = [
            {**call, "function": {"name": "add", "arguments": dict(sorted({"b": 2, "a": 40}.items()))}}
        ]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        second = await player.say([user("40 + 2?"), turn, result], tools=(ADD,))
        assert second.choices[0].message.content == "42"
        assert [choice.finish_reason for choice in (*first.choices, *second.choices)] == ["tool_calls", "stop"]
        assert [vars(use) for use in player.session.tools] == [
            {"turn": 0, "name": "add", "arguments": {"a": 40, "b": 2}, "result": "42", "failed": False, "seconds": None}
        ]

    play(work)
    episode = player.episode()
    assert texts(episode) == [[f"Let me see.\n\n{CALL}{END}", f"42{END}"]]
    assert player.session.counts["continued"] == 1
    (before, _, _), (after, _, _) = player.script.asked
    assert after[: len(before)] == before
    assert [place for _, _, place in player.script.asked] == [(0,), (1,)]
    assert texts(episode, sampled=False)[0][1] == (
        "\n<|im_start|>user<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_history_that_was_rewritten_begins_a_row() -> None:
    player = Player(["one", "two", "three", "four"])

    async def work() -> None:
        one = sent(
            await player.say(
                [
                    user("a"),
                ]
            )
        )
        two = sent(await player.say([user("a"), one, user("b")]))
        await player.say([user("a"), {**one, "content": "ONE"}, user("b"), two, user("c")])
        await player.say([user("a"), user("summary")])
        await player.say([user("other")])

    play(work)
    episode = player.episode()
    assert texts(episode) == [[f"one{END}", f"two{END}"], [f"three{END}"], [f"four{END}"], [f"four{END}"]]
    assert player.session.rendered_again == {"edited": 1, "compacted": 1, "no_match": 1}
    assert episode.receipt is not None
    assert episode.receipt.trained == episode.receipt.sampled


def test_a_fork_samples_the_shared_turn_once() -> None:
    player = Player(["one", "two", "three"])

    async def work() -> None:
        one = sent(await player.say([user("a")]))
        await player.say([user("a"), one, user("b")])
        await player.say([user("a"), one, user("c")])

    play(work)
    episode = player.episode()
    assert texts(episode) == [[f"one{END}", f"two{END}"], [f"three{END}"]]
    assert f"one{END}" in texts(episode, sampled=False)[1]
    assert episode.chains == ()
    assert [place for _, _, place in player.script.asked] == [(0,), (1,), (1,)]


def test_a_lost_answer_is_delivered_again_and_is_not_sampled_again() -> None:
    player = Player(["one", "two"])

    async def work() -> None:
        lost = player.ask([user("a")], digest=b"x")
        lost.lose()
        first = await lost.answer
        again = await player.ask([user("a")], digest=b"x").answer
        assert (again.id, again.choices[0].message) == (first.id, first.choices[0].message)
        assert len(player.script.asked) == 1
        # Said so by the client, although it was delivered.
        assert (await player.ask([user("a")], digest=b"x", retry=True).answer).id == first.id
        # Asked again after it was delivered: another draw.
        other = await player.ask([user("a")], digest=b"x").answer
        assert other.choices[0].message.content == "two"
        assert other.id != first.id
        await player.say([user("a"), sent(other), user("b")])

    play(work)
    assert player.session.counts["delivered_again"] == 2
    first, second, third = (place for _, _, place in player.script.asked)
    assert (first, second[0], second[2], third) == ((0,), 0, 1, (1,))
    receipt = player.episode().receipt
    assert receipt is not None
    assert receipt.not_trained == {"abandoned": len(f"one{END}") - len(END) + 1}
    assert receipt.sampled == receipt.trained + 4


def test_an_answer_that_nobody_got_is_not_trained() -> None:
    player = Player(["one", "two"])

    async def work() -> None:
        pending = player.ask([user("a")])
        pending.lose()
        await pending.answer
        await player.say([user("b")])

    play(work)
    assert texts(player.episode()) == [[f"two{END}"]]


def test_calls_at_once_draw_alike_in_any_order() -> None:
    async def places(order: Sequence[str]) -> dict[tuple[int, ...], list[Any]]:
        player = Player(["x"], gate=asyncio.Event())
        waiting = [player.ask([user(text)]) for text in order]
        await asyncio.sleep(0)
        assert player.script.gate is not None
        player.script.gate.set()
        await asyncio.gather(*(one.answer for one in waiting))
        assert player.session.overlapped
        assert len(set(player.episode().chains)) == len({*order}) if len({*order}) == len(order) else True
        found: dict[tuple[int, ...], list[Any]] = {}
        for ids, _, place in player.script.asked:
            found.setdefault(tuple(ids), []).append(place)
        return found

    one = asyncio.run(places(["a", "b", "b", "c"]))
    assert one == asyncio.run(places(["c", "b", "a", "b"]))
    assert sorted(map(len, one.values())) == [1, 1, 2]
    assert all(len(set(found)) == len(found) for found in one.values())


def test_several_choices_are_siblings() -> None:
    player = Player(["one", "two", "three", "four"])

    async def work() -> None:
        answer = await player.say([user("a")], num_choices=3)
        assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
        await player.say([user("a"), sent(answer, 1), user("b")])

    play(work)
    assert texts(player.episode()) == [[f"one{END}"], [f"two{END}", f"four{END}"], [f"three{END}"]]
    assert len({place for _, _, place in player.script.asked}) == 4


def test_calls_without_tools_help_an_agent_with_tools() -> None:
    def played(**limits: Any) -> Episode:
        player = Player(["plan", "title"], EpisodeLimits(**limits))

        async def work() -> None:
            await player.say([user("a")], tools=(ADD,))
            await player.say([user("name this chat")])

        play(work)
        return player.episode()

    one, both = played(), played(train_roles=("agent", "auxiliary"))
    assert texts(one) == [[f"plan{END}"]]
    assert one.receipt is not None
    assert one.receipt.not_trained == {"auxiliary": len("title") + 1}
    assert texts(both) == [[f"plan{END}"], [f"title{END}"]]


def test_rows_over_the_limit_are_drawn_and_weigh_more() -> None:
    player = Player([f"row {at}" for at in range(5)], EpisodeLimits(max_rows=2))

    async def work() -> None:
        for at in range(5):
            await player.say([user(f"other {at}")])

    play(work)
    episode = player.episode()
    assert (len(episode.rows), episode.scales) == (2, (2.5, 2.5))
    assert episode.receipt is not None
    assert episode.receipt.not_trained == {"over_limit": 3 * (len("row 0") + 1)}
    assert texts(player.episode()) == texts(episode)


@pytest.mark.parametrize(
    ("limits", "script", "ended", "code"),
    [
        ({"max_turns": 1}, {}, Ended.TURNS, "turn_limit"),
        ({"max_episode_tokens": 4}, {}, Ended.TOKENS, "token_limit"),
        ({}, {"max_model_tokens": 40}, Ended.CONTEXT, "context_length_exceeded"),
    ],
)
def test_limits_refuse_and_end_the_episode(limits: Any, script: Any, ended: Ended, code: str) -> None:
    player = Player(["one"], EpisodeLimits(**limits), **script)

    async def work() -> None:
        one = sent(await player.say([user("a")]))
        with pytest.raises(Refusal) as refused:
            await player.say([user("a"), one, user("b" * 20)])
        assert refused.value.status == 400
        assert refused.value.body["code"] == code

    play(work)
    assert player.session.ended is ended
    assert texts(player.episode()) == [[f"one{END}"]]


def test_stop_ends_an_answer_and_is_not_in_its_text() -> None:
    player = Player(["think Observation: 4", "x"])

    async def work() -> None:
        answer = await player.say([user("a")], stop=("Observation:",))
        assert answer.choices[0].message.content == "think "
        await player.say([user("a"), sent(answer), user("b")])

    play(work)
    assert texts(player.episode()) == [["think Observation:", f"x{END}"]]
    assert texts(player.episode(), sampled=False)[0][1].startswith(f"{END}\n<|im_start|>user\nb")
    without = Player(["x"], supports_stop=False)
    with pytest.raises(Refusal, match="does not stop at texts"):
        play(lambda: without.say([user("a")], stop=("b",)))


def test_a_history_is_the_same_by_what_it_means() -> None:
    call = ToolCall(name="add", arguments={"b": 2, "a": 40}, id="c")
    turn = as_sent(AssistantMessage(content="", calls=(call,), reasoning="hm"))
    turn["tool_calls"][0]["function"]["arguments"] = {"a": 40, "b": 2}
    plain = {"role": "assistant", "content": None, "tool_calls": turn["tool_calls"]}
    one, other = chain([ADD], [user("a"), turn]), chain([ADD], [user("a"), plain])
    assert one == other
    assert chain([], [user("a"), turn])[-1] != one[-1]
    assert chain([ADD], [user("b"), turn])[-1] != one[-1]
    changed = json.loads(json.dumps(plain))
    changed["tool_calls"][0]["function"]["arguments"]["a"] = 41
    assert chain([ADD], [user("a"), changed])[-1] != one[-1]


@given(
    rows=st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4), max_size=8),
    seed=st.integers(0, 5), most=st.one_of(st.none(), st.integers(1, 3)),
)  # fmt: skip
def test_every_sampled_token_is_trained_once_or_counted(rows: Any, seed: int, most: int | None) -> None:
    """Random prompts over two tokens, so that they fork, repeat and begin one another."""
    draw, tree = np.random.default_rng(seed), RowTree()
    for lengths in rows:
        ids: list[int] = []
        for given_length, sampled_length in lengths:
            ids += draw.integers(0, 2, given_length).tolist()
            parent, given_ids = tree.parent_of(ids)
            assert [*(parent.ids() if parent else []), *given_ids.tolist()] == ids
            tokens = draw.integers(0, 2, sampled_length)
            span = Span(token_ids=tokens, log_probs=np.zeros(sampled_length, np.float32),
                        versions=(VersionRun(1, sampled_length),))  # fmt: skip
            node = TurnNode(parent=parent, given=given_ids, span=span, finish_reason=FinishReason.STOP,
                            call=len(tree.nodes), has_tools=bool(draw.integers(0, 2)),
                            is_delivered=bool(draw.integers(0, 4)))  # fmt: skip
            tree.add(node)
            ids += tokens.tolist()
    made = rows_of(tree, EpisodeLimits(max_rows=most), overlapped=False)
    sampled = sum(len(node.span) for node in tree.nodes)
    trained = sum(row.num_sampled for row in made.rows)
    assert sampled == trained + sum(made.not_trained.values())
    spans = [id(span) for row in made.rows for span in row.spans if span.sampled]
    assert len(spans) == len(set(spans))
    whole = {tuple(node.ids()) for node in tree.nodes}
    assert all(tuple(_ids(row)) in whole for row in made.rows)


def _ids(row: Trajectory) -> list[int]:
    return [token for span in row.spans for token in span.token_ids.tolist()]
