"""The curves of a page, and their points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsdk.system.quantities import counted
from rlsdk.trainer.tracking.step_times import phase_names
from rlsdk.views.report.markup import escaped, rounded
from rlsdk.views.report.record import RunRecord
from rlsdk.views.report.state import elapsed

LEAST_FLAT = 3
"""Fewest steps after which a curve without a change counts as flat."""
MOST_POINTS = 1500
"""Most points of a curve; for more, neighbouring steps are averaged. A screen has fewer columns."""
OWN_TERMS = frozenset(
    {"reward/mean", "reward/std", "reward/accuracy", "reward/invalid_share", "reward/groups_with_signal"}
)
"""Metrics under `reward/` that are not terms of the reward."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart."""

    title: str
    unit: str = ""
    """`%`: values are shares, shown times 100."""
    curves: Mapping[str, str]
    """Label -> metric."""
    note: str = ""
    kind: str = "lines"
    """Or `stack`."""


CHARTS = (
    Chart(title="Accuracy", unit="%", note="share of samples that count as correct",
          curves={"training samples": "reward/accuracy", "held-out, sampled": "eval/accuracy_sampled",
                  "held-out, greedy": "eval/accuracy_greedy", "pairs, reward model": "reward_model/accuracy",
                  "pairs, DPO": "dpo/accuracy", "answers, KTO": "kto/accuracy",
                  "steps, process rewards": "process_reward/accuracy",
                  "held-out pairs": "eval/accuracy_pairs"}),
    Chart(title="Score", note="the weighted sum that was trained on",
          curves={"mean": "reward/mean", "std over samples": "reward/std", "held-out": "eval/reward_sampled"}),
    Chart(title="Loss", curves={"supervised": "sft/loss", "held-out answers": "sft/eval_loss",
                                "reward model": "reward_model/loss", "DPO": "dpo/loss",
                                "KTO": "kto/loss", "process rewards": "process_reward/loss"}),
    Chart(title="Response length", unit="", note="tokens", curves={
        "mean": "response/tokens_mean", "longest": "response/tokens_max"}),
    Chart(title="Truncated and failed", unit="%", note="share of samples", curves={
        "cut at the limit": "response/truncated_share", "without a score": "reward/invalid_share"}),
    Chart(title="Prompts with a signal", unit="%", note="share of prompts whose samples scored differently",
          curves={"of those trained on": "reward/groups_with_signal"}),
    Chart(title="Entropy", note="nats, estimated from the samples", curves={"policy": "policy/entropy"}),
    Chart(title="KL", note="nats", curves={"of the update": "policy/approx_kl", "to the reference": "policy/kl"}),
    Chart(title="Rollout against training", note="mean difference of the two engines' log-probs, nats",
          curves={"mean": "parity/log_prob_diff_mean"}),
    Chart(title="Clipped tokens", unit="%", curves={"policy": "policy/clip_fraction"}),
    Chart(title="Gradient norm", note="before clipping", curves={
        "policy": "policy/grad_norm", "critic": "critic/grad_norm"}),
    Chart(title="Critic", note="share of the returns' variance that it explains", curves={
        "explained variance": "critic/explained_variance"}),
    Chart(title="Staleness", note="trainer steps behind", curves={
        "mean": "schedule/staleness_mean", "largest": "schedule/staleness_max"}),
    Chart(title="Idle time", unit="%", note="share of each pool's time", curves={
        "training pool": "time/train_idle_share", "rollout pool": "time/rollout_idle_share"}),
    Chart(title="Throughput", note="tokens per second, prompts and tools included", curves={
        "all tokens": "throughput/tokens_per_s"}),
    Chart(title="Machine", unit="%", note="of the controller's machine", curves={
        "processors": "throughput/cpu_share", "main memory": "throughput/memory_share"}),
)  # fmt: skip
"""All charts in the order of the page; charts without values are left out."""


def charts_of(records: Sequence[RunRecord]) -> list[Chart]:
    """The charts that have values."""
    terms = {name.removeprefix("reward/"): name for record in records for name in terms_of(record)}
    found = [*CHARTS]
    if terms:
        found.insert(2, Chart(title="Terms of the reward", note="before their weights", curves=terms))
    if len(records) == 1:
        found.append(_phases(records[0]))
    has = {name for record in records for name in record.names}
    return [chart for chart in found if has & set(chart.curves.values())]


def others_of(records: Sequence[RunRecord], shown: Iterable[Chart]) -> list[Chart]:
    """One chart for each metric that no other shows."""
    taken = {metric for chart in shown for metric in chart.curves.values()}
    names = dict.fromkeys(name for record in records for name in record.names)
    return [Chart(title=name, curves={name.rpartition("/")[2]: name}) for name in sorted(names) if name not in taken]


def terms_of(record: RunRecord) -> list[str]:
    """Names of the metrics that are terms of the reward."""
    names = [name for name in record.names if name.startswith("reward/")]
    return [name for name in names if name not in OWN_TERMS and name.count("/") == 1 and not name.endswith("_share")]


