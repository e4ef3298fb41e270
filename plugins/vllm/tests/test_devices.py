"""Replicas of several devices, without any: which executor vLLM is given, what its processes see, what is refused.

vLLM's own configuration classes are built under a platform that says how many GPUs this process sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, ModelSpec, RankContext, RolloutSpec
from rlsdk.kit.ranks.replica_devices import visible_devices
from rlsdk_vllm import arguments, environment, in_process, nodes
from rlsdk_vllm.config import VllmOptions

PARALLEL = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    "distributed_executor_backend",
)


def on_gpus(*names: str, nodes: tuple[str, ...] = (), first_bundle: int = 0) -> RankContext:
    """A replica with these devices."""
    return RankContext(
        role="rollout",
        node=nodes[0] if nodes else "localhost",
        device="cuda:0",
        accelerators=names,
        bundles=tuple(range(first_bundle, first_bundle + len(names))),
        device_nodes=nodes,
    )


def spec_of(**fields: Any) -> RolloutSpec:
    return RolloutSpec(model=ModelSpec(path="x", dtype="bfloat16"), **fields)


class SeesOneGpu:
    """A platform as vLLM would find it in a Ray actor with one GPU."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def is_cuda(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1


def parallel_config(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """vLLM's own, where this process sees one GPU."""
    from vllm.config import parallel

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "current_platform", SeesOneGpu(parallel.current_platform))
        return parallel.ParallelConfig(**fields)


def given(
    ctx: RankContext, spec: RolloutSpec, options: VllmOptions | None = None, place: nodes.CopiesHere | None = None
) -> dict[str, Any]:
    """What of the engine's arguments vLLM makes a `ParallelConfig` of."""
    made: dict[str, Any] = {}

    class Arguments:
        __dataclass_fields__ = dict.fromkeys(["model"])

        def __init__(self, **arguments: Any) -> None:
            made.update(arguments)

    arguments.engine_args(Arguments, ctx, spec, options or VllmOptions(), {}, None, place)
    return {name: value for name, value in made.items() if name in PARALLEL or name.startswith("data_parallel_")}


def test_left_to_itself_vllm_refuses_more_workers_than_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"World size \(2\) is larger than the number of available GPUs \(1\)"):
        parallel_config(monkeypatch, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("sizes", "world", "backend"),
    [
        ({"tp_size": 1}, 1, "uni"),
        ({"tp_size": 2}, 2, "mp"),
        ({"tp_size": 2, "pp_size": 2}, 4, "mp"),
        ({"tp_size": 4, "ep_size": 4}, 4, "mp"),
        ({"tp_size": 2, "dp_size": 2, "ep_size": 4}, 2, "mp"),
        ({"dp_size": 2}, 1, "mp"),  # vLLM itself would take Ray, in whose actor this process is
    ],
)
def test_a_replica_of_one_node_has_workers_of_its_own(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], world: int, backend: str
) -> None:
    spec = spec_of(**sizes)
    ctx = on_gpus(*map(str, range(spec.num_devices)))
    made = parallel_config(monkeypatch, **given(ctx, spec))
    assert (made.distributed_executor_backend, made.world_size) == (backend, world)
    assert made.world_size_across_dp == spec.num_devices
    assert made.enable_expert_parallel is (spec.ep_size > 1)


def test_across_nodes_workers_are_rays_in_the_bundles_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tp_size=2, pp_size=2)
    ctx = on_gpus("0", "1", "0", "1", nodes=("a", "a", "b", "b"), first_bundle=4)
    made = parallel_config(monkeypatch, **given(ctx, spec))
    assert (made.distributed_executor_backend, made.world_size) == ("ray", 4)
    with environment.replica_environment(ctx, spec):
        # As vLLM's executor reads it (`RayExecutorV2._init_executor`): as many bundles as workers, none twice.
        import vllm.envs as envs

        bundles = list(map(int, envs.VLLM_RAY_BUNDLE_INDICES.split(",")))
        share = envs.VLLM_RAY_PER_WORKER_GPUS
        assert visible_devices(ctx) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert bundles == [4, 5, 6, 7]
    assert 2 * (0.125 + share) <= 1, "a policy and a judge fit on one GPU"
    assert "VLLM_RAY_BUNDLE_INDICES" not in os.environ, "the next replica of this process has others"


