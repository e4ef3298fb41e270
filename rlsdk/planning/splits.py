"""Finds the best split of devices between training and rollout, and the gain of staleness, by simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from rlsdk.interfaces import ConfigError, nearest
from rlsdk.planning.rates import Rates, Setting, Simulated
from rlsdk.planning.simulation import simulate

GIVEN = (
    "decode_ms", "decode_us_per_sample", "prefill_tokens_per_s", "train_tokens_per_s", "sync_s", "switch_s",
    "controller_ms", "cores",
)  # fmt: skip
LENGTHS = ("median", "p99")
TRIES = 4
"""Most splits that are simulated per row."""
SPARE = 1.1
"""Additional devices for training beyond what is needed to keep pace."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Samples of a step."""

    devices: int
    groups_per_step: int
    samples_per_group: int
    lengths: Sequence[int]
    """Token counts of samples, used in turn."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The best split for one schedule."""

    setting: Setting
    found: Simulated
    gain: float
    """Step time of the synchronous run on all devices divided by this one's."""


def log_normal_lengths(*, middle: float, p99: float, most: int, count: int, seed: int = 0) -> list[int]:
    """Log-normal lengths with this median and 99th percentile, clipped to `most` tokens.

    Raises:
        ConfigError: the percentile is below the median.
    """
    if not 0 < middle <= p99:
        raise ConfigError(f"lengths: median {middle:g} and p99 {p99:g}; expected 0 < median <= p99")
    sigma = math.log(p99 / middle) / NormalDist().inv_cdf(0.99)
    drawn = np.random.default_rng(seed).lognormal(math.log(middle), sigma, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, most)]


def compare(work: Workload, rates: Rates, *, staleness: Sequence[int] = (1, 2, 4, 8), steps: int = 6) -> list[Row]:
    """Compares the synchronous run on all devices with each staleness, without and with partial rollouts, at its best
    split."""
    base = Setting(
        train_devices=work.devices,
        rollout_devices=work.devices,
        shared=True,
        groups_per_step=work.groups_per_step,
        samples_per_group=work.samples_per_group,
    )
    plain = simulate(base, rates, work.lengths, steps=4)
    rows = [Row(setting=base, found=plain, gain=1.0)]
    for partial in (False, True):
        share: float | None = None
        for most in staleness:
            setting, best = best_split(work, rates, most, partial=partial, steps=steps, start=share)
            share = setting.rollout_devices / work.devices
            rows.append(Row(setting=setting, found=best, gain=plain.step_s / best.step_s))
    return rows


def best_split(
    work: Workload, rates: Rates, max_staleness: int, *, partial: bool, steps: int, start: float | None = None
) -> tuple[Setting, Simulated]:
    """The split with the shortest step: training gets what it needs to keep pace, rollout the rest.

    Raises:
        ConfigError: too few devices for two pools.
    """
    unit = rates.devices_per_replica
    high = (work.devices - 1) // unit
    if high < 1:
        raise ConfigError(
            f"{work.devices} devices cannot be split: a replica takes {unit}, and training one; expected {unit + 1}"
        )
    tried: dict[int, Simulated] = {}
    replicas = min(max(round((start or 0.5) * work.devices / unit), 1), high)
    base = Setting(
        train_devices=1,
        rollout_devices=1,
        groups_per_step=work.groups_per_step,
        samples_per_group=work.samples_per_group,
        max_staleness=max_staleness,
        partial=partial,
    )

    def at(replicas: int) -> Setting:
        return replace(base, rollout_devices=replicas * unit, train_devices=work.devices - replicas * unit)

    while len(tried) < TRIES and replicas not in tried:
        tried[replicas] = result = simulate(at(replicas), rates, work.lengths, steps=steps)
        training = work.devices - replicas * unit
        needed = training * (1 - result.train_idle) * SPARE if result.train_idle > 0.02 else training * 1.5
        replicas = min(max(math.floor((work.devices - needed) / unit), 1), high)
    best = min(tried, key=lambda replicas: tried[replicas].step_s)
    return at(best), tried[best]


def parse_rates(text: str, *, max_running: int, devices_per_replica: int) -> tuple[Rates, Mapping[str, float]]:
    """Parses `decode_ms=8,train_tokens_per_s=8000,median=2000,p99=30000`: rates, and lengths.

    Raises:
        ConfigError: an unknown name, a value that is not a positive number, or a missing value.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in (*GIVEN, *LENGTHS):
            raise ConfigError(f"--schedule {name!r}{nearest(name, (*GIVEN, *LENGTHS))}; expected {[*GIVEN, *LENGTHS]}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"--schedule {name}={value!r}: expected a number") from None
        if not (math.isfinite(values[name]) and values[name] >= 0):
            raise ConfigError(f"--schedule {name}={value}: expected 0 or more")
    for name in ("decode_ms", "train_tokens_per_s", *LENGTHS):
        if not values.get(name):
            raise ConfigError(f"--schedule lacks {name} (above 0); or give the folder of a run")
    rates = Rates(
        decode_s=values["decode_ms"] / 1e3,
        decode_s_per_sample=values.get("decode_us_per_sample", 0.0) / 1e6,
        prefill_tokens_per_s=values.get("prefill_tokens_per_s", 50_000.0),
        train_tokens_per_s=values["train_tokens_per_s"],
        sync_s=values.get("sync_s", 0.0),
        switch_s=values.get("switch_s", 0.0),
        controller_s=values.get("controller_ms", 0.0) / 1e3,
        cores=int(values.get("cores", 0)),
        max_running=max_running,
        devices_per_replica=devices_per_replica,
    )
    return rates, {name: values[name] for name in LENGTHS}
