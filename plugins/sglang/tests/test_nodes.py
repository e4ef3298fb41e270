"""A replica on several nodes: the arguments of SGLang on each, how schedulers there answer, and two of them run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq
from cases import make_engine, on_gpus

from rlsdk.interfaces import ConfigError, ModelSpec, RlsdkError, RolloutSpec, Workload
from rlsdk.kit.ranks.other_nodes import free_port, num_here
from rlsdk.kit.ranks.replica_devices import visible_devices
from rlsdk.testing.process.local_companions import local_companions, look_until_error
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.worker_updates import check_foreseen, check_two_nodes
from rlsdk_sglang import remote_answers
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.forecast import forecast
from rlsdk_sglang.launch import engine_arguments
from rlsdk_sglang.messages import Command
from rlsdk_sglang.nodes import NEIGHBOURS, NodePlace, check_nodes, peers
from rlsdk_sglang.remote_answers import AnswerServer

FOUR = on_gpus("0", "1", "0", "1", nodes=("a", "a", "b", "b"))


def spec_of(folder: Path, **fields: Any) -> RolloutSpec:
    return RolloutSpec(model=ModelSpec(path=str(folder), dtype="bfloat16"), **fields)


@pytest.mark.parametrize(
    ("sizes", "stages", "ranks"),
    [
        ({"tp_size": 4}, [[0], [0]], [[0, 1], [2, 3]]),
        ({"tp_size": 2, "pp_size": 2}, [[0], [1]], [[0, 1], [0, 1]]),
        ({"tp_size": 2, "dp_size": 2, "ep_size": 4}, [[0], [0]], [[0, 1], [2, 3]]),
    ],
)
def test_each_node_starts_its_share_by_sglangs_own_arithmetic(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], stages: list[Any], ranks: list[Any]
) -> None:
    """`ServerArgs` of SGLang's own are made of what each node is given."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import ServerArgs

    spec = spec_of(qwen2, **sizes)
    check_nodes(FOUR, spec)
    found = []
    for rank, node in enumerate("ab"):
        there = replace(FOUR, node=node)
        place = NodePlace(rank=rank, count=2, first="192.0.2.7:20000", num_cached_tokens=1000)
        made = ServerArgs(**engine_arguments(there, spec, SglangOptions(), place))
        assert (made.nnodes, made.node_rank, made.dist_init_addr) == (2, rank, "192.0.2.7:20000")
        assert made.dist_timeout == there.timeout_s
        assert made.max_total_tokens == 1000
        assert made.base_gpu_id == 0
        assert visible_devices(there) == {"CUDA_VISIBLE_DEVICES": "0,1"}
        assert num_here(there, spec.num_devices) == 2
        sizes_of = SimpleNamespace(nnodes=made.nnodes, tp_size=made.tp_size, pp_size=made.pp_size)
        monkeypatch.setattr(engine, "get_parallel", lambda sizes_of=sizes_of: sizes_of)
        stage, tp, _, each = engine._calculate_rank_ranges(made.node_rank)
        found.append((list(stage), list(tp)))
        assert each * len(stage) == 2, "devices 0 and 1 of the node"
    assert found == list(zip(stages, ranks, strict=True))


def test_copies_of_attention_meet_where_the_first_node_listens(qwen2: Path) -> None:
    from sglang.srt.server_args import PortArgs, ServerArgs

    first = free_port("127.0.0.1", NEIGHBOURS)
    place = NodePlace(rank=0, count=2, first=f"127.0.0.1:{first}", num_cached_tokens=None)
    spec = spec_of(qwen2, tp_size=2, dp_size=2)
    made = ServerArgs(**engine_arguments(FOUR, spec, SglangOptions(), place))
    ports = PortArgs.init_new(made)
    assert ports.tokenizer_ipc_name.startswith("tcp://127.0.0.1:")
    assert ports.scheduler_input_ipc_name.startswith("tcp://127.0.0.1:")


