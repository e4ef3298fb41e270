"""`rlsdk report RUN`: writes one HTML page about a run."""

from __future__ import annotations

from pathlib import Path

from rlsdk.system.printable import printable


def run(run_dir: Path) -> None:
    """Writes `report.html` and `curves.svg` into the run's folder, and prints their paths."""
    from rlsdk.views.report import write_report

    page, plot = write_report(run_dir)
    print(printable(f"report  {page}\nplot    {plot}"))
