"""Memory of a plan: forecasts of engines, passes, and who is on a device in which phase."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_cases import config_of, planned

from benchmarks.memory_forecast import Case, Measured, Size, make_model, measure
from rlsdk.interfaces import (
    BackendKind,
    Capability,
    Forecast,
    ModelSpec,
    OptimSpec,
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
from rlsdk.planning.memory import CountedRole, by_phase
from rlsdk.planning.places import PlannedDevice
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.roles.placement import roles

GIB, MIB = 1 << 30, 1 << 20


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


def test_counting_a_pass_warns_of_nothing(tmp_path: Path) -> None:
    """`rlsdk plan` printed a deprecation of transformers."""
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "tiny")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for recompute in (False, True):
            assert pass_bytes(spec, num_rows=1, row_tokens=8, gradient=True, activation_checkpointing=recompute)
