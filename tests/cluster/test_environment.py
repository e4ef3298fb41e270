"""What workers on other nodes are given, and whether a folder is shared: without a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlsdk.cluster.environment import address_of, choose_gloo_interface, forwarded, interface_of
from rlsdk.cluster.shared_folder import check_shared_folder
from rlsdk.interfaces import PlacementError

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

    def run_on_node(node_id: str, function: Any, folder: str, question: str) -> Any:
        return function(str(folders.get(node_id, folder)), question)

    return run_on_node


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
    def loses_what_it_writes(node_id: str, function: Any, folder: str, question: str) -> Any:
        read, name = function(folder, question)
        Path(folder, name).unlink()
        return read, name

    with pytest.raises(PlacementError, match="node one wrote a file that is not seen here"):
        check_shared_folder(tmp_path, ["one"], loses_what_it_writes)
