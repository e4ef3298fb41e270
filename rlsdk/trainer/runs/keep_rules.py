"""Which samples of a prompt `rlsdk generate --keep` keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.interfaces.spelling import as_given


class Keeping(StrEnum):
    """Which samples of a prompt are kept."""

    BEST = "best"
    """The one with the highest score."""
    ABOVE = "above"
    """All with a score above a number, equal texts once."""
    ALL = "all"
    """Every one, cut ones too; with its score where there are rewards."""
    PAIRS = "pairs"
    """The ones with the highest and the lowest score, where they differ, as a preference pair."""


@dataclass(frozen=True, kw_only=True)
class KeepRule:
    """Which samples of a prompt are kept."""

    keeping: Keeping
    above: float = math.nan

    @classmethod
    def parse(cls, text: str) -> KeepRule:
        """Reads `all`, `best`, `above:X` or `pairs`.

        Raises:
            ConfigError: it is something else.
        """
        name, _, value = text.partition(":")
        known = ("all", "best", "above:X", "pairs")
        try:
            keeping = Keeping(name)
            above = float(value) if keeping is Keeping.ABOVE else math.nan
        except ValueError:
            near = nearest(name, [one.value for one in Keeping])
            raise ConfigError(f"{as_given('keep', text)}: expected one of {known}, such as above:0.5{near}") from None
        if (keeping is Keeping.ABOVE) is not math.isfinite(above) or (value and keeping is not Keeping.ABOVE):
            raise ConfigError(f"{as_given('keep', text)}: expected one of {known}, with a finite number X")
        return cls(keeping=keeping, above=above)
