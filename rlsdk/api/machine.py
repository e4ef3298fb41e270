"""Plans of runs and diagnosis of machines: `rlsdk.plan` and `rlsdk.doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.api.python_inputs import Reward, Rows, stage_inputs
from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings, from_keywords
from rlsdk.api.table import Table
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.interfaces.spelling import Setting, spell
from rlsdk.system.printable import printable
from rlsdk.system.temporary import held_folder

if TYPE_CHECKING:
    from rlsdk.diagnosis import Finding
    from rlsdk.planning import Hardware, RunPlan
    from rlsdk.trainer.runs.prepare import PreparedRun


def plan(
    model: str | os.PathLike[str] | None = None,
    data: Rows | None = None,
    reward: Reward | None = None,
    *,
    algorithm: str | None = None,
    steps: int | None = None,
    hardware: str | None = None,
    calibration: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    trust_run: bool = False,
    **fields: Any,
) -> RunPlan:
    """What `rlsdk.train` with the same arguments would be; takes no device. `.fits` says whether it fits.

    Args:
        model: as for `rlsdk.train`, as all that is not named here.
        data: see above.
        reward: see above; it is looked at, not run.
        algorithm: see above.
        steps: see above.
        hardware: `h100`, `80GiB`, `h100:2x8`, `cpu`, ...; None: this machine.
        calibration: folder of a run whose phases' seconds the times come from.
        config: see above.
        trust_run: see above.
        fields: see above.

    Raises:
        ConfigError, DataError, PlacementError: the run cannot be.
    """
    settings = from_keywords(
        fields,
        Training.RL.reader,
        config=config,
        trust_run=trust_run,
        model__path=model,
        algorithm__recipe=algorithm,
        trainer__steps=steps,
    )
    with stage_inputs(settings, data=data, reward=reward) as given:
        return run_plan(
            given.settings, hardware=hardware, calibration=None if calibration is None else Path(calibration)
        )


def run_plan(settings: Settings, *, hardware: str | None = None, calibration: Path | None = None) -> RunPlan:
    """The plan of a run with these settings."""
    from rlsdk.kit.memory.forecast import NoRoomError
    from rlsdk.planning import make_plan, parse_hardware, read_calibration
    from rlsdk.views import in_notebook

    machine = parse_hardware(hardware) if hardware is not None else None
    run = resolve(settings, device=machine.device if machine is not None else None, loads_models=False)
    is_shown_once = in_notebook()  # where a cell that ends with the plan has one output
    for text in () if is_shown_once else run.notices:
        print(printable(text), file=sys.stderr)
    known = read_calibration(calibration, run.registry) if calibration is not None else None
    with held_folder("plan") as folder:
        if run.makes_model:
            from rlsdk.trainer.runs.quickstart import make_model

            run = run.with_config(make_model(run.config, Path(folder)))
        try:
            plan = make_plan(run, hardware=machine, calibration=known)
        except NoRoomError as error:
            change = _change(settings, run, machine)
            raise ConfigError(f"{error}. It fits with {_spelled(change)}") if change else error from error
        if plan.fits is False and not run.makes_model and plan.hardware.device != "cpu":
            plan = replace(plan, change=_change(settings, run, plan.hardware))
        return replace(plan, notices=(*run.notices, *plan.notices)) if is_shown_once else plan


def _spelled(change: Mapping[str, object]) -> str:
    return spell(*(Setting(path, value) for path, value in change.items()))


def _change(settings: Settings, run: PreparedRun, hardware: Hardware | None) -> Mapping[str, object]:
    """The smallest change with which a run fits; empty: none is known."""
    print("does not fit; looking for a change with which it does ...", file=sys.stderr)
    from rlsdk.kit.memory.pass_memory import remembered_passes
    from rlsdk.planning import changes, make_plan, smallest, this_machine

    def fits(change: Mapping[str, object]) -> bool:
        flags = [part for path, value in change.items() for part in (f"--{path}", json.dumps(value))]
        try:
            changed = resolve(replace(settings, flags=[*settings.flags, *flags]), device=run.device, loads_models=False)
            return make_plan(changed, hardware=hardware).fits is True
        except RlsdkError:  # sizes that do not divide the model, or a split that a backend refuses
            return False

    with remembered_passes():
        machine = hardware or this_machine(run.device)
        return smallest(changes(run.config, run.registry, machine), fits) or {}


def doctor(run_dir: str | os.PathLike[str] = "runs", *, ray_address: str | None = None) -> Table:
    """Diagnoses this machine and its environment.

    Args:
        run_dir: folder of runs, whose free space is checked.
        ray_address: also checks this running Ray cluster.

    Returns:
        A row for each thing that was looked at: `check`, `state` (`ok`, `warning`, `fault`), `found`, and `fix`, the
        command that repairs it.
    """
    return Table(asdict(finding) for finding in findings(Path(run_dir), ray_address))


def findings(run_dir: Path, ray_address: str | None, begins: Callable[[str], None] | None = None) -> Iterator[Finding]:
    """Yields each finding as soon as it is known; `begins` gets the name of each check before it."""
    from rlsdk.diagnosis import examine, no_word

    yield from examine(run_dir, ray_address, begins or no_word)
    yield graders()


def graders() -> Finding:
    """Confinement of grading processes on this system."""
    from rlsdk.confinement.measures import probe
    from rlsdk.diagnosis import Finding, Health

    seen = probe()
    held = "; ".join(seen.held) or "nothing"
    if not seen.missing:
        return Finding(check="graders", state=Health.OK, found=f"confined: {held}")
    open_doors = [text for text in seen.missing if text.startswith(("no network", "no file writes"))]
    state = Health.WARNING if open_doors else Health.OK
    fix = "rewards that run what a model writes belong in a container here" if open_doors else ""
    return Finding(
        check="graders", state=state, found=f"confined: {held}; not here: {'; '.join(seen.missing)}", fix=fix
    )