def data_of(records: Sequence[RunRecord], charts: Sequence[Chart], names: Sequence[str] = ()) -> dict[str, Any]:
    """What the page's script draws: `steps`, and for each chart its curves with a value or null for each step.

    A chart begins with its own first value (`first`: at which of `steps`) and ends with its last one. Warm start and
    training both count their steps from 1; without this, the longer of the two would squeeze the other's charts.
    With `names`, one for each run, curves are called and coloured by run.
    """
    steps = sorted({step for record in records for step in record.steps})
    buckets = _buckets(len(steps))
    place = {step: at for at, step in enumerate(steps)}
    drawn = []
    for chart in charts:
        series: list[dict[str, Any]] = []
        for index, record in enumerate(records):
            for label, metric in chart.curves.items():
                values = _placed(record, metric, place, 100.0 if chart.unit == "%" else 1.0)
                if any(value is not None for value in values):
                    entry = {"label": names[index] if names else label, "values": rounded(_averaged(values, buckets))}
                    series.append(entry | {"color": index} if names else entry)
        first = _cut_to_values(series)
        drawn.append({"title": chart.title, "unit": chart.unit, "kind": chart.kind, "first": first, "series": series})
    axes = [_axes(record, place, buckets) for record in records]
    shared = [name for name in ("time", "tokens") if all(name in found for found in axes)]
    return {
        "steps": [steps[part[-1]] for part in buckets],
        "axes": {name: [found[name] for found in axes] for name in shared},
        "charts": drawn,
    }


def _axes(record: RunRecord, place: Mapping[int, int], buckets: Sequence[range]) -> dict[str, list[float | None]]:
    """Where each point of a run stands on the other axes; null where it has no step."""
    found: dict[str, list[float | None]] = {}
    for name, values in elapsed(record.metrics).items():
        placed: list[float | None] = [None] * len(place)
        for step, value in zip(record.steps, values, strict=True):
            placed[place[step]] = value
        found[name] = list(rounded(max((value for at in part if (value := placed[at]) is not None), default=None)
                                   for part in buckets))  # fmt: skip
    return found


def is_flat(records: Sequence[RunRecord], chart: Chart) -> bool:
    """Whether no curve of a chart ever changes, over enough steps to say so."""
    curves = [[value for value in record.values(metric) if value is not None]
              for record in records for metric in chart.curves.values()]  # fmt: skip
    long = max(map(len, curves), default=0) >= LEAST_FLAT
    return long and chart.kind == "lines" and all(max(curve) == min(curve) for curve in curves if curve)


def _cut_to_values(series: Sequence[dict[str, Any]]) -> int:
    """Cuts all curves of a chart to the range in which one of them has a value; returns where that begins."""
    known = [at for entry in series for at, value in enumerate(entry["values"]) if value is not None]
    first, end = (min(known), max(known) + 1) if known else (0, 0)
    for entry in series:
        entry["values"] = entry["values"][first:end]
    return first


def frames(charts: Sequence[Chart], first: int = 0) -> str:
    """The frames of the charts, in the order of `data_of`."""
    return '<div class="charts">' + "".join(
        f'<figure data-names="{escaped(" ".join((chart.title, *chart.curves, *chart.curves.values())).lower())}">'
        f"<h3>{escaped(chart.title)}</h3><p class=quiet>{escaped(chart.note) or '&nbsp;'}</p>"
        f'<div data-chart="{first + at}"></div></figure>'
        for at, chart in enumerate(charts)
    ) + "</div>"  # fmt: skip


def folded(records: Sequence[RunRecord], charts: Sequence[Chart], first: int = 0) -> tuple[list[Chart], str]:
    """The charts in the order in which they are shown, and their frames: those that never changed stand apart, closed.
    `first`: place of the first one in the data."""
    moving = [chart for chart in charts if not is_flat(records, chart)]
    flat = [chart for chart in charts if chart not in moving]
    made = frames(moving, first) if moving else ""
    if flat:
        named = ", ".join(chart.title for chart in flat)
        made += (
            f'<details class="flat"><summary>{counted(len(flat), "chart")} without any change: {escaped(named)}'
            f"</summary>{frames(flat, first + len(moving))}</details>"
        )
    return [*moving, *flat], made


def _phases(record: RunRecord) -> Chart:
    names = [name for name in phase_names(record.names) if name != "time/eval_s"]
    return Chart(
        title="Time by phase",
        unit=" s",
        kind="stack",
        note="seconds of each step",
        curves={name.removeprefix("time/").removesuffix("_s").replace("_", " "): name for name in names},
    )


def _placed(record: RunRecord, metric: str, place: Mapping[int, int], factor: float) -> list[float | None]:
    values: list[float | None] = [None] * len(place)
    for step, value in zip(record.steps, record.values(metric), strict=True):
        values[place[step]] = None if value is None else value * factor
    return values


def _buckets(count: int) -> list[range]:
    """Positions that are averaged to one point each; single positions if there are few."""
    stride = -(-count // MOST_POINTS)
    return [range(at, min(at + stride, count)) for at in range(0, count, max(stride, 1))]


def _averaged(values: Sequence[float | None], buckets: Sequence[range]) -> Iterator[float | None]:
    for part in buckets:
        known = [value for at in part if (value := values[at]) is not None]
        yield sum(known) / len(known) if known else None
