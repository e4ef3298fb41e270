"""What a run prints of its syncs."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from rlsdk.cli.console import ConsoleView
from rlsdk.interfaces import SyncReport

MOVED = SyncReport(
    version=3,
    num_tensors=9,
    num_bytes=500_000_000,
    moved_bytes=400_000_000,
    lower_bound_bytes=400_000_000,
    changed_tensors=9,
    seconds=0.25,
    transports=("shared_memory",),
)


def said(*reports: SyncReport) -> list[str]:
    text = io.StringIO()
    view = ConsoleView(Console(file=text, width=120))
    for report in reports:
        view.synced(report)
    return text.getvalue().splitlines()


def test_each_sync_is_one_line_with_bytes_time_rate_and_what_moved_over_the_bound() -> None:
    wasteful = replace(MOVED, version=4, moved_bytes=500_000_000, transports=("shared_memory", "object_store"))
    assert said(MOVED, wasteful) == [
        "sync v3: 500.0 MB by shared_memory, 250 ms, 2.00 GB/s, 1.00 x bound",
        "sync v4: 500.0 MB by shared_memory, object_store, 250 ms, 2.00 GB/s, 1.25 x bound",
    ]


def test_of_syncs_that_move_nothing_the_first_has_a_line() -> None:
    still = replace(MOVED, moved_bytes=0, lower_bound_bytes=0, transports=())
    assert said(still, still, still) == ["sync v3: 500.0 MB, 250 ms, 2.00 GB/s, in place"]
