"""Several nodes on one machine: `python -m benchmarks.nodes`, or `make check-nodes`.

Starts a Ray cluster of six raylets and runs the quickstart's task over it, with `fsdp` on two nodes and `vllm` on two
others: once with weights going by process group, once by the object store, and once more while the raylet under a
rollout replica is killed. Where this user may (root on Linux), every node has a network namespace of its own, so that
nothing is reached over the loopback that would not be over a network; elsewhere, or with `--loopback`, nodes are
addresses 127.0.0.x, and the script says so. Ends with a table, and with 1 where a run did not go as it must.

What is not real: one kernel, one disk, one shared memory; a namespace's link is as fast as memory.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PORT = 26379
NODES = 5
"""Besides the head, which has the controller and no device; the last is a spare."""
NETWORK = "10.213.77"
INTERFACE = "rlsdk0"
"""Of every namespace. Named to the run: the machine's host name means its loopback, which gloo would take."""
STORE_BYTES = 150 << 20
"""Of each node's object store."""
READY_S = 120.0
START_TRIES = 3
"""Of a node: Ray itself waits 30 s for a raylet, which a busy machine may need longer for."""
RUN_S = 540.0
STEPS = 4
TRANSPORTS = ("process_group", "object_store")
TASK = [
    "--sft.steps", "2", "--trainer.steps", str(STEPS), "--trainer.prompts_per_step", "8",
    "--trainer.samples_per_prompt", "4", "--trainer.save_every_steps", "1", "--trainer.export_every_steps", "2",
    "--train.optim.warmup_steps", "0", "--eval.every_steps", "null", "--tracking.trackers", '["jsonl"]',
    "--trainer.resume", "never",
]  # fmt: skip
PLACEMENT = [
    "--placement.device", "cpu", "--placement.cpus_per_device", "1",
    "--placement.pools", '{"train": {"devices_per_node": [1, 1]}, "serve": {"devices_per_node": [1, 1]}}',
    "--placement.roles", '{"actor": "train", "rollout": "serve"}',
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Where a raylet stands."""

    name: str
    address: str
    namespace: str | None
    """None: the machine's own network."""

    @property
    def enter(self) -> list[str]:
        """What comes in front of a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run over the cluster."""

    name: str
    seconds: float
    steps: int
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@contextmanager
def separate_networks(count: int) -> Iterator[list[NodePlace]]:
    """The head on a bridge of the machine, and so many namespaces linked to it; removed afterwards.

    Raises:
        OSError: this user, or this kernel, may not.
    """
    mark = secrets.token_hex(2)
    bridge = f"rl{mark}br"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge, check=False)
        _ip("addr", "add", f"{NETWORK}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        places = [NodePlace(name="head", address=f"{NETWORK}.1", namespace=None)]
        for at in range(count):
            name, inside, outside = f"rl{mark}n{at}", f"rl{mark}i{at}", f"rl{mark}o{at}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name, check=False)
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", name)
            _ip("-n", name, "link", "set", inside, "name", INTERFACE)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{NETWORK}.{at + 2}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", device, "up")
            places.append(NodePlace(name=f"node-{at}", address=f"{NETWORK}.{at + 2}", namespace=name))
        yield places


def loopback(count: int) -> list[NodePlace]:
    """Addresses of this machine; every process can reach all of them."""
    places = [NodePlace(name=f"node-{at}", address=f"127.0.0.{at + 2}", namespace=None) for at in range(count)]
    return [NodePlace(name="head", address="127.0.0.1", namespace=None), *places]


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


class RayNodes:
    """A raylet at each place. What was started is ended with the object, processes of workers included."""

    def __init__(self, places: Sequence[NodePlace], folder: Path) -> None:
        self.places = places
        self.folder = folder
        self.address = f"{places[0].address}:{PORT}"
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self.raylets: list[subprocess.Popen[bytes]] = []
        (folder / "token").write_text(secrets.token_hex(16))
        (folder / "token").chmod(0o600)

    def start(self) -> None:
        """Returns when every node has joined."""
        for at, place in enumerate(self.places):
            # One after another: raylets of one folder that start at the same time choose the same socket.
            for left in reversed(range(START_TRIES)):
                self.raylets.append(self._start(place, head=at == 0))
                if self._await(place, last=not left):
                    break
                _kill_tree(self.raylets.pop().pid)
        self._await_all()

    def stop(self) -> None:
        for started in self.raylets:
            _kill_tree(started.pid)

    def _start(self, place: NodePlace, *, head: bool) -> subprocess.Popen[bytes]:
        # The command of the environment that runs this script, by its module: no folder of scripts need be on PATH.
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        role = ["--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir", str(self.folder / "ray")]
        rest = [
            "--node-ip-address", place.address, "--num-cpus", "0" if head else "1", "--num-gpus", "0",
            "--object-store-memory", str(STORE_BYTES), "--disable-usage-stats",
        ]  # fmt: skip
        return subprocess.Popen(
            [*place.enter, *ray, *(role if head else ["--address", self.address]), *rest],
            env=self.environment,
            stdout=(self.folder / f"{place.name}.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _await(self, place: NodePlace, *, last: bool) -> bool:
        """Whether it has started; when `last` is given, it is an error if not."""
        log, deadline = self.folder / f"{place.name}.log", time.monotonic() + READY_S
        while "Ray runtime started" not in log.read_text():
            if self.raylets[-1].poll() is not None or time.monotonic() > deadline:
                if not last:
                    return False
                raise RuntimeError(f"{place.name} did not start; {log}:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        return True

    def _await_all(self) -> None:
        ask = (
            "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR'); "
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        deadline, found = time.monotonic() + READY_S, ""
        while time.monotonic() < deadline:
            done = subprocess.run(
                [sys.executable, "-c", ask, self.address],
                env=self.environment, capture_output=True, text=True, timeout=READY_S, check=False,
            )  # fmt: skip
            found = done.stdout + done.stderr
            if done.returncode == 0 and int(done.stdout.split()[-1]) == len(self.places):
                return
            time.sleep(0.5)
        raise RuntimeError(f"not all of {len(self.places)} nodes joined within {READY_S:g} s: {found[-2000:]}")


def _kill_tree(pid: int) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with suppress(psutil.Error):
                one.kill()


def train(nodes: RayNodes, name: str, runs: Path, extra: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a run, as a user would on the head node."""
    command = [
        sys.executable, "-m", "rlsdk", "train", *TASK, *PLACEMENT, "--placement.ray_address", nodes.address,
        "--trainer.run_dir", str(runs), "--trainer.run_name", name, "--placement.network_interface",
        INTERFACE if nodes.places[-1].namespace else "lo", *extra,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        env=nodes.environment,
        stdout=(runs / f"{name}.out").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(nodes: RayNodes, name: str, runs: Path, extra: Sequence[str], *, kills: bool = False) -> Outcome:
    """A whole run; with `kills` the raylet under a replica is killed once the first step is done."""
    start = time.monotonic()
    process = train(nodes, name, runs, extra)
    notes: list[str] = []
    try:
        if kills:
            notes.append(_kill_replica_node(nodes, runs / name, process))
        process.wait(max(1.0, RUN_S - (time.monotonic() - start)))
    except (subprocess.TimeoutExpired, RuntimeError) as error:
        return Outcome(name=name, seconds=time.monotonic() - start, steps=0, problems=[str(error)])
    finally:
        _kill_tree(process.pid)
    said = (runs / f"{name}.out").read_text(errors="replace")
    metrics = runs / name / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    done = [row for row in rows if "reward/mean" in row]
    problems = [] if process.returncode == 0 else [f"left with {process.returncode}: {said[-1500:]}"]
    if len({row["step"] for row in done}) != STEPS:
        problems.append(f"made {len(done)} of {STEPS} steps")
    if kills and "serves again" not in said and "started again" not in said:
        problems.append("nothing says that what was lost was started again")
    notes += [line.strip() for line in said.splitlines() if "serves again" in line]
    figures = {key: float(value) for key, value in (done[-1] if done else {}).items() if key.startswith("sync/")}
    return Outcome(
        name=name,
        seconds=time.monotonic() - start,
        steps=len(done),
        problems=problems,
        notes=notes,
        figures=figures,
    )


def _kill_replica_node(nodes: RayNodes, folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Ends the raylet whose worker writes the log of the last replica, with SIGKILL: nothing under it can say goodbye.

    Raises:
        RuntimeError: the run ended before, or its replica is not found.
    """
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline and process.poll() is None:
        metrics = folder / "metrics.jsonl"
        if metrics.is_file() and "reward/mean" in metrics.read_text():
            worker = _writer_of(folder / "logs" / "serve-1.log")
            raylet = next((one for one in worker.parents() if one.name() == "raylet"), None)
            if raylet is None:
                raise RuntimeError(f"no raylet is above process {worker.pid}")
            at = next(at for at, one in enumerate(nodes.raylets) if raylet in psutil.Process(one.pid).children(True))
            raylet.send_signal(signal.SIGKILL)
            return f"killed the raylet of {nodes.places[at].name} ({nodes.places[at].address}) under replica 1"
        time.sleep(0.5)
    raise RuntimeError(f"the run ended before its first step: {(folder.parent / f'{folder.name}.out')}")


def _writer_of(log: Path) -> psutil.Process:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.path.samefile(f"/proc/{process.pid}/fd/1", log):
                return process
    raise RuntimeError(f"no process writes {log}")


def table_of(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Runs over the cluster", title_justify="left")
    for name in ("run", "seconds", "steps", "bytes of a sync", "seconds of a sync", "outcome"):
        table.add_column(name)
    for one in outcomes:
        told = escape("; ".join(one.problems)) or "; ".join(["as it must", *one.notes])
        table.add_row(
            one.name, f"{one.seconds:.0f}", str(one.steps), f"{one.figures.get('sync/bytes', 0):.0f}",
            f"{one.figures.get('time/sync_s', 0):.2f}", told,
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollout-backend", default="vllm")
    parser.add_argument("--train-backend", default="fsdp")
    parser.add_argument("--loopback", action="store_true", help="addresses of this machine in place of namespaces")
    parser.add_argument("--only", choices=[*TRANSPORTS, "node_lost"], help="one of the three runs")
    parser.add_argument("--json", type=Path, default=None, help="write the outcomes here")
    parser.add_argument("--keep", type=Path, default=None, help="keep runs and logs in this folder")
    options = parser.parse_args()
    console = Console(width=150)
    if sys.platform != "linux":
        console.print("skipped: needs Linux (raylets on 127.0.0.x, processes in /proc)")
        return
    folder = options.keep or Path(tempfile.mkdtemp(prefix="rlsdk-nodes-"))
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    backends = ["--train-backend", options.train_backend, "--rollout-backend", options.rollout_backend]
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        if options.keep is None:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        nodes = RayNodes(_places(stack, options.loopback, console), folder)
        stack.callback(nodes.stop)
        nodes.start()
        for transport in TRANSPORTS:
            if options.only in (None, transport):
                extra = [*backends, "--sharding.transport", transport]
                outcomes.append(run(nodes, transport, runs, extra))
                console.print(table_of(outcomes[-1:]))
        if options.only in (None, "node_lost"):
            outcomes.append(run(nodes, "node_lost", runs, backends, kills=True))
    console.print(table_of(outcomes))
    if options.json is not None:
        options.json.write_text(json.dumps([vars(one) for one in outcomes], indent=1))
    sys.exit(1 if any(one.problems for one in outcomes) else 0)


def _places(stack: ExitStack, wants_loopback: bool, console: Console) -> list[NodePlace]:
    if not wants_loopback:
        try:
            places = stack.enter_context(separate_networks(NODES))
        except OSError as error:
            console.print(f"no network namespaces here ({error}); nodes are addresses of the loopback")
        else:
            console.print(f"{len(places)} nodes, {len(places) - 1} of them in network namespaces of their own")
            return places
    return loopback(NODES)


if __name__ == "__main__":
    main()
