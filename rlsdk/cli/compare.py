"""`rlsdk compare RUN RUN...`: one page about several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsdk.kit.printable import printable


def run(run_dirs: Sequence[Path], output: Path) -> None:
    """Writes the page and says where.

    Raises:
        ConfigError: fewer than two runs, or one that holds no metrics.
    """
    from rlsdk.views.report import write_comparison

    print(printable(f"comparison  {write_comparison(run_dirs, output)}"))