def test_only_the_nodes_of_a_replica_may_send_to_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own sockets, which unpickle what comes; strangers are other addresses of this machine."""
    from sglang.srt.utils import network

    ctx = replace(FOUR, node="a/127.0.0.3", device_nodes=("a/127.0.0.3", "a/127.0.0.3", "b/127.0.0.4", "b/127.0.0.4"))
    for name, value in peers(ctx).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(network, "_zmq_authenticators", {})
    context = zmq.Context()
    listener = network.get_zmq_socket(context, zmq.PULL, "tcp://127.0.0.3:*")
    where = listener.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
    try:
        for source in ("127.0.0.2", "127.0.0.4", "127.0.0.1"):
            sender = context.socket(zmq.PUSH)
            sender.setsockopt(zmq.LINGER, 0)
            sender.connect(f"tcp://{source}:0;{where}")
            # One that was refused already has nowhere to send to, and would wait for ever.
            with suppress(zmq.Again):
                sender.send_pyobj(source, zmq.NOBLOCK)
            is_stranger = source == "127.0.0.2"
            assert bool(listener.poll(2_000 if is_stranger else 30_000)) is not is_stranger
            if not is_stranger:
                assert listener.recv_pyobj() == source
            sender.close()
        own = network.get_zmq_socket(context, zmq.PUSH, f"tcp://{where}", bind=False)
        assert own.getsockopt_string(zmq.LAST_ENDPOINT).startswith("tcp://127.0.0.3:")
    finally:
        for guard in network._zmq_authenticators.values():
            guard.stop()
        context.destroy(linger=0)


def test_peers_of_a_replica_on_one_node_are_that_node() -> None:
    assert peers(replace(FOUR, node="a/192.0.2.7", device_nodes=())) == {
        "SGLANG_ZMQ_ALLOWED_PEERS": "127.0.0.1,192.0.2.7"
    }
    assert peers(replace(FOUR, node="", device_nodes=())) == {"SGLANG_ZMQ_ALLOWED_PEERS": "127.0.0.1"}


@pytest.mark.parametrize(
    ("nodes", "sizes", "fault"),
    [
        ("aab", {"tp_size": 3}, r"the same number of devices on each of its nodes; here they are \[2, 1\]"),
        ("aabbcc", {"tp_size": 3, "pp_size": 2}, r"rollout.pp_size 2 on 3 nodes: .* a pp_size that divides"),
    ],
)
def test_what_sglang_cannot_split_over_nodes_is_refused(
    qwen2: Path, nodes: str, sizes: dict[str, int], fault: str
) -> None:
    ctx = on_gpus(*map(str, range(len(nodes))), nodes=tuple(nodes))
    with pytest.raises(ConfigError, match=fault):
        check_nodes(ctx, spec_of(qwen2, **sizes))


def test_answers_come_by_mail_and_strangers_say_nothing() -> None:
    box = AnswerServer("127.0.0.1")
    first, second = box.expect(), box.expect()
    command = Command("describe", {"a": 1}, (first.address, second.address), b"\x00weights\n")
    there = Command.decoded(command.encoded())
    assert there.data == command.data
    there.answer([1, "x"], stage=1)
    there.answer(None, "it broke", stage=0)
    assert second.read(5.0) == ([1, "x"], None)
    assert first.read(5.0) == (None, "it broke")
    third = box.expect()
    remote_answers.send([*third.address[:2], "00" * 32, third.address[3]], b'{"value": "forged", "error": null}')
    there.answer("again", stage=1)  # nobody waits for it any more
    with socket.create_connection((third.address[0], third.address[1])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
        stranger.settimeout(5.0)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # hung up on, though it is not done
    assert third.read(0.3) == (None, "it gave no answer within 0.3 s")
    box.close()
    with pytest.raises(OSError, match="refused"):
        there.answer("late")


@pytest.fixture(params=[{"tp_size": 2}, {"pp_size": 2}], ids=str)
def replica(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """(model, engine of two schedulers on two nodes, their processes)."""
    folder = write_tiny_model(tmp_path / "model", architecture="qwen2", seed=1, sharpness=2.0)
    context = {"node": "near", "bundles": (0, 1), "device_nodes": ("near", "far")}
    with local_companions():
        engine = make_engine(folder, context=context, **request.param)
        processes = [psutil.Process(worker["process"]) for worker in engine.engine.engine.workers]
        yield PlainModel.load(folder), engine, processes
        engine.close()
    assert [process for process in processes if process.is_running()] == []


def test_schedulers_on_two_nodes_take_their_parts_serve_them_and_end_together(replica: Any) -> None:
    """SGLang's own schedulers; those of the second node are another process's children, and share no memory with the
    replica's. What is killed there is noticed here."""
    plain, engine, processes = replica
    assert [process.ppid() == os.getpid() for process in processes] == [True, False]
    inner = engine.engine
    (foreseen,) = forecast([inner.ctx], inner.spec, Workload(row_tokens=64, update_rows=1, running_rows=4)).layouts
    check_foreseen(foreseen, engine.layout())
    check_two_nodes(plain, engine, 2e-4)
    processes[1].kill()
    with pytest.raises(RlsdkError, match="a part of this replica on another node ended: a scheduler of SGLang"):
        look_until_error(inner.engine.check_alive)
