"""`rlsdk plan --schedule`: simulates the best split of devices, and the speedup from staleness."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.config import load_config, roles
from rlsdk.config.sections.role_kinds import ACTOR, ROLLOUT
from rlsdk.interfaces import ConfigError
from rlsdk.planning.calibration import stale_work
from rlsdk.planning.measured import Devices, measured_rates
from rlsdk.planning.rates import Rates
from rlsdk.planning.splits import Row, Workload, compare, log_normal_lengths, parse_rates
from rlsdk.system.streams import stdout_aside
from rlsdk.trainer.checkpoints.run_folder import HISTORY_FILE
from rlsdk.trainer.roles.placement import placement_of
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.tracking.trackers import read_lines, read_metrics
from rlsdk.views.terminal import SafeConsole

NUM_LENGTHS = 1 << 16


def run(args: Sequence[str], given: str, *, as_json: bool) -> None:
    """Prints the table for the batch size of a run and all its devices.

    Args:
        args: arguments of `rlsdk train`.
        given: rates as `NAME=VALUE,...`; or the folder of a run that measured them, optionally followed by commas and
            folders of further runs on the same devices.
        as_json: print one JSON document instead of the table.
    """
    with stdout_aside() if as_json else nullcontext():
        prepared = resolve(Settings(flags=args))
        devices = sum(pool.num_devices for pool in prepared.placement.pools)
        rows = compare(*_work_and_rates(prepared, given, devices))
    if as_json:
        print(json.dumps([record(row) for row in rows], indent=2))
        return
    show_rows(rows, SafeConsole(file=sys.stdout, highlight=False, width=120), title=f"{devices} devices")


def _work_and_rates(run: PreparedRun, given: str, devices: int) -> tuple[Workload, Rates]:
    config = run.config
    rollout, trainer = config.rollout, config.trainer
    if Path(given.split(",")[0]).is_dir():
        run_dir, *beside = map(Path, given.split(","))
        measured = devices_of_run(run_dir)
        for other in beside:
            if (found := devices_of_run(other)) != measured:
                raise ConfigError(
                    f"--schedule {given!r}: {str(other)!r} ran on {_said(found)}, but {str(run_dir)!r} on "
                    f"{_said(measured)}; all runs must have the same devices, only with other batches"
                )
        rates, lengths = measured_rates(run_dir, read_metrics(run_dir), measured, beside)
        # Another number of devices means another machine, whose number of cores is not known.
        same = devices == measured.train + measured.replicas * measured.per_replica
        rates = replace(
            rates,
            max_running=rollout.max_running_samples,
            cores=rates.cores if same else 0,
            stale_work=stale_work(config, run.registry),
        )
    elif "=" in given:
        rates, said = parse_rates(
            given, max_running=rollout.max_running_samples, devices_per_replica=rollout.num_devices
        )
        lengths = log_normal_lengths(
            middle=said["median"],
            p99=said["p99"],
            most=rollout.max_response_tokens,
            count=NUM_LENGTHS,
            seed=trainer.seed,
        )
    else:
        raise ConfigError(
            f"--schedule {given!r}: expected the folder of a run (or of several, RUN,OTHER), or rates such as "
            "decode_ms=8,median=500"
        )
    work = Workload(
        devices=devices,
        groups_per_step=trainer.prompts_per_step,
        samples_per_group=trainer.samples_per_prompt,
        lengths=lengths,
    )
    return work, rates


def _said(devices: Devices) -> str:
    return f"{devices.train} + {devices.replicas} x {devices.per_replica} devices"


def devices_of_run(run_dir: Path) -> Devices:
    """Returns the devices of a run's two pools, from its configuration.

    Raises:
        ConfigError: the folder has no configuration.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} has no config.yaml; give the folder of a run (runs/NAME)")
    # The run's own code is not loaded, so --trust-run is not needed.
    config = load_config([path], sections=("placement",))
    # The number of devices does not depend on their type.
    placement = placement_of(config.placement, [role.name for role in roles(config)], "cpu")
    count = {pool.name: pool.num_devices for pool in placement.pools}
    per_replica = config.rollout.num_devices
    return Devices(
        train=count[placement.roles[ACTOR]],
        replicas=count[placement.roles[ROLLOUT]] // per_replica,
        per_replica=per_replica,
        max_running=config.rollout.max_running_samples,
        cores=_cores(run_dir / HISTORY_FILE),
    )


def _cores(history: Path) -> int:
    """Returns the CPU cores of the machine on which the run was last started, if it had no GPU; else 0."""
    starts = read_lines(history)
    surroundings = starts[-1].get("surroundings") if starts else None
    machine = str(surroundings.get("machine", "")) if isinstance(surroundings, Mapping) else ""
    found = re.search(r"(\d+) CPU cores", machine)
    return int(found[1]) if found is not None and "no GPU" in machine else 0


def record(row: Row) -> dict[str, Any]:
    """Returns a row as values for `--json`."""
    return {"setting": asdict(row.setting), "found": asdict(row.found), "gain": row.gain}


def show_rows(rows: Sequence[Row], console: Console, *, title: str) -> None:
    """Prints one line for each schedule, with its best split."""
    table = Table(title=title)
    for name in (
        "max_staleness",
        "samples",
        "train + rollout",
        "step, s",
        "gain",
        "train idle",
        "staleness of samples",
    ):
        table.add_column(name, justify="left" if name in ("samples", "staleness of samples") else "right")
    for row in rows:
        setting, found = row.setting, row.found
        split = (
            f"{setting.devices} in turns" if setting.shared else f"{setting.train_devices} + {setting.rollout_devices}"
        )
        ages = "  ".join(f"{age}: {share:.0%}" for age, share in enumerate(found.staleness) if share >= 0.005)
        table.add_row(
            str(setting.max_staleness),
            "recompute, finish" if setting.partial else "drain, prompt",
            split,
            f"{found.step_s:.1f}",
            f"{row.gain:.2f} x",
            f"{found.train_idle:.0%}",
            ages,
        )
    console.print(table)
