"""The requirements, and a run of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from rlsdk.agents.conformance import calls, state
from rlsdk.agents.conformance.lab import Lab
from rlsdk.agents.conformance.requirement import Finding, Requirement, find

REQUIREMENTS: Sequence[Requirement] = (
    Requirement(number=1, name="built without network or files elsewhere", check=state.is_built_alone),
    Requirement(number=2, name="reset takes every row", check=state.takes_every_row),
    Requirement(number=3, name="same row, seed and calls: same results", check=state.repeats),
    Requirement(number=4, name="other objects change nothing", check=state.is_left_alone),
    Requirement(number=5, name="no state in class or module", check=state.shares_nothing),
    Requirement(number=6, name="reset begins anew", check=state.starts_afresh),
    Requirement(number=7, name="tools are described", check=calls.describes_its_tools),
    Requirement(number=8, name="results are text or JSON, within the limit", check=calls.answers_in_text),
    Requirement(number=9, name="calls that do not fit raise or answer", check=calls.refuses_misfits),
    Requirement(number=10, name="a failed call changes nothing", check=state.survives_failed_calls),
    Requirement(number=11, name="calls after done change no score", check=state.ends),
    Requirement(number=12, name="scores are finite, and the same twice", check=calls.scores_soundly),
    Requirement(number=13, name="no result depends on clock or process", check=state.ignores_the_world),
    Requirement(number=14, name="doing nothing, or anything, does not win", check=calls.is_no_gift, warns=True),
    Requirement(number=15, name="the solution wins", check=calls.can_be_solved),
    Requirement(number=16, name="the answer is not shown", check=calls.keeps_its_secret),
    Requirement(number=17, name="hostile text is survived", check=calls.survives_hostile_text),
    Requirement(number=18, name="close frees everything", check=state.cleans_up),
    Requirement(number=19, name="tools block no other episode", check=calls.blocks_nobody),
    Requirement(number=20, name="played again by the loop: the same rows", check=calls.plays_the_same_again),
    Requirement(number=21, name="tools named stateless leave no trace", check=state.leaves_no_trace),
)


def check(lab: Lab, only: Collection[int] = ()) -> list[Finding]:
    """Checks an environment: all requirements, or those of these numbers."""

    async def run() -> list[Finding]:
        return [await find(one, lab) for one in REQUIREMENTS if not only or one.number in only]

    return asyncio.run(run())