def test_processes_of_a_replica_see_its_devices_and_this_one_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    show = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    with environment.replica_environment(on_gpus("5", "6"), spec_of(tp_size=2)):
        assert subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip() == "5,6"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment.spread_environment(on_gpus("5"), spec_of()) == {}


@pytest.mark.parametrize(
    ("ctx", "sizes", "fault"),
    [
        (on_gpus("0", "1"), {"tp_size": 4}, r"takes 4 devices; it was given 2: 0, 1"),
        (RankContext(role="rollout"), {"tp_size": 2, "ep_size": 2}, r"rollout.ep_size 2: vLLM on a CPU .* give 1"),
        (on_gpus("0", "1", "2", "3"), {"tp_size": 4, "ep_size": 2}, r"rollout.ep_size 2: .* give 4 .*, or 1"),
    ],
)
def test_what_vllm_cannot_split_is_refused(ctx: RankContext, sizes: dict[str, int], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        arguments.check_split(ctx, spec_of(**sizes), VllmOptions())


def test_copies_of_attention_need_processes() -> None:
    ctx, spec = on_gpus("0", "1"), spec_of(dp_size=2)
    arguments.check_split(ctx, spec, VllmOptions())
    with pytest.raises(ConfigError, match=r"rollout.vllm.asynchronous false: .*dp_size 2 .* or leave it out"):
        arguments.check_split(ctx, spec, VllmOptions(asynchronous=False))


@pytest.mark.parametrize(
    ("ctx", "sizes", "own"),
    [
        (RankContext(role="rollout"), {}, False),
        (RankContext(role="rollout"), {"tp_size": 2}, False),
        (RankContext(role="rollout"), {"dp_size": 2}, True),
        (on_gpus("0"), {}, True),
        (on_gpus("0", "1"), {"tp_size": 2}, True),
        (on_gpus("0", "0", nodes=("a", "b")), {"tp_size": 2}, False),  # Ray's workers
    ],
)
def test_on_a_gpu_the_engine_has_a_process_of_its_own(ctx: RankContext, sizes: dict[str, int], own: bool) -> None:
    spec = spec_of(**sizes)
    assert environment.has_own_process(ctx, spec, VllmOptions()) is own
    assert environment.has_own_process(ctx, spec, VllmOptions(asynchronous=not own)) is not own


def test_a_second_engine_of_a_process_that_has_to_sleep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check = in_process.check_only_sleeper
    monkeypatch.setattr(in_process.WORLD, "users", 0)  # engines of other tests
    check(on_gpus("0"), spec_of())
    monkeypatch.setattr(in_process.WORLD, "users", 1)
    check(RankContext(role="judge"), spec_of())
    check(on_gpus("0"), spec_of(shares_devices=False))
    with pytest.raises(ConfigError, match=r"rollout.vllm.asynchronous false: role 'rollout' .* give true"):
        check(on_gpus("0"), spec_of())


@pytest.mark.parametrize(
    ("ctx", "fields", "option", "given"),
    [
        (RankContext(role="rollout"), {}, None, None),
        (on_gpus("0"), {}, None, 8192),
        (on_gpus("0"), {"max_running": 10_000}, None, 10_000),
        (on_gpus("0"), {}, 4096, 4096),
    ],
)
def test_a_pass_on_a_gpu_takes_long_prompts(
    ctx: RankContext, fields: dict[str, int], option: int | None, given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}

    class Arguments:
        __dataclass_fields__ = dict.fromkeys(["model"])

        def __init__(self, **arguments: Any) -> None:
            made.update(arguments)

    monkeypatch.setattr(arguments, "check_cpu_attention", lambda spec: None)
    options = VllmOptions(max_batched_tokens=option, kv_cache_mb=16)
    arguments.engine_args(Arguments, ctx, spec_of(**fields), options, {})
    assert made.get("max_num_batched_tokens") == given


def test_a_cpu_serves_one_stage() -> None:
    with pytest.raises(ConfigError, match=r"rollout.pp_size 2: vLLM on a CPU serves one stage"):
        arguments.check_split(RankContext(role="rollout"), spec_of(pp_size=2), VllmOptions())


def test_steps_are_scheduled_ahead_where_the_engine_has_a_process_of_its_own() -> None:
    def scheduling(ctx: RankContext, **options: Any) -> bool | None:
        made: dict[str, Any] = {}

        class Arguments:
            __dataclass_fields__ = dict.fromkeys(["model"])

            def __init__(self, **arguments: Any) -> None:
                made.update(arguments)

        arguments.engine_args(Arguments, ctx, spec_of(), VllmOptions(**options), {})
        found: bool | None = made["async_scheduling"]
        return found

    assert scheduling(on_gpus("0")) is None, "vLLM's own choice, which is to do so"
    assert scheduling(on_gpus("0"), asynchronous=False) is False


@pytest.mark.parametrize("shares", [True, False])
def test_only_an_engine_that_shares_its_device_is_prepared_to_sleep(shares: bool) -> None:
    """The allocator with which vLLM sleeps serves one engine of a process."""
    made: dict[str, Any] = {}

    class Arguments:
        __dataclass_fields__ = dict.fromkeys(["model"])

        def __init__(self, **arguments: Any) -> None:
            made.update(arguments)

    arguments.engine_args(Arguments, on_gpus("0"), spec_of(shares_devices=shares), VllmOptions(), {})
    assert made["enable_sleep_mode"] is shares


def test_copies_of_attention_stand_on_whole_nodes_and_are_told_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes, of one, two and one copies of two devices each."""

    class Here:
        address = "192.0.2.7"

    monkeypatch.setattr(nodes, "get_companions", Here)
    monkeypatch.setattr(nodes, "free_port", lambda host: 20123)
    names = ("0", "1", "0", "1", "2", "3", "6", "7")
    ctx = on_gpus(*names, nodes=("a", "a", "b", "b", "b", "b", "c", "c"))
    spec, options = spec_of(tp_size=2, dp_size=4, ep_size=8), VllmOptions(asynchronous=True)
    arguments.check_split(ctx, spec, options)
    first = nodes.first_place(ctx, spec)
    others = nodes.follower_of(spec, options, {}, None, first)
    places = [(ctx, first)]
    for rank, name in enumerate("bc", start=1):
        there, *_, place = others(replace(ctx, node=name), rank)
        places.append((there, place))
    assert [(place.start, place.count) for _, place in places] == [(0, 1), (1, 2), (3, 1)]
    for there, place in places:
        made = given(there, spec, options, place)
        assert (made["data_parallel_address"], made["data_parallel_rpc_port"]) == ("192.0.2.7", 20123)
        config = parallel_config(
            monkeypatch,
            **{name: made[name] for name in PARALLEL},
            data_parallel_size_local=made["data_parallel_size_local"],
            data_parallel_rank=made.get("data_parallel_start_rank", 0),
            data_parallel_backend=made["data_parallel_backend"],
            data_parallel_master_ip=made["data_parallel_address"],
        )
        assert (config.world_size_across_dp, config.world_size) == (8, 2)
        assert config.distributed_executor_backend == "mp", "a copy's workers are on the node of its core"
        assert config.data_parallel_size_local == place.count
    shown = [visible_devices(there)["CUDA_VISIBLE_DEVICES"] for there, _ in places]
    assert shown == ["0,1", "0,1,2,3", "6,7"]


def test_a_copy_of_attention_on_two_nodes_is_refused() -> None:
    ctx = on_gpus("0", "0", "0", "0", nodes=("a", "b", "c", "d"))
    with pytest.raises(ConfigError, match=r"rollout.dp_size 2 on 4 nodes: .* takes 2 devices .* \[1, 1, 1, 1\]"):
        arguments.check_split(ctx, spec_of(tp_size=2, dp_size=2), VllmOptions(asynchronous=True))
