"""Requirements on tools and scores."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rlsdk.agents.conformance.drawing import Call, call, hostile, misfits, parameters_of, script
from rlsdk.agents.conformance.lab import Lab, Player, is_async, lag_of, score_of
from rlsdk.agents.conformance.requirement import LeftOut
from rlsdk.agents.conformance.state import SHOWN, scores_of
from rlsdk.agents.conformance.tokens import CONTROL, ScriptedPolicy, byte_tokenizer, chat_format, prompt_of
from rlsdk.agents.environments.limits import Limits
from rlsdk.agents.environments.play import EnvironmentRollouter
from rlsdk.agents.environments.tools import text_of_result
from rlsdk.interfaces import BatchError

EPISODES = 64
"""Of each policy that should not win."""
MAX_LAG_S = 0.2
SOLUTION = "solution"
"""Field of a row with the calls that solve it: `[{"name": ..., "arguments": ...}, ...]`."""


async def describes_its_tools(lab: Lab) -> AsyncIterator[str]:
    """Every tool has a description and a schema that JSON keeps; so has every argument."""
    for tool in lab.environment.tools:
        name = tool["function"]["name"]
        if json.loads(json.dumps(tool)) != tool:
            yield f"the schema of `{name}` does not survive JSON"
        if not str(tool["function"].get("description", "")).strip():
            yield f"`{name}` has no description: write what it does in the first line of its docstring"
        for argument, schema in parameters_of(tool).get("properties", {}).items():
            if not ({"type", "anyOf", "oneOf", "enum"} & {*schema}):
                yield f"`{name}`: argument {argument!r} may be anything; give it a type hint"


async def answers_in_text(lab: Lab) -> AsyncIterator[str]:
    """Results of calls that fit are text or JSON, below the limit on characters."""
    draw, tools = lab.draw("answers"), lab.environment.tools
    if not tools:
        raise LeftOut("it has no tools")
    player = await lab.open(lab.rows[0])
    try:
        for at in range(200):
            if player.done:
                await player.reset(lab.rows[at % len(lab.rows)], at)
            name, arguments = call(tools[at % len(tools)], draw)
            said = await player.call(name, arguments)
            if said.startswith("! TypeError: a tool returned"):
                yield f"`{name}`: {said[2:]}"
            if len(said) - 2 > lab.max_tool_chars:
                yield f"`{name}` returned {len(said) - 2:,} characters; a model sees {lab.max_tool_chars:,} at most"
    finally:
        await player.close()


async def refuses_misfits(lab: Lab) -> AsyncIterator[str]:
    """Calls that do not fit raise or answer; none hangs, none ends the process."""
    draw = lab.draw("misfits")
    for tool in lab.environment.tools:
        for name, arguments in misfits(tool, draw):
            player = await lab.open(lab.rows[0])
            try:
                said = await player.call(name, arguments)
            except TimeoutError:
                yield f"`{name}({_shown(arguments)})` did not answer within {lab.call_s:g} s"
                return
            finally:
                await _let_go(player)
            if said.startswith("! RuntimeError: SystemExit"):
                yield f"`{name}({_shown(arguments)})` ends the process ({said[2:]})"


async def scores_soundly(lab: Lab) -> AsyncIterator[str]:
    """The score is a finite number, parts of one, or None, and the same when it is asked for twice."""
    for row, seed, calls in lab.scripts("scores", 24):
        player = await lab.open(row, seed)
        try:
            await player.play(calls)
            first, second = await player.reward(), await player.reward()
            score, again = score_of(first), score_of(second)
        finally:
            await player.close()
        if score is not None and not math.isfinite(score):
            yield f"get_reward returned {first!r}; expected a finite number, or None for no score"
        if score != again:
            yield f"get_reward returned {first!r}, then {second!r} without a call between"


async def is_no_gift(lab: Lab) -> AsyncIterator[str]:
    """A policy that does nothing, and one that calls at random, do not get the best score."""
    tools, best = lab.environment.tools, await _best(lab)

    async def nothing(player: Player, at: int) -> None: ...

    async def at_random(player: Player, at: int) -> None:
        await player.play(script(tools, lab.draw(f"random/{at}"), 8))

    for name, policy in {"does nothing": nothing, "calls at random": at_random}.items():
        scores = await scores_of(lab, policy, EPISODES)
        mean = sum(scores) / len(scores) if scores else -math.inf
        if mean >= best:
            yield f"a policy that {name} gets {mean:.3g} on average, and {best:.3g} is the best score"


async def can_be_solved(lab: Lab) -> AsyncIterator[str]:
    """The calls in a row's `solution` get the best score."""
    rows = [row for row in lab.rows if SOLUTION in row]
    if not rows:
        raise LeftOut(f"no row has a field {SOLUTION!r}")
    best = await _best(lab)
    for row in rows:
        player = await lab.open(row)
        try:
            said = await player.play(_solution(row))
            score = score_of(await player.reward())
        finally:
            await player.close()
        if score is None or score < best:
            last = said[-2][:SHOWN]
            yield f"the solution of a row gets {score!r}, and {best:.3g} is the best score; it said {last!r}"


