"""What overlap gains, measured, and what the simulator says of it: `python -m benchmarks.overlap [--docs]`.

Two pools of one core each, every pool's process held to a core of its own. Each load runs synchronously, and then one
step off (and one of them two steps off, with samples that go on under new weights): 13 runs, eleven minutes on a quiet
machine of two cores; 30 steps of each are measured. The loads come in two sizes: the controller and Ray's daemons need
some 40 ms of every step, whatever it holds, and there is no third core for them. Where the rollout is the longer half,
they and the graders of an overlapping run share training's core, which waits for the controller anyway.

The bound of what overlap can gain is (rollout + update + sync) / max(rollout, update + sync), of the synchronous runs.
Where other programs take the cores, pools that work at the same time get less of them than one that works alone;
"longer half" does not depend on that: of the overlapping run's steps, the share that the longer half of each took.

The simulator gets its rates from the synchronous runs' journals and metrics, as `rlsdk plan --schedule RUN,OTHER,...`
does.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.overlap.page import TABLE, read, show, write, write_page
from benchmarks.overlap.rows import rows_of, run_all
from benchmarks.overlap.runs import LOADS
from rlsdk.testing.process.models import write_tiny_model


def main() -> None:
    # A run that is under way ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--only", choices=LOADS, action="append", help="unset: all")
    parser.add_argument("--times", type=int, default=1, help="that each run is made")
    parser.add_argument("--folder", type=Path, help="folder of the runs; finished ones are kept")
    parser.add_argument("--json", type=Path, help="adds the rows to those of this file")
    parser.add_argument(
        "--docs", action="store_true", help=f"the file is docs/{TABLE.name}, and its table goes on the page"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        model = folder / "model"
        if not model.exists():
            write_tiny_model(model, layers=4, hidden_size=256, intermediate_size=512)
        names = args.only or list(LOADS)
        for time in range(args.times):
            for name in names:
                run_all(model, folder, name, time)
        rows = rows_of(folder, names, args.times)
    file = TABLE if args.docs else args.json
    if file is not None:
        rows = [row for row in read(file) if row.load not in names] + rows
        write(file, rows)
    if args.docs:
        write_page(TABLE)
    show(rows)


if __name__ == "__main__":
    main()
