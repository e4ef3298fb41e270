"""Runs that send the adapter alone: against runs that send it merged, with what is said, planned and measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from test_loop import Recorder, closing_engines, config_of, model, registry, run, session_of, trainer_of

from rlsdk.config.checks.findings import Findings
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import AdapterSpec, ConfigError, ModelSpec, WeightPart
from rlsdk.kit.model.adapters import adapter_shapes
from rlsdk.kit.model.hf import build_model
from rlsdk.planning import make_plan, show
from rlsdk.registry import Registry
from rlsdk.trainer.roles.session import sharding_manager
from rlsdk.trainer.runs.prepare import PreparedRun, prepare, with_sync

__all__ = ["model", "registry"]

LORA = ("--model.lora.rank", "4", "--train.optim.lr", "1e-2", "--model.lora.sync", "adapter")
BEHIND = ("--schedule.max_staleness", "1", "--placement.preset", "disaggregated", "--placement.devices_per_node", "2")
OWN = {"sync/bytes", "sync/moved_bytes", "sync/base_bytes", "sync/adapter_effect"}
"""Metrics of a sync."""


@pytest.mark.parametrize("more", [(), BEHIND], ids=["in turns", "one step behind"])
def test_the_adapter_alone_gives_the_numbers_of_merged_weights(
    more: tuple[str, ...], model: str, registry: Registry, tmp_path: Path
) -> None:
    apart = run(config_of(model, registry, 3, *LORA, *more), registry, tmp_path / "apart").steps
    merged = run(config_of(model, registry, 3, *LORA, "--model.lora.sync", "merged", *more), registry, tmp_path / "m")
    for mine, theirs in zip(apart, merged.steps, strict=True):
        assert {name: value for name, value in mine.items() if name not in OWN} == {
            name: pytest.approx(value, abs=5e-5) for name, value in theirs.items() if name not in OWN
        }
        assert not OWN & theirs.keys() - {"sync/bytes", "sync/moved_bytes"}


def test_the_base_is_sent_once(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 3, *LORA)
    view = Recorder()
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        trainer.fit()
        engine = trainer.session.actor.group.hosts[0].engine  # type: ignore[attr-defined]
        numel = {part: sum(shard.tensor.numel() for shard in engine.part_shards(part)) for part in WeightPart}
        report, tensors = stage.publisher.last_report, len(engine.part_layout(WeightPart.ADAPTER).boxes)
    steps = view.steps
    low, below = 4.0 * numel[WeightPart.ADAPTER], 4.0 * numel[WeightPart.BASE]
    assert [step["sync/bytes"] for step in steps] == [low + below, low, low]
    assert [step["sync/base_bytes"] for step in steps] == [below, 0.0, 0.0]
    assert steps[0]["sync/adapter_effect"] == 0.0, "B begins at 0"
    assert all(step["sync/adapter_effect"] > 1e-3 for step in steps[1:])
    assert report is not None
    (receipt,) = report.receipts
    assert receipt.version == report.version
    assert len(receipt.fingerprints) == report.num_tensors == report.changed_tensors == tensors


def test_every_replica_gets_it(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 2, *LORA)
    one, two = (run(config, registry, tmp_path / str(n), replicas=n).steps for n in (1, 2))
    for mine, theirs in zip(two, one, strict=True):
        assert mine["sync/bytes"] == 2 * theirs["sync/bytes"]
        assert mine["sync/base_bytes"] == 2 * theirs["sync/base_bytes"]


def test_a_replaced_replica_gets_the_base_again(model: str, registry: Registry) -> None:
    """A replica with a new process gets a new manager."""
    config = config_of(model, registry, 1, *LORA)
    with closing_engines(session_of(config, registry)) as session:
        reports = [session.weights().sync(version, expect_change=False) for version in (0, 1)]
        new = sharding_manager(config.sharding, registry, session.actor, session.rollout, timeout_s=60.0)
        session.actor.run("close_transports")
        reports.append(new.sync(1, expect_change=False))
    whole = reports[0].num_bytes
    assert [(report.base_bytes or 0) > 0 for report in reports] == [True, False, True]
    assert [report.num_bytes for report in reports] == [whole, reports[1].num_bytes, whole]
    assert all(report.moved_bytes <= report.lower_bound_bytes for report in reports)


def prepared(model: str, registry: Registry, *flags: str) -> PreparedRun:
    config = config_of(model, registry, 2, *LORA[:2], *flags)
    return prepare(config, registry, Training.RL, Findings(), device="cpu")


@pytest.mark.parametrize(
    ("flags", "sync", "why"),
    [
        ((), "adapter", "the adapter alone"),
        (
            (*BEHIND, "--schedule.on_new_weights", "recompute"),
            "merged",
            "running samples go on",
        ),
        (("--model.lora.sync", "merged"), "merged", None),
        (("--model.lora.sync", "adapter"), "adapter", None),
    ],
)
def test_a_run_says_which_way_it_chose(
    flags: tuple[str, ...], sync: str, why: str | None, model: str, registry: Registry
) -> None:
    found = prepared(model, registry, *flags)
    assert found.config.model.lora.sync == sync
    served = next(role for role in found.table if role.is_rollout)
    assert (served.model.adapter is not None) == served.keeps_weights == (sync == "adapter")
    said = [notice for notice in found.notices if "model.lora.sync" in notice]
    assert [why in notice for notice in said if why] == [True] * (why is not None)


def test_a_model_with_experts_is_served_merged_unless_asked_otherwise(model: str, registry: Registry) -> None:
    config = config_of(model, registry, 2, *LORA[:4])
    for fields, sync in (({"num_experts": 4}, "merged"), ({"num_local_experts": 0}, "adapter"), ({}, "adapter")):
        found, said = with_sync(config, registry, Training.RL, fields)
        assert found.model.lora.sync == sync
        assert ("experts" in said[0]) == bool(fields.get("num_experts"))


def test_what_cannot_be_sent_alone_is_refused_by_name(model: str, registry: Registry) -> None:
    stale = (*BEHIND, "--schedule.on_new_weights", "keep")
    with pytest.raises(ConfigError, match=r"on_new_weights.*'keep' has no effect with model\.lora\.sync 'adapter'"):
        prepared(model, registry, "--model.lora.sync", "adapter", *stale)


def test_the_plan_shows_both_parts(model: str, registry: Registry) -> None:
    plan = make_plan(prepared(model, registry))
    shapes = adapter_shapes(build_model(ModelSpec(path=model), empty=True), AdapterSpec(rank=4))
    assert plan.adapter_bytes == 4 * sum(rank_in[0] * rank_in[1] for rank_in in shapes.values())
    assert plan.reshard is not None
    assert make_plan(prepared(model, registry, "--model.lora.sync", "merged")).adapter_bytes == 0
    with (console := Console(width=120)).capture() as captured:
        show(plan, console)
    said = captured.get()
    assert "Weights below the adapter, sent once" in said
    assert "the adapter alone, each sync" in said
