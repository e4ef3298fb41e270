"""What a run asks of the installed plugins, refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_plugins import make_registry

from rlsdk.config import PairTraining, check_run, load_config, pair_roles, roles
from rlsdk.interfaces import BackendKind, BackendSpec, ConfigError, RegisterBackend, hookimpl
from rlsdk.registry import Registry

TASK = ["--model", "m", "--data", "reasoning_gym:chain_sum", "--reward", "gsm8k"]


def problems(registry: Registry, *flags: str, model_type: str | None = None, device: str | None = None) -> list[str]:
    return [
        str(problem) for problem in check_run(load_config([], [*TASK, *flags], registry), registry, model_type, device)
    ]


def test_the_defaults_run_anywhere(registry: Registry) -> None:
    assert problems(registry, model_type="qwen3", device="cpu") == []


def test_what_a_run_cannot_be_without_is_asked_for(registry: Registry) -> None:
    config = load_config([], [], registry)
    assert [problem.path for problem in check_run(config, registry)] == ["model.path", "data.train", "rewards"]
    assert [problem.path for problem in check_run(config, registry, train_only=True)] == ["model.path", "data.train"]


def test_a_train_backend_that_cannot_is_refused_with_who_can(registry: Registry) -> None:
    flags = ["--train-backend", "turbo", "--model.dtype", "float32", "--placement.device", "cpu"]
    found = problems(registry, *flags, model_type="qwen3")
    able = "; installed and able: 'torch'"
    assert found == [
        f"placement.device: train backend 'turbo' does not run on 'cpu' (but on 'cuda'){able}",
        f"model.dtype: train backend 'turbo' does not compute in 'float32' (but in 'bfloat16'){able}",
        f"model.path: train backend 'turbo' does not run models of type 'qwen3' (but 'llama'){able}",
    ]


def test_the_device_that_auto_came_out_as_is_checked(registry: Registry) -> None:
    flags = ["--train-backend", "turbo", "--model.dtype", "bfloat16"]
    assert problems(registry, *flags) == []
    assert "does not run on 'cpu'" in problems(registry, *flags, device="cpu")[0]


@pytest.mark.parametrize(
    ("flags", "path", "capability"),
    [
        (["--rollout.min_p", "0.1"], "rollout.min_p", "min_p"),
        (["--rollout.stop_strings", "[x]"], "rollout.stop_strings", "stop_strings"),
    ],
)
def test_a_sampling_field_needs_its_capability(
    flags: list[str], path: str, capability: str, registry: Registry
) -> None:
    (found,) = problems(registry, "--rollout-backend", "calm", *flags)
    assert found.startswith(f"{path}: rollout backend 'calm' does not support '{capability}'")
    assert "installed and able: 'transformers'" in found
    assert problems(registry, *flags) == []


def test_a_single_process_engine_does_not_span_several_devices(registry: Registry) -> None:
    (found,) = problems(registry, "--placement.devices_per_node", "4")
    assert found == (
        "placement.devices_per_node: train backend 'torch' spans at most 1 process, not 4; installed and able: 'turbo'"
    )
    pools = ["--placement.pools", "{a: {devices_per_node: [2]}, b: {devices_per_node: [1]}}"]
    (found,) = problems(registry, *pools, "--placement.roles", "{actor: a, rollout: b}")
    assert found.startswith("placement.pools: train backend 'torch' spans at most 1 process, not 2")


class Lone:
    """A train backend that claims nothing, and says nothing of how many processes it spans."""

    @hookimpl
    def rlsdk_register_backends(self, register: RegisterBackend) -> None:
        register(BackendSpec(name="lone", kind=BackendKind.TRAIN, engine="nowhere:Engine"))


@pytest.fixture
def with_lone() -> Registry:
    registry = make_registry()
    registry.register_module(Lone())
    return registry


def test_several_ranks_need_a_backend_that_splits(with_lone: Registry) -> None:
    flags = ["--train-backend", "lone", "--placement.preset", "disaggregated", "--placement.devices_per_node", "4"]
    config = load_config([], [*TASK, *flags], with_lone)
    assert check_run(config, with_lone, devices={"actor": 1, "rollout": 3}) == []
    (found,) = check_run(config, with_lone, devices={"actor": 2, "rollout": 2})
    assert str(found) == (
        "placement.devices_per_node: train backend 'lone' supports neither 'data_parallel' nor another way to use 2 "
        "processes; installed and able: 'turbo'"
    )


def test_a_model_that_must_be_written_needs_export(with_lone: Registry) -> None:
    def found(*flags: str, backend: str = "lone", train_only: bool = False) -> list[str]:
        config = load_config([], [*TASK, "--train-backend", backend, *flags], with_lone)
        return [str(problem) for problem in check_run(config, with_lone, train_only=train_only)]

    said = "train backend 'lone' does not support 'export'; installed and able: 'torch'"
    warm, ref = ["--sft.steps", "5"], ["--algorithm.kl_coef", "0.1"]
    # `rlsdk sft`, `reward-model` and `dpo` end with a model; a reference policy is read from that of a warm start.
    assert found(*warm, train_only=True) == [f"train.backend: {said}"]
    assert found(*warm, *ref) == [f"sft.steps: {said}"]
    assert found("--sft.epochs", "1", *ref) == [f"sft.epochs: {said}"]
    # Nothing else has to write one: checkpoints do without.
    assert found() == found(*warm) == found(*ref) == found(*warm, *ref, "--ref.path", "r") == []
    assert found(*warm, *ref, backend="torch") == found(*warm, backend="torch", train_only=True) == []


def test_of_a_pair_only_the_actor_must_write_a_model(with_lone: Registry) -> None:
    for backend, paths in (("torch", []), ("lone", ["train.backend"])):
        flags = ["--train-backend", backend, "--ref.backend", "lone", "--ref.path", "r"]
        config = load_config([], [*TASK, *flags], with_lone)
        table = pair_roles(config, PairTraining.DPO, roles(config, needed=PairTraining.DPO.role_names(config)))
        found = check_run(config, with_lone, table=table, train_only=True)
        assert [problem.path for problem in found] == paths


@pytest.mark.parametrize("axis", ["pp_size", "dp_size"])
def test_any_axis_of_a_replica_needs_a_backend_that_spreads(axis: str, registry: Registry) -> None:
    flags = ["--train-backend", "turbo", "--model.dtype", "bfloat16", "--placement.devices_per_node", "4"]
    found = problems(registry, *flags, "--rollout-backend", "calm", f"--rollout.{axis}", "2")
    assert any(problem.startswith(f"rollout.{axis}: rollout backend 'calm' does not support") for problem in found)
    assert (
        problems(registry, *flags, "--rollout-backend", "gust", "--rollout.gust.width", "1", f"--rollout.{axis}", "2")
        == []
    )


def test_experts_are_dealt_over_devices_of_a_stage(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"rollout.ep_size: 3: expected a divisor of the 4 devices of a stage"):
        load_config([], [*TASK, "--rollout.tp_size", "2", "--rollout.dp_size", "2", "--rollout.ep_size", "3"], registry)


def test_tensor_parallel_rollout_needs_the_capability_and_a_divisor_of_the_devices(registry: Registry) -> None:
    flags = ["--train-backend", "turbo", "--model.dtype", "bfloat16", "--placement.devices_per_node", "4"]
    flags += ["--rollout-backend", "gust", "--rollout.gust.width", "1"]
    assert problems(registry, *flags, "--rollout.tp_size", "2") == []
    assert problems(registry, *flags, "--rollout.tp_size", "3") == [
        "rollout.tp_size: 3: expected a divisor of the 4 devices of the rollout"
    ]


@pytest.mark.parametrize(
    ("flags", "paths"),
    [
        (["--rollout-backend", "gust", "--rollout.gust.width", "1", "--rollout.temperature", "0.7"], 2),
        (["--rollout-backend", "gust", "--rollout.gust.width", "1"], 0),
        (["--rollout-backend", "calm", "--rollout.top_p", "0.9", "--rollout.top_k", "5"], 2),
        (["--rollout-backend", "calm", "--rollout.temperature", "0.7"], 0),
        (["--rollout.temperature", "0.7", "--rollout.top_p", "0.9"], 0),
    ],
)
def test_log_probs_of_another_meaning_may_not_enter_the_loss(flags: list[str], paths: int, registry: Registry) -> None:
    uses = ["--algorithm.old_log_probs", "rollout", "--trainer.parity_action", "error"]
    found = problems(registry, *flags, *uses)
    assert [line.partition(":")[0] for line in found] == ["algorithm.old_log_probs", "trainer.parity_action"][:paths]
    assert problems(registry, *flags) == []


@pytest.mark.parametrize(
    ("uses", "path"),
    [
        (["--algorithm.old_log_probs", "decoupled"], "algorithm.old_log_probs"),
        (["--algorithm.correction.mode", "truncate"], "algorithm.correction.mode"),
        (
            ["--algorithm.old_log_probs", "always", "--algorithm.correction.reject", "token"],
            "algorithm.correction.reject",
        ),
    ],
)
def test_log_probs_of_another_meaning_correct_nothing(uses: list[str], path: str, registry: Registry) -> None:
    flags = ["--rollout-backend", "calm", *uses]
    assert problems(registry, *flags) == []
    [found] = problems(registry, *flags, "--rollout.top_p", "0.9")
    assert found.startswith(f"{path}: ")


def test_components_that_are_not_there_are_refused_with_the_nearest_name(registry: Registry) -> None:
    flags = ["--algorithm.advantage", "grop", "--algorithm.loss", "ppo_clap", "--reward", "gsm"]
    flags += ["--tracking.trackers", "json", "--trainer.callbacks", "beep", "--sharding.manager", "a+b"]
    found = problems(registry, *flags)
    assert [line.partition(":")[0] for line in found] == [
        "algorithm.advantage",
        "algorithm.loss",
        "rewards.1.name",
        "sharding.manager",
        "tracking.trackers",
        "trainer.callbacks",
    ]
    assert "did you mean 'grpo'" in found[0]


OWN = Path(__file__).parents[2] / "examples" / "own_algorithm.py"


def test_functions_of_a_file_are_loaded_and_their_signatures_checked(registry: Registry) -> None:
    flags = ["--algorithm.advantage", f"{OWN}:best_of_group", "--algorithm.loss", f"{OWN}:reinforce"]
    flags += ["--algorithm.loss_options", "{limit: 4.0}", "--trainer.callbacks", f"[{OWN}:warn_when_short]"]
    assert problems(registry, "--reward", "my.py:left_to_the_grading_process", *flags) == []
    wrong = ["--algorithm.advantage", f"{OWN}:best_of_grup", "--algorithm.loss", f"{OWN}:warn_when_short"]
    found = problems(registry, *wrong, "--trainer.callbacks", "pkg.mod:fn")
    assert [line.partition(":")[0] for line in found] == ["algorithm.advantage", "algorithm.loss", "trainer.callbacks"]
    assert "did you mean 'best_of_group'" in found[0]
    assert "is called as fn(inputs, **options)" in found[1]
    assert "No module named 'pkg'" in found[2]
    assert problems(registry, *flags, "--algorithm.loss_options", "{limt: 4.0}") == [
        "algorithm.loss_options.limt: 4.0: unknown key; did you mean 'limit'?"
    ]


def test_an_option_that_a_function_does_not_take_is_refused(registry: Registry) -> None:
    found = problems(registry, "--algorithm.loss_options", "{clip_hihg: 0.3, clip_low: 0.1}")
    assert found == ["algorithm.loss_options.clip_hihg: 0.3: unknown key; did you mean 'clip_high'?"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--algorithm.loss_options", "{clip_low: '0.2'}"],
            "algorithm.loss_options.clip_low: '0.2': expected a number",
        ),
        (
            ["--algorithm.loss_options", "{dual_clip: [3]}"],
            "algorithm.loss_options.dual_clip: [3]: expected a number",
        ),
        (["--algorithm.advantage_options", "{scale: 3}"], "algorithm.advantage_options.scale: 3: expected a text"),
        (
            ["--rewards", "[{name: format, options: {tags: think}}]"],
            "rewards.0.options.tags: 'think': expected a list",
        ),
        (
            ["--rewards", "[{name: fuzzy, options: {by: f2}}]"],
            "rewards.0.options.by: 'f2': expected one of 'f1' or 'edit'",
        ),
        (
            ["--algorithm.loss", f"{OWN}:reinforce", "--algorithm.loss_options", "{limit: far}"],
            "algorithm.loss_options.limit: 'far': expected a number",
        ),
        (
            ["--rollout.rollouter_options", "{turns: 3}"],
            "rollout.rollouter_options: {'turns': 3}: rollouter 'single_turn' has no options",
        ),
        (
            ["--tracking.options", "{jsonl: {every: 3}}"],
            "tracking.options.jsonl.every: 3: tracker 'jsonl' has no options",
        ),
        (
            ["--tracking.trackers", "[mlflow]", "--tracking.options", "{mlflow: {experment: a}}"],
            "tracking.options.mlflow.experment: 'a': unknown key; did you mean 'experiment'?",
        ),
    ],
)
def test_a_value_that_only_a_function_reads_is_checked_by_its_type(
    flags: list[str], said: str, registry: Registry
) -> None:
    assert problems(registry, *flags) == [said]


def test_the_devices_that_a_preset_deals_out_are_checked(registry: Registry) -> None:
    config = load_config(
        [], [*TASK, "--placement.preset", "disaggregated", "--placement.devices_per_node", "4"], registry
    )
    assert check_run(config, registry, devices={"actor": 1, "rollout": 3}) == []
    (found,) = check_run(config, registry, devices={"actor": 2, "rollout": 2})
    assert found.path == "placement.devices_per_node"


def test_each_role_is_checked_for_the_device_of_its_own_pool(registry: Registry) -> None:
    pools = "{fast: {devices_per_node: [1], device: cuda}, slow: {devices_per_node: [1], device: cpu}}"
    flags = ["--placement.pools", pools, "--train-backend", "turbo", "--model.dtype", "bfloat16"]
    assert problems(registry, *flags, "--placement.roles", "{actor: fast, rollout: slow}", device="cpu") == []
    (found,) = problems(registry, *flags, "--placement.roles", "{actor: slow, rollout: fast}", device="cuda")
    assert "does not run on 'cpu'" in found


APART = ["--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]
POOLS = ["--placement.pools", "{a: {devices_per_node: [1]}, b: {devices_per_node: [1]}}"]


@pytest.mark.parametrize(
    ("transport", "flags", "device", "refused"),
    [
        ("in_process", [], "cpu", ""),
        ("in_process", APART, "cpu", "processes of their own"),
        ("in_process", [*POOLS, "--placement.roles", "{actor: a, rollout: a}"], "cpu", ""),
        ("in_process", [*POOLS, "--placement.roles", "{actor: a, rollout: b}"], "cpu", "processes of their own"),
        ("device_ring", APART, "cpu", "on a CPU"),
        ("device_ring", APART, "cuda", ""),
        ("ring", APART, "cpu", ""),
    ],
)
def test_a_transport_that_cannot_reach_is_refused_before_anything_starts(
    transport: str, flags: list[str], device: str, refused: str, registry: Registry
) -> None:
    found = problems(registry, *flags, "--sharding.transport", transport, device=device)
    assert len(found) == bool(refused)
    assert all(one.startswith(f"sharding.transport: '{transport}': expected another") for one in found)
    assert all(refused in one for one in found)
