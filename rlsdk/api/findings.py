"""All that is wrong with a start, gathered so that one message says it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from rlsdk.config import Problem, config_error
from rlsdk.interfaces import ConfigError, DataError, RlsdkError

T = TypeVar("T")
Refusal = ConfigError | DataError


class Findings:
    """What was found wrong so far. Checks that do not depend on one another are all made before any of it is said."""

    def __init__(self) -> None:
        self._found: list[Problem | Refusal] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def names(self, path: str) -> bool:
        """Whether this field, or one in this section, is refused already."""
        paths = [problem.path for problem in self._found if isinstance(problem, Problem)]
        return any(f"{known}.".startswith(f"{path}.") for known in paths)

    def add(self, problems: Iterable[Problem]) -> None:
        """Adds problems of fields that none is known of yet: the first check that refuses a field explains it best."""
        known = {problem.path for problem in self._found if isinstance(problem, Problem) and problem.path}
        self._found += [problem for problem in problems if problem.path not in known]

    def look(self, check: Callable[[], T], otherwise: T) -> T:
        """Returns the result of a check; where it refuses something, records that and returns `otherwise`.

        Raises:
            Exception: anything that is no `RlsdkError` is a defect of the check, whatever else was found; its notes say
                what was.
        """
        try:
            return check()
        except (ConfigError, DataError) as error:
            self._found.append(error)
        except RlsdkError:
            if not self._found:
                raise
            # Of values that are refused already, in another's words.
        except Exception as error:
            for part in self._found:
                error.add_note(f"found before: {part}")
            raise
        return otherwise

    def refuse(self) -> NoReturn:
        """Raises what was found: an error as it was where it is the only one, else a list of all.

        Raises:
            ConfigError: what is wrong.
            DataError: data cannot be used, and nothing else is wrong.
        """
        if len(self._found) == 1 and not isinstance(self._found[0], Problem):
            raise self._found[0]
        raise config_error([part if isinstance(part, Problem) else Problem("", str(part)) for part in self._found])
