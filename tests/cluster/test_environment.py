"""What workers on other nodes are given, and whether a folder is shared: without a cluster."""

from __future__ import annotations

import os
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.cluster.ray_cluster.environment import address_of, choose_gloo_interface, forwarded, interface_of
from rlsdk.cluster.ray_cluster.installed import installed
from rlsdk.cluster.ray_cluster.interpreter import ask_interpreter, check_nodes
from rlsdk.cluster.ray_cluster.shared_folder import check_shared_folder
from rlsdk.interfaces import ConfigError, PlacementError

HERE = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "HF_HOME": "/hf", "HF_TOKEN": "secret", "HOME": "/root"}


def test_named_variables_are_forwarded_and_secrets_only_by_their_full_name() -> None:
    patterns = ("NCCL_*", "GLOO_*", "HF_*")
    assert forwarded(HERE, patterns) == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "HF_HOME": "/hf"}
    assert forwarded(HERE, (*patterns, "HF_TOKEN"))["HF_TOKEN"] == "secret"
    assert forwarded(HERE, ()) == {}


def test_one_interface_is_every_librarys() -> None:
    assert forwarded(HERE, ("GLOO_*",), "ib0") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(PlacementError, match=r"placement.network_interface 'ib7': .* its interfaces are \[.*'lo'"):
        address_of("ib7")


def test_gloo_listens_where_ray_knows_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be put back")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_gloo_interface("192.0.2.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    choose_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    choose_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def nodes(**folders: Path) -> Any:
    """Runs a function as each node would, where the folder may be another one."""

    def run_on_nodes(node_ids: Sequence[str], function: Any, folder: str, question: str) -> Any:
        return [function(str(folders.get(node_id, folder)), question) for node_id in node_ids]

    return run_on_nodes


def test_a_folder_that_all_nodes_see_is_left_as_it_was(tmp_path: Path) -> None:
    check_shared_folder(tmp_path, ["one", "two"], nodes())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [True, False])
def test_a_node_with_a_folder_of_its_own_is_named(tmp_path: Path, exists: bool) -> None:
    shared, own = tmp_path / "runs", tmp_path / "local"
    shared.mkdir()
    if exists:
        own.mkdir()
    with pytest.raises(PlacementError, match=r"(?s)is not one folder on all 2 nodes.*node two cannot read"):
        check_shared_folder(shared, ["one", "two"], nodes(two=own))
    assert list(shared.iterdir()) == []


def test_a_node_whose_files_do_not_come_back_is_named(tmp_path: Path) -> None:
    def loses_what_it_writes(node_ids: Sequence[str], function: Any, folder: str, question: str) -> Any:
        read, name = function(folder, question)
        Path(folder, name).unlink()
        return [(read, name)]

    with pytest.raises(PlacementError, match="node one wrote a file that is not seen here"):
        check_shared_folder(tmp_path, ["one"], loses_what_it_writes)


def test_what_nodes_have_installed_is_compared_side_by_side() -> None:
    here = installed()
    assert here["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert here["rlsdk"] == rlsdk.__version__
    assert {"torch", "ray", "rlsdk-fsdp"} <= {name for name, version in here.items() if version}
    check_nodes(["one", "two"], lambda nodes, function: [function() for _ in nodes])

    def ask(nodes: Sequence[str], function: Any) -> Any:
        changed: dict[str, Any] = {"two": {"torch": "1.0"}, "three": {"rlsdk-fsdp": None, "torch": "1.0"}}
        return [function() | changed.get(node, {}) for node in nodes]

    with pytest.raises(ConfigError) as caught:
        check_nodes(["one", "two", "three"], ask)
    assert f"torch {here['torch']} on one; 1.0 on two, three" in str(caught.value)
    assert f"rlsdk-fsdp {here['rlsdk-fsdp']} on one, two; missing on three" in str(caught.value)


def test_another_environment_answers_the_same_question(tmp_path: Path) -> None:
    found = ask_interpreter(sys.executable)
    assert found == installed()
    venv.create(tmp_path, symlinks=True)
    bare = ask_interpreter(str(tmp_path / "bin" / "python"))
    assert isinstance(bare, dict)
    assert {name for name, version in bare.items() if version} == {"python"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "it ended without an answer"),
        ("echo hello", "asked for its packages, it answered 'hello'"),
        ("echo 3", "asked for its packages, it answered '3'"),
        ("echo 'no module named os' >&2; exit 3", "it ended with exit code 3: no module named os"),
        ("kill -9 $$", "it ended with signal SIGKILL and said nothing"),
        ("exec sleep 60", "it gave no answer within 1 s"),
    ],
)
def test_an_interpreter_that_gives_no_answer_is_described(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsdk.cluster.ray_cluster.interpreter._TIMEOUT_S", 1.0 if "sleep" in script else 60.0)
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o700)
    assert ask_interpreter(str(tmp_path / "python")) == said


def test_an_interpreter_whose_environment_prints_at_its_start_is_understood(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "welcome"\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o700)
    assert ask_interpreter(str(tmp_path / "python")) == installed()
