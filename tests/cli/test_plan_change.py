"""A plan that does not fit names the smallest change with which it does."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlsdk
from rlsdk.config import RunConfig, load_config
from rlsdk.planning import changes, parse_hardware, smallest
from rlsdk.registry import Registry


def config_of(*flags: str) -> RunConfig:
    return load_config(
        overrides=["--model", "x", "--data", "x", "--reward", "exact", *flags], registry=Registry.discover()
    )


def test_changes_begin_with_the_smallest_and_stay_within_the_hardware() -> None:
    found = [*changes(config_of("--train-backend", "fsdp"), Registry.discover(), parse_hardware("80GiB:2x4"))]
    assert found[0] == [{"train.activation_checkpointing": True}], "of the same devices"
    assert found[1][0] == {"placement.devices_per_node": 2}
    assert {"placement.devices_per_node": 2, "rollout.tp_size": 2} in found[1]
    last = found[len(found) // 2 - 1][0]
    assert last == {"placement.num_nodes": 2, "placement.devices_per_node": 4}, "whole nodes"
    offloaded = [change for group in found for change in group if "train.fsdp.cpu_offload" in change]
    assert offloaded == [change for group in found[len(found) // 2 :] for change in group], "after all devices"
    pools = config_of(
        "--placement.pools", "{a: {devices_per_node: [1]}}", "--placement.roles", "{actor: a, rollout: a}"
    )
    assert not [*changes(pools, Registry.discover(), parse_hardware("80GiB:2x4"))], "whose devices somebody chose"


@pytest.mark.parametrize(("least", "expected"), [(1, "a"), (3, "c"), (4, "d"), (9, None)])
def test_the_first_change_that_fits_is_found_without_asking_for_all(least: int, expected: str | None) -> None:
    found = [[{"a": 1}, {"b": 2}], [{"c": 3}, {"d": 4}]]
    asked = list[int]()

    def fits(change: dict[str, object]) -> bool:
        (size,) = change.values()
        assert isinstance(size, int)
        asked.append(size)
        return size >= least

    change = smallest(found, fits)  # type: ignore[arg-type]
    assert (next(iter(change)) if change else None) == expected
    assert len(asked) <= 3


def test_a_run_that_does_not_fit_fits_with_the_change_that_its_plan_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"{at}+1?", "answer": str(at + 1)} for at in range(80)]
    fields = {
        "data__max_prompt_tokens": 64, "rollout__max_response_tokens": 64, "train__backend": "fsdp",
        "rollout__backend": "transformers", "train__micro_batch_tokens": 1024,
    }  # fmt: skip
    plan = rlsdk.plan("shape:qwen2.5-0.5b", rows, "exact", hardware="8GiB:1x4", **fields)
    assert plan.fits is False
    assert plan.change, plan
    assert "fits with: " in str(plan)
    changed = {name.replace(".", "__"): value for name, value in plan.change.items()}
    assert rlsdk.plan("shape:qwen2.5-0.5b", rows, "exact", hardware="8GiB:1x4", **fields, **changed).fits
    assert "looking for a change" in capsys.readouterr().err
