"""Compares the numbers of five small runs between this tree and another commit, bit for bit, times aside.

python -m tools.same_numbers --base HEAD~1    # or make same-numbers BASE=HEAD~1: three minutes on two quiet cores

A refactor must change no number that a run prints. The recorded run of the tests allows what another processor does to
the last digits; here both trees run on this machine, so that nothing is allowed. Exit code 1 where a number differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMED = ("time/", "throughput/", "memory/")
SMALL = ("--sft.steps", "20", "--trainer.steps", "8", "--trainer.save_every_steps", "null", "--eval.every_steps", "4")
TINY = ("--model", "quickstart/model", "--model.init_from_config", "--data.prompt_field", "question")
RUNS: Mapping[str, Sequence[str]] = {
    "quickstart": ("train", *SMALL),
    "ppo": ("train", "--algorithm", "ppo", *SMALL),
    "one-step-off": (
        "train", *SMALL, "--placement.preset", "disaggregated", "--placement.devices_per_node", "2",
        "--placement.cpus_per_device", "1", "--schedule.max_staleness", "1", "--algorithm.old_log_probs", "auto",
    ),
    "sft": ("sft", *TINY, "--data", "words.jsonl", "--data.num_eval_rows", "8", "--sft.steps", "12"),
    "dpo": ("dpo", *TINY, "--data", "pairs.jsonl", "--data.num_eval_rows", "8", "--preferences.steps", "12"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="some of the runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as name:
        folder = Path(name)
        base = folder / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", base, args.base], cwd=ROOT, check=True)
        try:
            same = [compare(run, base, folder) for run in args.only]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    sys.exit(0 if all(same) else 1)


def compare(run: str, base: Path, folder: Path) -> bool:
    """Whether the run prints the same numbers in both trees; shows each that differs."""
    before, after = (metrics(run, tree, folder / side) for side, tree in (("before", base), ("after", ROOT)))
    differing = list(differences(before, after))
    print(f"{run}: {sum(map(len, before))} numbers, {len(differing)} differ", flush=True)
    for line in differing[:20]:
        print(f"  {line}", flush=True)
    return not differing


def metrics(run: str, tree: Path, scratch: Path) -> list[dict[str, object]]:
    """What the run of one tree wrote, without times.

    Raises:
        SystemExit: the run failed.
    """
    if not scratch.exists():
        write_rows(scratch)
    sources = [tree, *sorted((tree / "plugins").glob("*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "OMP_NUM_THREADS": "1"}
    where = ["--trainer.run_dir", ".", "--trainer.run_name", run, "--tracking.trackers", "[jsonl]"]
    command = [sys.executable, "-P", "-m", "rlsdk", *RUNS[run], *where]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{run} failed in {tree}:\n{done.stdout}{done.stderr}")
    lines = (scratch / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if not is_time(name)} for line in lines]


def is_time(name: str) -> bool:
    return name.startswith(TIMED) or name.endswith("_s")


def write_rows(scratch: Path) -> None:
    """The data of the runs that do not make their own: words, and pairs of answers."""
    scratch.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 6))) for _ in range(80)]
    rows = [{"question": word, "answer": word[::-1]} for word in words]
    pairs = [{"question": word, "chosen": word[::-1], "rejected": word} for word in words]
    for name, records in (("words", rows), ("pairs", pairs)):
        (scratch / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def differences(before: Sequence[Mapping[str, object]], after: Sequence[Mapping[str, object]]) -> Iterator[str]:
    if len(before) != len(after):
        yield f"{len(before)} rows before, {len(after)} after"
    for at, (old, new) in enumerate(zip(before, after, strict=False)):
        for name in sorted(old.keys() | new.keys()):
            was, now = (json.dumps(row[name]) if name in row else "absent" for row in (old, new))
            if was != now:
                yield f"row {at}, {name}: {was} before, {now} after"


if __name__ == "__main__":
    main()
