"""`rlsdk plan`: what it works out is what engines do and runs take; it takes no device and starts no Ray."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import TASK, config_of, planned

import rlsdk
from rlsdk.cli.preparation.plan import run
from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError, PlacementError
from rlsdk.planning import make_plan, parse_hardware
from rlsdk.registry import Registry
from rlsdk.trainer.runs.prepare import PreparedRun

GIB, MIB = 1 << 30, 1 << 20
SHARDED = [
    "--train-backend", "fsdp", "--placement.pools", "{a: {devices_per_node: [2, 2]}, b: {devices_per_node: [1, 1]}}",
    "--placement.roles", "{actor: a, rollout: b}", "--algorithm.kl_coef", "0.1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "device", "size", "nodes"),
    [
        ("h100", "cuda", 81559 * MIB, (None, None)),
        ("H100:8x4", "cuda", 81559 * MIB, (8, 4)),
        ("80GiB:2x8", "cuda", 80 * GIB, (2, 8)),
        ("24e", None, "expected one of", None),
        ("h10", None, "did you mean 'h100'", None),
        ("h100:8", None, "such as h100:8x8", None),
        ("h100:0x8", None, "at least one node", None),
    ],
)
def test_hardware_is_a_known_name_or_bytes(text: str, device: str | None, size: Any, nodes: Any) -> None:
    if device is None:
        with pytest.raises(ConfigError, match=size):
            parse_hardware(text)
        return
    found = parse_hardware(text)
    assert (found.device, found.device_bytes, (found.num_nodes, found.devices_per_node)) == (device, size, nodes)


def test_ranks_stand_where_the_placement_puts_them(registry: Registry, model: str) -> None:
    plan = planned(registry, model, *SHARDED, hardware="64GiB:2x4")
    assert [(d.pool, d.node, dict(d.ranks)) for d in plan.places.devices] == [
        ("a", 0, {"actor": 0, "ref": 0}), ("a", 0, {"actor": 1, "ref": 1}),
        ("a", 1, {"actor": 2, "ref": 2}), ("a", 1, {"actor": 3, "ref": 3}),
        ("b", 0, {"rollout": 0}), ("b", 1, {"rollout": 1}),
    ]  # fmt: skip
    sizes = {size.what: size for size in plan.batches}
    assert (sizes["step"].prompts, sizes["step"].samples, sizes["step"].tokens) == (64, 512, 512 * 128)
    assert (sizes["rollout, each replica"].samples, sizes["update, each rank"].samples) == (256, 128)
    assert sizes["micro-batch"].tokens == 16384
    with pytest.raises(PlacementError, match="asks for 6 GPUs"):
        planned(registry, model, *SHARDED, hardware="64GiB:2x2")
    with pytest.raises(ConfigError, match="puts the run on 'cpu'"):
        planned(registry, model, "--placement.device", "cpu")


def test_the_reshard_is_that_of_the_planner_on_the_layouts_that_engines_would_have(
    registry: Registry, model: str
) -> None:
    apart = planned(registry, model, *SHARDED, hardware="64GiB:2x4").reshard
    together = planned(registry, model, hardware="cpu").reshard
    assert apart is not None
    assert together is not None
    whole = together.num_parameters * 4
    assert (together.num_bytes, together.moved_bytes, dict(together.by_transport)) == (whole, 0, {"in_process": whole})
    assert (apart.targets, apart.num_bytes, apart.moved_bytes) == (2, 2 * whole, 2 * whole)
    assert apart.moved_bytes == apart.lower_bound_bytes
    assert dict(apart.by_transport) == {"device_ring": whole, "process_group": whole}, "in a node, and between nodes"
    assert apart.between_nodes_bytes == whole
    assert 0 < apart.receiving_bytes <= 4 * apart.bucket_bytes
    # What is named is for what goes between processes; between GPUs of one node the device ring stands in for NCCL.
    two = ("--train-backend", "fsdp", "--placement.devices_per_node", "2", "--sharding.transport", "process_group")
    named = planned(registry, model, *two, hardware="64GiB:1x2").reshard
    assert named is not None
    assert dict(named.by_transport) == {"in_process": whole, "device_ring": whole}


@pytest.mark.parametrize(
    ("shape", "parameters", "biases"),
    [
        ("llama-3.1-70b", 70_553_706_496, 0),
        ("qwen3-235b-a22b", 235_093_634_560, 0),
        ("deepseek-v3-671b", 671_026_419_200, 58 * 256),
    ],
)
def test_of_a_large_model_its_shape_is_enough_and_no_network_is_asked(
    shape: str, parameters: int, biases: int, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`biases` are those of routers, which are served in float32."""

    def refuse(*address: object) -> None:
        raise AssertionError(f"a connection was asked for: {address}")

    monkeypatch.setattr("socket.socket.connect", refuse)
    more = ["--train-backend", "fsdp", "--placement.devices_per_node", "2", "--trainer.prompts_per_step", "4"]
    plan = planned(registry, f"shape:{shape}", *more, "--model.dtype", "bfloat16", hardware="h100:1x2")
    assert plan.reshard is not None
    assert plan.reshard.num_parameters == parameters
    # Float32 shards on two ranks, rounded on their way to two replicas.
    assert plan.reshard.num_bytes == 2 * (2 * parameters + 2 * biases)
    assert plan.reshard.moved_bytes == plan.reshard.lower_bound_bytes
    assert plan.fits is False


