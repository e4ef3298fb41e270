"""`rlsdk compare RUN RUN...`: one page about several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsdk.system.printable import printable


def run(run_dirs: Sequence[Path], output: Path) -> None:
    """Writes the page and prints its path.

    Raises:
        ConfigError: there are fewer than two runs, or one has no metrics.
    """
    from rlsdk.views.report import write_comparison

    print(printable(f"comparison  {write_comparison(run_dirs, output)}"))
