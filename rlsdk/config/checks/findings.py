"""Collects all problems of a start, to report them in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from rlsdk.config.problem import Problem, config_error
from rlsdk.interfaces import ConfigError, DataError, RlsdkError

T = TypeVar("T")
Refusal = ConfigError | DataError


class Findings:
    """Problems found so far. All independent checks are made before any problem is reported."""

    def __init__(self) -> None:
        self._found: list[Problem | Refusal] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def names(self, path: str) -> bool:
        """Whether this field, or one in this section, already has a problem."""
        paths = [problem.path for problem in self._found if isinstance(problem, Problem)]
        return any(f"{known}.".startswith(f"{path}.") for known in paths)

    def add(self, problems: Iterable[Problem]) -> None:
        """Adds problems of fields without one: the first check that refuses a field explains it best."""
        known = {problem.path for problem in self._found if isinstance(problem, Problem) and problem.path}
        self._found += [problem for problem in problems if problem.path not in known]

    def run_check(self, check: Callable[[], T], otherwise: T) -> T:
        """Returns the result of a check; if it raises an `RlsdkError`, records that and returns `otherwise`.

        Raises:
            Exception: any other exception is a defect of the check; its notes list the problems found so far.
        """
        try:
            return check()
        except (ConfigError, DataError) as error:
            self._found.append(error)
        except RlsdkError:
            if not self._found:
                raise
            # About values that are already refused by another check.
        except Exception as error:
            for part in self._found:
                error.add_note(f"found before: {part}")
            raise
        return otherwise

    def refuse(self) -> NoReturn:
        """Raises the problems found: a single error unchanged, several as a list.

        Raises:
            ConfigError: lists the problems.
            DataError: data cannot be used, and there is no other problem.
        """
        if len(self._found) == 1 and not isinstance(self._found[0], Problem):
            raise self._found[0]
        raise config_error([part if isinstance(part, Problem) else Problem("", str(part)) for part in self._found])