def test_what_a_backend_cannot_say_is_unknown_and_never_taken_for_nothing(registry: Registry, model: str) -> None:
    rows = registry.rows()
    silent = Registry(
        replace(row, spec=replace(row.spec, forecast=None)) if row.name == "transformers" else row  # type: ignore[type-var]
        for row in rows
    )
    plan = planned(silent, model)
    assert plan.reshard is None
    assert plan.fits is None
    assert any("has no forecast" in line for line in plan.unknown)
    assert all(any(part.num_bytes is None for part in phase.parts) for phase in plan.memory)


def test_the_command_prints_the_plan_and_leaves_with_whether_it_fits(
    model: str, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--model", model, *TASK]
    run(args, hardware="24GiB", calibration=None, as_json=False)
    said = capsys.readouterr().out
    for section in ("Placement", "Batch sizes", "Weights, each sync", "Memory, the fullest device", "fits: at most"):
        assert section in said
    run(args, hardware="24GiB", calibration=finished_run, as_json=False)
    said = capsys.readouterr().out
    assert "\nSeconds of a step, at the rates of the calibrating run\n" in said
    assert "times are far-fetched: device: here 'cuda', calibrated with 'cpu'" in said
    with pytest.raises(SystemExit) as caught:
        run(args, hardware="1GiB", calibration=None, as_json=False)
    assert caught.value.code == 1
    assert "does not fit: phase" in capsys.readouterr().out


def test_a_plan_is_printed_in_python_and_in_a_notebook_as_the_command_prints_it(model: str) -> None:
    plan = rlsdk.plan(
        model,
        "reasoning_gym:chain_sum",
        "reasoning_gym",
        **{"data.max_prompt_tokens": 64, "rollout.max_response_tokens": 64},
    )
    assert f"{plan.num_nodes} x {plan.devices_per_node} devices of cpu" in str(plan)
    assert str(plan).rstrip().splitlines()[-1].startswith("fits: at most")
    assert repr(plan) == str(plan)
    page = plan._repr_html_()
    cells = [html.unescape(re.sub("</?b>", "", cell)) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", page)]
    assert page.count("<table>") > 3
    assert len(cells) > 40
    assert {word for cell in cells for word in cell.split()} <= set(str(plan).split())
    assert "<b>fits: at most" in page


def test_tables_fit_a_terminal_of_80_columns_and_notes_stand_at_the_end(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles in pools of their own, and a model whose name alone is half a line."""
    named = tmp_path / ("a-model-with-a-name-of-48-letters-" + "x" * 14)
    named.symlink_to(model)
    args = ["--model", str(named), *TASK, "--placement.preset", "disaggregated", "--algorithm.advantage", "gae",
            "--algorithm.kl_coef", "0.1", "--trainer.updates_per_step", "3",
            "--placement.devices_per_node", "4"]  # fmt: skip
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        run(args, hardware="24GiB:1x4", calibration=None, as_json=False)
        tables, _, end = capsys.readouterr().out.rstrip().rpartition("\n\n")
        note, *_, verdict = end.splitlines()
        assert max(map(len, tables.splitlines())) <= width
        assert note.startswith("note: trainer.updates_per_step 3: 512 samples a step")
        assert note.endswith("`--trainer.updates_per_step 2` makes them equal")
        assert verdict.startswith("fits: ")


SCHEMA = {
    "hardware": ["device", "device_bytes", "devices_per_node", "name", "num_nodes"],
    "roles": [
        "backend", "devices_per_rank", "dtype", "head", "lr", "model", "name", "optimizer_bytes", "pool", "ranks",
        "weights_bytes",
    ],
    "places": ["index", "node", "pool", "ranks"],
    "batches": ["note", "prompts", "samples", "tokens", "what"],
    "reshard": [
        "between_nodes_bytes", "bucket_bytes", "busiest_source_bytes", "by_transport", "lower_bound_bytes",
        "moved_bytes", "num_bytes", "num_parameters", "num_tensors", "place_bytes", "predicted_s",
        "quantized_tensors", "quantizing_bytes", "receiving_bytes", "sending_bytes", "targets", "workers",
    ],
    "memory": ["known_bytes", "parts", "phase", "place"],
}  # fmt: skip
"""Of what `--json` prints: docs/planning.md says what it means. Another one is another `schema`."""


def first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def test_the_command_takes_no_device_starts_no_ray_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rlsdk.cli import main\ntry:\n    main(['plan', '--json'])\nexcept SystemExit as left:\n"
        "    assert not left.code, left.code\n"
        "import torch\nassert not torch.cuda.is_initialized()\n"
        "assert 'ray' not in sys.modules or not sys.modules['ray'].is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["fits"] is True
    assert plan["reshard"]["num_parameters"] > 1_000_000
    assert {phase["phase"] for phase in plan["memory"]} == {"sync", "rollout", "log_probs", "update"}
    assert plan["schema"] == 2
    assert {name: sorted(first(value)) for name, value in plan.items() if isinstance(first(value), dict)} == SCHEMA
    assert list(tmp_path.iterdir()) == []


def test_processors_that_devices_wait_for_are_said_of_this_machine_only(registry: Registry, model: str) -> None:
    pools = ["--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]
    many = config_of(model, *pools, "--placement.cpus_per_device", "4096")

    def said(config: RunConfig, **given: Any) -> list[str]:
        notices = make_plan(PreparedRun.of(config, registry, "cpu"), **given).notices
        return [notice for notice in notices if "processors" in notice]

    (notice,) = said(many)
    assert "the 2 devices of 'actor', 'rollout' ask for 8192 processors" in notice
    assert said(many, hardware=parse_hardware("cpu")) == [], "of other hardware only the devices are known"
    assert said(config_of(model, *pools)) == []