async def keeps_its_secret(lab: Lab) -> AsyncIterator[str]:
    """The answer is not in what the model sees before it acts."""
    rows = [row for row in lab.rows if isinstance(row.get("answer"), str | int | float) and str(row["answer"]).strip()]
    if not rows:
        raise LeftOut("no row has a field 'answer'")
    schemas = json.dumps(lab.environment.tools)
    told = []
    for row in rows:
        player = await lab.open(row)
        seen = f"{prompt_of(row).messages} {player.observation} {schemas}"
        await player.close()
        told.append(re.search(rf"(?<!\w){re.escape(str(row['answer']))}(?!\w)", seen) is not None)
    # One answer may stand in a prompt by chance, as that of a question with choices does.
    if len({str(row["answer"]) for row in rows}) > 1 and all(told):
        yield f"the answers of all {len(rows)} rows are in the observation, the prompt or the schemas of the tools"


async def survives_hostile_text(lab: Lab) -> AsyncIterator[str]:
    """Hostile texts in calls are survived, and open no turn in results."""
    draw, form, ids = lab.draw("hostile"), chat_format(), set(byte_tokenizer().convert_tokens_to_ids([*CONTROL]))
    for tool in lab.environment.tools:
        for name, arguments in hostile(tool, draw):
            player = await lab.open(lab.rows[0])
            try:
                said = await player.call(name, arguments)
            except TimeoutError:
                yield f"`{name}({_shown(arguments)})` did not answer within {lab.call_s:g} s"
                return
            finally:
                await _let_go(player)
            turn = {"role": "assistant", "content": "x"}
            more = form.extend(
                [], [turn], [{"role": "tool", "content": text_of_result(said)[: lab.max_tool_chars]}], []
            )
            plain = form.extend([], [turn], [{"role": "tool", "content": "x"}], [])
            if more is None or plain is None or _count(more, ids) != _count(plain, ids):
                yield f"the result of `{name}` opens a turn: {said[:SHOWN]!r}"
            if said.startswith(("! MemoryError", "! RecursionError", "! RuntimeError: SystemExit")):
                yield f"`{name}({_shown(arguments)})`: {said[2:][:SHOWN]}"


async def blocks_nobody(lab: Lab) -> AsyncIterator[str]:
    """A tool that takes its time delays no other episode: async ones await, the others run in a thread."""
    if not is_async(lab):
        raise LeftOut("it has no async method; others run in a thread of their own")
    for row, seed, calls in lab.scripts("lag", 4):
        late = await lag_of(lab.transcript(row, seed, calls))
        if late > MAX_LAG_S:
            yield f"an async tool blocks the event loop for {late:.2f} s; await, or make the method a plain one"


async def plays_the_same_again(lab: Lab) -> AsyncIterator[str]:
    """Played twice by the loop of a run, an episode gives the same rows, and the score that its calls give."""
    for row, seed, calls in lab.scripts("loop", 4):
        episodes = [await _played(lab, row, seed, calls) for _ in range(2)]
        digests = [episode.receipt.digests if episode.receipt is not None else () for episode in episodes]
        if digests[0] != digests[1]:
            yield "an episode that is played again by the same calls has other tokens"
        if episodes[0].reward != episodes[1].reward:
            yield f"an episode that is played again is scored {episodes[0].reward}, then {episodes[1].reward}"


async def _played(lab: Lab, row: Mapping[str, Any], seed: int, calls: list[Call]) -> Any:
    limits = Limits(tool_s=lab.call_s, setup_s=lab.call_s, max_tool_chars=lab.max_tool_chars)
    rollout = EnvironmentRollouter(environment=lab.environment, form=chat_format(), limits=limits)
    try:
        return await rollout(prompt_of(row), ScriptedPolicy(calls, seed), **lab.options)
    except BatchError as error:
        raise RuntimeError(f"the loop of a run cannot play it: {error}") from error


async def _best(lab: Lab) -> float:
    """The best score that is known: of the solutions and of calls at random; at least 1.0 without a solution."""
    tools = lab.environment.tools

    async def at_random(player: Player, at: int) -> None:
        await player.play(script(tools, lab.draw(f"best/{at}"), 8))

    rows = [row for row in lab.rows if SOLUTION in row]
    found = [] if rows else [1.0]
    for row in rows[:8]:
        player = await lab.open(row)
        try:
            await player.play(_solution(row))
            score = score_of(await player.reward())
        finally:
            await player.close()
        found += [] if score is None else [score]
    return max([*found, *await scores_of(lab, at_random, EPISODES)], default=-math.inf)


def _solution(row: Mapping[str, Any]) -> list[Call]:
    return [(str(one["name"]), dict(one.get("arguments", {}))) for one in row[SOLUTION]]


async def _let_go(player: Player) -> None:
    """Closes an object that may hang."""
    try:
        await player.close()
    except (TimeoutError, asyncio.CancelledError):
        return


def _count(ids: list[int], control: set[int]) -> int:
    return sum(token in control for token in ids)


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}"[:40] for name, value in arguments.items())
