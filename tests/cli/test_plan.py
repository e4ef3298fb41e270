"""`rlsdk plan`: what it works out is what engines do and runs take; it takes no device and starts no Ray."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import TASK, config_of, planned

import rlsdk
from benchmarks.memory_forecast import Case, Measured, Size, make_model, measure
from rlsdk.cli.preparation.plan import run
from rlsdk.config import RunConfig
from rlsdk.interfaces import (
    BackendKind,
    Capability,
    ConfigError,
    Forecast,
    ModelSpec,
    OptimSpec,
    PlacementError,
    RankContext,
    RankMemory,
    RolloutEngine,
    RolloutSpec,
    TrainEngine,
    TrainSpec,
    Workload,
)
from rlsdk.kit.memory import pass_memory
from rlsdk.kit.memory.pass_memory import equal_layers, pass_bytes, rows_of_pass
from rlsdk.kit.model.hf import build_model
from rlsdk.planning import make_plan, parse_hardware
from rlsdk.planning.memory import CountedRole, by_phase
from rlsdk.planning.places import PlannedDevice
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.roles.placement import roles
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trained", [True, False])
def test_the_forecast_of_a_built_in_engine_is_its_layout(
    model: str, registry: Registry, dtype: str, trained: bool
) -> None:
    ctx = RankContext(role="actor", node="here")
    spec: TrainSpec | RolloutSpec
    if trained:
        spec = TrainSpec(model=ModelSpec(path=model, dtype=dtype), optim=OptimSpec(), micro_batch_rows=2)
        backend = registry.backend(BackendKind.TRAIN, "torch")
    else:
        spec = RolloutSpec(model=ModelSpec(path=model, dtype=dtype))
        backend = registry.backend(BackendKind.ROLLOUT, "transformers")
    forecast = registry.load_forecast(backend)
    assert forecast is not None
    ((foreseen,),) = forecast([ctx], spec, Workload(row_tokens=32, update_rows=8, running_rows=4)).layouts
    engine = registry.load_engine(backend)()
    engine.initialize(ctx, spec)
    real = engine.layout() if isinstance(engine, TrainEngine) else engine.layout()[0]
    assert isinstance(engine, TrainEngine | RolloutEngine)
    assert replace(foreseen, process=real.process) == real
    engine.close()


def test_memory_of_a_pass_grows_with_its_tokens_and_shrinks_where_layers_are_recomputed(model: str) -> None:
    spec = ModelSpec(path=model)

    def peak(rows: int, **options: bool) -> int:
        found = pass_bytes(spec, num_rows=rows, row_tokens=64, **{"gradient": True, **options})
        assert found is not None
        return found

    assert peak(1, gradient=False) < peak(1, activation_checkpointing=True) < peak(1)
    assert peak(8) == pytest.approx(8 * peak(1), rel=0.1)
    assert pass_bytes(replace(spec, dtype="bfloat16"), num_rows=8, row_tokens=64, gradient=True) < peak(8)  # type: ignore[operator]


@pytest.mark.parametrize(
    "options", [{"gradient": False}, {"gradient": True}, {"gradient": True, "activation_checkpointing": True}], ids=str
)
def test_memory_of_many_like_layers_is_that_of_a_few_and_so_much_more_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "deep", layers=9)))
    from_few = pass_bytes(spec, num_rows=2, row_tokens=64, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(pass_memory, "SAMPLED", (2, 99))
    assert pass_bytes(spec, num_rows=2, row_tokens=64, **options) == from_few  # type: ignore[arg-type]
    mixed = write_tiny_model(tmp_path / "mixed", use_sliding_window=True, max_window_layers=1, sliding_window=8)
    assert equal_layers(build_model(spec, empty=True)) == list(range(9))
    assert equal_layers(build_model(ModelSpec(path=str(mixed)), empty=True)) == []


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"micro_batch_tokens": 256}, (4, 3)),
        ({"micro_batch_tokens": 10}, (1, 10)),
        ({"micro_batch_rows": 64}, (10, 1)),
        ({"micro_batch_rows": 3}, (3, 4)),
    ],
)
def test_rows_of_a_pass_are_as_micro_batches_cuts_them(limits: dict[str, int], expected: tuple[int, int]) -> None:
    from rlsdk.kit.model.microbatch import micro_batches

    spec = TrainSpec(model=ModelSpec(path=""), **limits)  # type: ignore[arg-type]
    assert rows_of_pass(spec, row_tokens=64, num_rows=10) == expected
    cut = micro_batches(torch.full((10,), 64), max_tokens=spec.micro_batch_tokens, max_rows=spec.micro_batch_rows)
    assert (max(map(len, cut)), len(cut)) == expected


SMALL = Size(hidden=256, layers=4, vocabulary=4096, row_tokens=256, micro_batch_rows=4, micro_batches=2)


def test_an_engine_takes_the_memory_that_was_foreseen(tmp_path: Path) -> None:
    """The built-in one; others are held against their forecasts by the benchmark that this is a case of."""
    case, model = Case(backend="torch", world=1), str(make_model(tmp_path / "m", SMALL))
    found: dict[str, Measured] = {row.phase: row for row in measure(case, SMALL, model)}
    assert found["update"].measured_bytes > 100 * MIB
    assert abs(found["update"].error) < 0.3, found


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


PPO = ["--algorithm.advantage", "gae", "--algorithm.kl_coef", "0.1"]


def ppo(model: str, *more: str) -> list[str]:
    """All five roles, two reward models."""
    return [*PPO, "--reward_models", f"[{{path: {model}, name: a}}, {{path: {model}, name: b}}]", *more]


@pytest.mark.parametrize(
    ("preset", "devices"),
    [("colocate_all", 1), ("colocate_actor_ref", 5), ("colocate_critic_reward", 4), ("disaggregated", 6)],
)
def test_every_preset_is_planned_for_five_roles(preset: str, devices: int, registry: Registry, model: str) -> None:
    placed = ["--placement.preset", preset, "--placement.devices_per_node", str(devices)]
    plan = planned(registry, model, *ppo(model, *placed), hardware="64GiB:1x8")
    assert [role.name for role in plan.roles] == ["actor", "rollout", "ref", "critic", "reward.a", "reward.b"]
    assert {role.name: role.lr for role in plan.roles if role.lr is not None} == {"actor": 1e-6, "critic": 1e-5}
    assert [role.head for role in plan.roles] == ["lm", "lm", "lm", "value", "score", "score"]
    assert {name for device in plan.places.devices for name in device.ranks} == {role.name for role in plan.roles}
    assert plan.fits is True, plan.unknown
    held = {role.name: role for role in plan.roles}
    assert held["actor"].optimizer_bytes == 2 * (held["actor"].weights_bytes or 0)
    assert held["critic"].optimizer_bytes == 2 * (held["critic"].weights_bytes or 0)
    assert held["ref"].optimizer_bytes == held["reward.a"].optimizer_bytes == 0


def test_on_one_gpu_only_who_works_is_on_it_and_on_a_cpu_everybody_stays(registry: Registry, model: str) -> None:
    """What `DeviceTurns` does: tests/trainer/test_device_turns.py."""

    def weights_of(hardware: str) -> dict[str, list[str]]:
        plan = planned(registry, model, *ppo(model), hardware=hardware)
        return {
            phase.phase: sorted(part.role for part in phase.parts if part.what == "weights") for phase in plan.memory
        }

    assert weights_of("64GiB") == {
        "sync": ["actor", "rollout"],
        "rollout": ["rollout"],
        "reward.a scores": ["reward.a"],
        "reward.b scores": ["reward.b"],
        "ref log_probs": ["ref"],
        "critic values": ["critic"],
        "log_probs": ["actor"],
        "critic update": ["critic"],
        "update": ["actor"],
    }
    everybody = ["actor", "critic", "ref", "reward.a", "reward.b", "rollout"]
    assert set(map(tuple, weights_of("cpu").values())) == {tuple(everybody)}


def test_a_teacher_in_a_rollout_engine_works_after_the_rollout_and_an_exact_one_leaves_its_head(
    registry: Registry, model: str
) -> None:
    """On one GPU: what `DeviceTurns` does with the one, and `load_teacher` with the other."""

    def phases_of(given: str, *more: str) -> dict[str, dict[str, int | None]]:
        flags = ["--teachers", given, "--algorithm", "on_policy_distillation", *more]
        plan = planned(registry, model, *flags, hardware="64GiB")
        return {
            phase.phase: {f"{part.role} {part.what}": part.num_bytes for part in phase.parts if part.role}
            for phase in plan.memory
        }

    served = phases_of(f"[{{path: {model}, rollout: {{}}}}]")
    assert list(served) == ["sync", "rollout", "teacher log_probs", "log_probs", "update"]
    assert {name.split()[0] for name in served["rollout"]} == {"rollout"}
    assert {"teacher weights", "teacher keys, values"} <= served["teacher log_probs"].keys()
    assert {name.split()[0] for name in served["teacher log_probs"]} == {"teacher"}
    exact = phases_of(f"[{{path: {model}}}]", "--algorithm.distillation.objective", "exact")
    config = json.loads((Path(model) / "config.json").read_text())
    held = {parts["actor teacher's head"] for parts in exact.values()}
    assert held == {config["vocab_size"] * config["hidden_size"] * 4}


def test_a_sync_to_another_pool_leaves_the_optimizer_where_it_is(registry: Registry, model: str) -> None:
    placed = ["--placement.preset", "colocate_actor_ref", "--placement.devices_per_node", "2"]
    plan = planned(registry, model, *PPO[2:], *placed, hardware="64GiB:1x2")
    (sync,) = (phase for phase in plan.memory if (phase.place, phase.phase) == ("pool actor+ref", "sync"))
    assert {part.what for part in sync.parts if part.role == "actor"} == {"weights", "optimizer"}


def test_memory_of_the_critics_update_counts_its_own_optimizer(registry: Registry, model: str) -> None:
    plan = planned(registry, model, *ppo(model), hardware="64GiB")
    critic = next(role for role in plan.roles if role.name == "critic")
    (update,) = (phase for phase in plan.memory if phase.phase == "critic update")
    found = {part.what: part.num_bytes for part in update.parts if part.role == "critic"}
    assert found["optimizer"] == critic.optimizer_bytes
    assert found["weights"] == found["gradients"] == critic.weights_bytes
    assert (found["activations"] or 0) > 0
    assert {part.role for part in update.parts} == {"critic", ""}


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


def device(**ranks: int) -> PlannedDevice:
    return PlannedDevice(pool="all", index=0, node=0, ranks=ranks)


def test_roles_that_share_a_gpu_take_turns_on_its_memory_as_device_turns_have_them(model: str) -> None:
    actor = Forecast(
        layouts=(),
        memory=(
            RankMemory(
                weights_bytes=1 * GIB, optimizer_bytes=10 * GIB, gradients_bytes=100 * GIB, forward_bytes=1000 * GIB,
                backward_bytes=10000 * GIB,
            ),
        ),
    )  # fmt: skip
    rollout = Forecast(
        layouts=(),
        memory=(
            RankMemory(
                weights_bytes=2 * GIB, cache_bytes=20 * GIB, cache_stays=True, asleep_bytes=100000 * GIB,
            ),
        ),
    )  # fmt: skip

    def totals(shared: bool) -> dict[str, int]:
        able = {"actor": Capability.OFFLOAD, "rollout": Capability.SLEEP}
        forecasts = {"actor": actor, "rollout": rollout}
        counted = {
            role.name: CountedRole.of(role, forecasts[role.name], frozenset({able[role.name]}), shared=shared)
            for role in roles(config_of(model), "cuda")
        }
        phases = by_phase([device(actor=0, rollout=0)], counted, kind="cuda", block_bytes=0, source="actor")
        return {p.phase: sum(part.num_bytes or 0 for part in p.parts if part.role) // GIB for p in phases}

    assert totals(True) == {"sync": 100000 + 1 + 2, "rollout": 22, "log_probs": 101001, "update": 110111}
    assert totals(False) == {"sync": 33, "rollout": 33, "log_probs": 1033, "update": 10133}


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


def test_counting_a_pass_warns_of_nothing(tmp_path: Path) -> None:
    """`rlsdk plan` printed a deprecation of transformers."""
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "tiny")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for recompute in (False, True):
            assert pass_bytes(spec, num_rows=1, row_tokens=8, gradient=True, activation_checkpointing=recompute)


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
