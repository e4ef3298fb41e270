"""Environments that break one requirement each: small variations of one that holds all."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar


class Safe:
    """A dial is to be set to a number."""

    def set(self, number: int, note: str = "") -> str:
        """Sets the dial.

        Args:
            number: of the dial
            note: anything
        """
        if type(number) is not int or type(note) is not str:
            raise TypeError("expected a number, and a text")
        if self.done:
            return "it is over"
        self._tries += 1
        self.done = number == self._number
        return "open" if self.done else f"shut, {self._tries}"

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        self._number, self._seed, self._tries, self.done = int(answer), seed, 0, False
        return "Open the safe."

    def get_reward(self) -> float | None:
        return float(self.done) - 0.01 * self._tries

    def close(self) -> None: ...


def _tool(function: Any) -> Any:
    """The function as a tool of a class."""
    function.__doc__, function.__name__, function.__qualname__ = Safe.set.__doc__, "set", "Other.set"
    return function


def _set(function: Any) -> type:
    """The safe with another tool."""
    return type("Other", (Safe,), {"set": _tool(function)})


class Connects(Safe):
    def __init__(self) -> None:
        with socket.socket() as one:
            one.settimeout(0.1)
            one.connect_ex(("127.0.0.1", 9))


class WritesElsewhere(Safe):
    def __init__(self) -> None:
        Path("/var/tmp/rlsdk-elsewhere").write_text("x")


class NeedsMore(Safe):
    def reset(self, answer: str, level: int) -> str:  # type: ignore[override]
        return super().reset(answer)


class RefusesSome(Safe):
    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        if answer == "9":
            raise ValueError("no nines")
        return super().reset(answer, seed)


class DrawsFreely(Safe):
    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        return super().reset(answer, seed) + str(random.random())


class CountsObjects(Safe):
    count: ClassVar[list[int]] = []

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        super().reset(answer, seed)
        self.count.append(1)
        return f"You are number {len(self.count)}."


def _last_number(self, number: int, note: str = "") -> str:
    if self.done:
        return "over"
    self._tries += 1
    self.done = number == Latest.number
    return "open" if self.done else "shut"


class Latest(Safe):
    number: ClassVar[int] = 0

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        type(self).number = Latest.number = int(answer)
        return super().reset(answer, seed)

    set = _tool(_last_number)


class SharesTries(Safe):
    tries: ClassVar[dict[str, int]] = {}

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        self.tries["all"] = 0
        return super().reset(answer, seed)

    def get_reward(self) -> float:
        return float(self.done) - self.tries["all"]


def _shared(self, number: int, note: str = "") -> str:
    self.tries["all"] += 1
    return Safe.set(self, number, note)


SharesTries.set = _tool(_shared)  # type: ignore[method-assign]


class KeepsTries(Safe):
    def __init__(self) -> None:
        self._tries = 0

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        tries = self._tries
        text = super().reset(answer, seed)
        self._tries = tries
        return text


class KeepsDone(Safe):
    done = False

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        self._number, self._tries = int(answer), getattr(self, "_tries", 0)
        return "Open."


def _object(self, number: int, note: str = "") -> Any:
    return object()


def _long(self, number: int, note: str = "") -> str:
    return "x" * 20_000


def _hangs(self, number: int, note: str = "") -> str:
    if not isinstance(number, int):
        time.sleep(1.0)
    return "shut"


def _exits(self, number: int, note: str = "") -> str:
    if number is None:
        raise SystemExit(2)
    return "shut"


def _counts_first(self, number: int, note: str = "") -> str:
    self._tries += 1
    self.done = int(number) + 0 == self._number
    return f"shut, {self._tries}"


def _after_done(self, number: int, note: str = "") -> str:
    self._tries += 1
    self.done = self.done or number == self._number
    return "open" if self.done else "shut"


class Infinite(Safe):
    def get_reward(self) -> float:
        return float("inf")


class Text(Safe):
    def get_reward(self) -> Any:
        return "good"


class FadingScore(Safe):
    asked = 0

    def get_reward(self) -> float:
        self.asked += 1
        return 1.0 / self.asked


class ByTheClock(Safe):
    def get_reward(self) -> float:
        return float(int(time.time()) // 86_400 % 7)


class ByProcess(Safe):
    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        return super().reset(answer, seed) + f" process {os.getpid()}"


class Gift(Safe):
    def get_reward(self) -> float:
        return 1.0


class Unsolvable(Safe):
    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        return super().reset(str(int(answer) + 1), seed)


class Tells(Safe):
    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        return super().reset(answer, seed) + f" It is {answer}."


def _slow_on_long(self, number: int, note: str = "") -> str:
    if len(note) > 100_000:
        time.sleep(1.0)
    return "shut"


def _leaves_on_nul(self, number: int, note: str = "") -> str:
    if "\x00" in note:
        raise SystemExit(3)
    return "shut"


class LeaksThreads(Safe):
    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        threading.Thread(target=threading.Event().wait, args=(20.0,), daemon=True).start()
        return super().reset(answer, seed)


class LeaksFiles(Safe):
    kept: ClassVar[list[Any]] = []

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> str:
        self.kept.append(open(os.devnull))  # noqa: SIM115
        return super().reset(answer, seed)


class ClosesOnce(Safe):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


async def _blocks(self, number: int, note: str = "") -> str:
    time.sleep(0.3)
    await asyncio.sleep(0)
    return "shut"


class Unready(Safe):
    """Its loop cannot be played: what `reset` returns is no text."""

    def reset(self, answer: str = "7", seed: int = 0, **row: Any) -> Any:
        super().reset(answer, seed)
        return 7


class NoneOfIt(Safe):
    def turn_reward(self) -> Any:
        return None


BROKEN: dict[str, tuple[int, type]] = {
    "connects": (1, Connects),
    "writes_elsewhere": (1, WritesElsewhere),
    "needs_a_field_that_no_row_has": (2, NeedsMore),
    "refuses_some_rows": (2, RefusesSome),
    "draws_from_the_global_generator": (3, DrawsFreely),
    "numbers_its_objects": (3, CountsObjects),
    "answers_for_the_latest_object": (4, Latest),
    "shares_its_score": (5, SharesTries),
    "keeps_its_tries": (6, KeepsTries),
    "keeps_its_end": (6, KeepsDone),
    "returns_an_object": (8, _set(_object)),
    "returns_too_much": (8, _set(_long)),
    "hangs_on_a_wrong_type": (9, _set(_hangs)),
    "ends_the_process": (9, _set(_exits)),
    "counts_before_it_checks": (10, _set(_counts_first)),
    "loses_score_after_the_end": (11, _set(_after_done)),
    "scores_infinity": (12, Infinite),
    "scores_with_text": (12, Text),
    "scores_less_each_time": (12, FadingScore),
    "scores_by_the_clock": (13, ByTheClock),
    "tells_its_process": (13, ByProcess),
    "scores_everybody": (14, Gift),
    "has_a_wrong_solution": (15, Unsolvable),
    "tells_the_answer": (16, Tells),
    "is_slow_on_a_megabyte": (17, _set(_slow_on_long)),
    "leaves_on_a_nul": (17, _set(_leaves_on_nul)),
    "leaks_threads": (18, LeaksThreads),
    "leaks_files": (18, LeaksFiles),
    "closes_only_once": (18, ClosesOnce),
    "blocks_the_loop": (19, _set(_blocks)),
    "returns_no_observation": (20, Unready),
    "rewards_turns_with_nothing": (20, NoneOfIt),
    "names_a_tool_with_state": (21, type("Other", (Safe,), {"stateless": True})),
}
"""Name -> the requirement that it breaks, and the class."""


def undescribed(self, number: int) -> str:
    return "shut"


def untyped(self, number) -> str:  # type: ignore[no-untyped-def]
    """Sets the dial.

    Args:
        number: of the dial
    """
    return "shut"


REFUSED: dict[str, Any] = {
    "a_tool_without_a_docstring": type("Undescribed", (Safe,), {"set": undescribed}),
    "a_tool_without_hints": type("Untyped", (Safe,), {"set": untyped}),
    "no_reset": type("NoReset", (), {"set": Safe.set}),
}
"""Name -> a class that requirement 7 refuses as it is read."""
