"""One command for a machine with a GPU: `python tools/check_gpu`, as `make check-gpu` calls it.

Needs one CUDA device and an environment with torch 2.11 or later, transformers, pytest and what rlsdk imports; no
network, and nothing of this checkout installed. What cannot run says what it lacks. The report holds every check's
outcome and figures; reports of conformance suites go beside those that `make compatibility` reads.

Exit code: 0: all that could run passed; 1: something failed; 3: there is no CUDA device, or the environment lacks what
every check needs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_metadata import expose
from gpu_steps import CORE, FAILED, NOT_RUN, PASSED, PLUGINS, ROOT, SUITE_PARTS, Result, lacking, run, steps

NO_DEVICE = 3
LOOK = (
    "import json, torch; n = torch.cuda.device_count(); print(json.dumps({'torch': torch.__version__, "
    "'cuda': torch.version.cuda, 'devices': [torch.cuda.get_device_name(i) for i in range(n)]}))"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all checks together (8)")
    parser.add_argument(
        "--part", type=int, choices=sorted({1, *SUITE_PARTS.values()}), help="only this part: 1 has all but suites"
    )
    parser.add_argument("--report", type=Path, default=ROOT / "gpu-report.json")
    parser.add_argument("--suites", type=Path, default=ROOT / "docs" / "conformance", help="folder of suites' reports")
    parser.add_argument("--device", default="cuda:0", help="cpu runs the same checks there: for work on this tool")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    missing = lacking(CORE, sys.executable)
    if missing:
        print(f"this environment lacks {', '.join(missing)}: run `{sys.executable} -m pip install {' '.join(missing)}`")
        return NO_DEVICE
    machine = json.loads(
        subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout
    )
    if args.device != "cpu" and not machine["devices"]:
        built = f"is built for CUDA {machine['cuda']}" if machine["cuda"] else "is built without CUDA"
        print(
            f"no CUDA device: torch {machine['torch']} {built} and sees none. Run this where `nvidia-smi` lists one; "
            "CUDA_VISIBLE_DEVICES must not be empty. Nothing was checked"
        )
        return NO_DEVICE
    about = {**machine, "device": args.device, "python": platform.python_version(), "platform": platform.platform()}
    results: list[Result] = []
    args.suites.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlsdk-check-gpu-") as made:
        scratch = Path(made)
        environment = {"PYTHONPATH": ":".join(map(str, paths(scratch))), "HF_HUB_OFFLINE": "1"}
        for step in steps(sys.executable, args.device, args.suites, scratch, num_devices=len(machine["devices"])):
            if args.only not in step.name or args.part not in (None, step.part):
                continue
            left_s = min(deadline - time.monotonic(), step.limit_s)
            results.append(run(step, python=sys.executable, environment=environment, left_s=left_s))
            print(line(results[-1]), flush=True)
            # After each check: what ends this command leaves a report of what came before.
            content = {"machine": about, "checks": [result.as_json() for result in results]}
            args.report.write_text(json.dumps(content, indent=1), encoding="utf-8")
    failed = [result.name for result in results if result.outcome == FAILED]
    names = f": {', '.join(failed)}" if failed else ""
    print(f"\n{len(results)} checks, {len(failed)} failed{names}; all of it: {args.report}")
    return 1 if failed else 0


def paths(scratch: Path) -> list[Path]:
    """The import path of a checkout, with what an installation would say of it."""
    metadata = scratch / "metadata"
    expose(ROOT, ROOT, metadata)
    sources = [ROOT]
    for name in PLUGINS:
        project = ROOT / "plugins" / name
        expose(project, project / "src", metadata)
        sources.append(project / "src")
    return [*sources, metadata]


def line(result: Result) -> str:
    mark = {PASSED: "ok  ", FAILED: "FAIL", NOT_RUN: "-   "}[result.outcome]
    figures = ", ".join(f"{name} {value}" for name, value in result.figures.items() if name != "passed")
    return f"{mark} {result.name:26} {result.seconds:6.1f} s  {result.why or figures}"


if __name__ == "__main__":
    sys.exit(main())
