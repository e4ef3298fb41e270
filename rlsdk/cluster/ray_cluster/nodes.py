"""Joins a running Ray cluster, and reads what its nodes have installed."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rlsdk.cluster.devices.capacity import NodeCapacity, assign_nodes
from rlsdk.cluster.devices.placement import PlacementSpec
from rlsdk.cluster.ray_cluster.access import check_tls, is_authenticated
from rlsdk.cluster.ray_cluster.driver import become_driver, check_no_client
from rlsdk.cluster.ray_cluster.local import LocalRay, own_signal_handlers
from rlsdk.interfaces import PlacementError, WorkerError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_KNOCK_TIMEOUT_S = 5.0
_KNOCKS = 32
"""Number of nodes that are probed at once."""
_RELEASE_S = 3.0
"""Seconds by which Ray's report of free resources may lag."""
_SLOW_RELEASE_S = 60.0
"""Seconds for a removed placement group to release its resources: a busy machine is slow to end its workers."""
_LOOK_S = 0.2


def connect(
    address: str | None,
    placement: PlacementSpec,
    *,
    environments_first: bool,
    before_connect: Callable[[], None] = lambda: None,
) -> LocalRay | None:
    """Connects this process to Ray; returns the cluster that it started for that, if any.

    Warns when it joins a cluster that asks for no token: anyone who reaches its ports runs code as its user.

    Args:
        address: of a running cluster (`auto` finds it); None starts one here. A process that is connected already
            stays so.
        placement: sizes the cluster that is started.
        environments_first: see `LocalRay`.
        before_connect: see `LocalRay`.

    Raises:
        PlacementError: no cluster answers at `address`, or this machine lacks the devices.
    """
    import ray

    check_no_client()
    if ray.is_initialized():
        return None
    check_tls()
    if address is None:
        return LocalRay(placement, environments_first=environments_first, before_connect=before_connect)
    try:
        _knock(address)
        with own_signal_handlers():
            become_driver(address=address)
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        if _is_refusal(error):
            raise PlacementError(
                f"the Ray cluster at placement.ray_address {address!r} refused this process's token; set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token that the cluster has"
            ) from error
        raise PlacementError(
            f"no Ray cluster answers at placement.ray_address {address!r} ({error}); start one with "
            "`ray start --head`, or leave the address out to run on this machine"
        ) from error
    if not is_authenticated():
        _log.warning(
            "the Ray cluster at %s asks for no token: anyone who reaches its ports can run code as its user. Start it, "
            "and this program, with RAY_AUTH_MODE=token; see 'Several nodes' in docs/devices.md",
            address,
        )
    return None


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an error or one of its causes says that a token is missing or wrong: Ray may only quote that error."""
    while error is not None:
        if "AuthenticationError" in f"{type(error).__name__}: {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def _knock(address: str) -> None:
    """Raises OSError when nobody listens there; Ray would try for minutes."""
    if "://" in address:
        raise ValueError("a client address; give the HOST:PORT that `ray start` prints, from a machine of the cluster")
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_TIMEOUT_S).close()


def choose_nodes(placement: PlacementSpec, *, without: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """`assign_nodes` on the current cluster. Resources that another run is releasing count as free, and are waited for.
    A node whose daemon does not answer is not chosen, though Ray may not know yet that it is gone.

    Args:
        placement: the requested devices.
        without: nodes that are not to be chosen.

    Raises:
        PlacementError: see `assign_nodes`.
    """
    start, lost = time.monotonic(), set(without)
    while True:
        nodes = [node for node in node_capacities() if node.node_id not in lost]
        try:
            chosen = assign_nodes(placement, nodes)
            down = find_down(dict.fromkeys(node for of_pool in chosen.values() for node in of_pool))
            if not down:
                return chosen
            lost |= set(down)
        except PlacementError:
            # Raises at once where even an idle cluster would be too small.
            assign_nodes(placement, [replace(node, cpus=node.total_cpus, gpus=node.total_gpus) for node in nodes])
            patience_s = _SLOW_RELEASE_S if _comes_free(placement, nodes) else _RELEASE_S
            if time.monotonic() - start > patience_s:
                raise
            time.sleep(_LOOK_S)


def _comes_free(placement: PlacementSpec, nodes: Sequence[NodeCapacity]) -> bool:
    """Whether the requested resources will become free: those in use are held by placement groups that were removed."""
    import ray

    kept: Counter[tuple[str, str]] = Counter()
    for group in ray.util.placement_group_table().values():
        for index, bundle in group["bundles"].items() if group["state"] != "REMOVED" else ():
            for resource, amount in bundle.items():
                kept[group["bundles_to_node_id"].get(index, ""), resource] += amount
    left = [
        replace(
            node, cpus=node.total_cpus - kept[node.node_id, "CPU"], gpus=node.total_gpus - kept[node.node_id, "GPU"]
        )
        for node in nodes
    ]
    try:
        assign_nodes(placement, left)
    except PlacementError:
        return False
    return True


def find_down(node_ids: Iterable[str]) -> list[str]:
    """Returns the nodes whose Ray daemon does not answer: Ray itself takes half a minute to notice."""
    import ray

    known = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    asked = list(node_ids)
    with ThreadPoolExecutor(_KNOCKS) as threads:
        answers = list(threads.map(lambda node_id: _answers(known.get(node_id)), asked))
    return [node_id for node_id, is_up in zip(asked, answers, strict=True) if not is_up]


def _answers(node: Mapping[str, Any] | None) -> bool:
    if node is None:
        return False
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=_KNOCK_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def run_on_node(node_id: str, function: Callable[..., _Result], *args: Any, timeout_s: float) -> _Result:
    """Calls an importable function on a node; in this process if it is on that node."""
    return run_on_nodes([node_id], function, *args, timeout_s=timeout_s)[0]


def run_on_nodes(
    node_ids: Sequence[str],
    function: Callable[..., _Result],
    *args: Any,
    timeout_s: float,
    in_own_process: bool = True,
) -> list[_Result]:
    """As `run_on_node`, on all of these at the same time; the results in their order.

    Args:
        node_ids: nodes on which the function is called.
        function: importable on those nodes.
        args: of it.
        timeout_s: for all of them.
        in_own_process: on its own node this process calls it. False: a Ray process does, as on the other nodes.

    Raises:
        WorkerError: a node does not answer in time, or cannot call it; or this process uses no cluster any longer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():  # Ray would start a cluster: calls that fail while a cluster ends arrive here, too.
        raise WorkerError("this process uses no Ray cluster any longer")
    own = ray.get_runtime_context().get_node_id() if in_own_process else None
    asked: dict[str, Any] = {}
    for node_id in set(node_ids) - {own}:
        there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        asked[node_id] = task.remote(*args)
    here = [function(*args)] if own in node_ids else []
    try:
        found = dict(zip(asked, ray.get(list(asked.values()), timeout=timeout_s), strict=True))
    except ray.exceptions.RayError as error:
        names = ", ".join(node_id[:8] for node_id in asked)
        raise WorkerError(
            f"asked {names} (`ray list nodes` shows which node is which) for {function.__name__}, and one of them gave "
            f"no answer: {error or type(error).__name__}"
        ) from error
    return [here[0] if node_id == own else found[node_id] for node_id in node_ids]


def node_capacities() -> list[NodeCapacity]:
    """Free resources of every live node."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            total, left = node["Resources"], free.get(node["NodeID"], {})
            found.append(
                NodeCapacity(
                    node_id=node["NodeID"],
                    address=f"{node['NodeManagerHostname']}/{node['NodeManagerAddress']}",
                    cpus=left.get("CPU", 0.0),
                    gpus=left.get("GPU", 0.0),
                    total_cpus=total.get("CPU", 0.0),
                    total_gpus=total.get("GPU", 0.0),
                )
            )
    return found
