"""Checks a Ray cluster to join: whether it answers, its versions of Ray and Python, and what is free."""

from __future__ import annotations

import shlex
import socket
import sys

from rlsdk.diagnosis.finding import Finding, Health
from rlsdk.diagnosis.probe import Answer, ask

TIMEOUT_S = 60.0
CONNECT_S = 5.0
NODES = """
import logging, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
free = ray.available_resources()
nodes = [node for node in ray.nodes() if node["Alive"]]
total = ray.cluster_resources()
answer(nodes=len(nodes), gpus=total.get("GPU", 0), free_gpus=free.get("GPU", 0), cpus=total.get("CPU", 0),
       free_cpus=free.get("CPU", 0))
"""


def cluster(address: str, answer: Answer | None = None) -> Finding:
    """One finding on the cluster at `address`."""
    if answer is None:
        refused = _refused(address)
        answer = Answer(facts=None, error=refused) if refused else ask(NODES, address, timeout_s=TIMEOUT_S)
    if answer.facts is None:
        ray = shlex.quote(f"{sys.prefix}/bin/ray")
        return Finding(
            check="cluster",
            state=Health.FAULT,
            found=f"no Ray cluster that this process can join answers at {address!r}: {answer.error}",
            fix=f"{ray} start --head",
        )
    facts = answer.facts
    said = (
        f"{facts['nodes']:g} {'node' if facts['nodes'] == 1 else 'nodes'} at {address}; free: "
        f"{facts['free_gpus']:g} of {facts['gpus']:g} GPUs, {facts['free_cpus']:g} of {facts['cpus']:g} processors"
    )
    return Finding(check="cluster", state=Health.OK, found=said)


def _refused(address: str) -> str:
    """Error if nothing listens at `HOST:PORT`; empty if something does, or the address has another form. Ray itself
    would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return ""
    except (OSError, OverflowError) as error:
        return str(getattr(error, "strerror", None) or error)
