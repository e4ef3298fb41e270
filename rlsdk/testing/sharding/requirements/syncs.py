"""Requirements on successful syncs: the weights that are served, and the report."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import DTYPE_BYTES, Box, RlsdkError, ShardingManager, TensorMeta
from rlsdk.testing.process.resources import storages
from rlsdk.testing.sharding.counts import not_once, out_of_order
from rlsdk.testing.sharding.lab import ShardingLab, Trial, wanted_boxes, wire_dtypes
from rlsdk.testing.sharding.layouts import (
    SHAPES,
    Pair,
    chain,
    complete,
    cut,
    in_one_process,
    pairs,
    placed,
    sharded,
    split,
    tied_pairs,
)
from rlsdk.testing.sharding.tensor_engines import tensor_layout
from rlsdk.testing.suites.requirements import Measured, requirement

STRANGE = (-0.0, math.inf, -math.inf, 1e-40, 3.3895e38, 1.00390625, -1.01171875, 65519.0)
"""Signed zeros, subnormal and largest numbers, and midpoints between two bfloat16 values."""
LEAST_COPY = 1024
"""Bytes of a tensor that counts as a copy of weights."""
GRACE_S = 2.0
"""Seconds for the threads of a sync to end."""
CHAIN_S = 10.0
"""`timeout_s` where a replica may wait in vain for another one."""
MOST_DEADLINE = 2.0
"""Longest deadline of a call relative to `timeout_s`: a caller may wait somewhat longer than a worker."""
PROOF_S = 0.2
"""Seconds that a source takes for fingerprints: long compared with the rest of a small sync."""


class SyncRequirements:
    """Mixed into `ShardingConformance`."""

    @requirement("constructor", since=(2, 0))
    def test_constructor(self, lab: ShardingLab, measured: Measured) -> None:
        """It can be constructed as the trainer does: two groups, `timeout_s`, `bucket_bytes` and `transports` by
        name."""
        parameters = inspect.signature(lab.manager_class).parameters.values()
        known = {parameter.name for parameter in parameters}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        wanted = ("timeout_s", "bucket_bytes", "transports")
        measured.none("parameters that it lacks", [name for name in wanted if name not in known and not takes_any])
        made = lab.trial(pairs()["one rank to one"], timeout_s=60.0, bucket_bytes=2048, transports=None).manager
        assert isinstance(made, ShardingManager)

    @requirement("sync.bitwise")
    def test_bitwise(self, lab: ShardingLab, measured: Measured) -> None:
        """Every replica serves the source's values bit for bit, and again after a step."""
        for name, pair in pairs().items():
            trial = lab.trial(pair)
            report = trial.manager.sync_weights(trial.plan(), 1)
            measured.none(f"boxes that differ: {name}", trial.differing())
            measured.equal(f"replicas with a receipt: {name}", len(report.receipts), len(pair.replicas))
            trial.step()
            trial.sync(2)
            measured.none(f"boxes that differ after a step: {name}", trial.differing())

    @requirement("sync.tied", since=(2, 0))
    def test_tied(self, lab: ShardingLab, measured: Measured) -> None:
        """A tied tensor arrives under every name that a replica wants it by: under several, under the other name alone,
        and from ranks of which the first has no part of it."""
        for name, pair in tied_pairs().items():
            trial = lab.trial(pair)
            trial.sync(1)
            measured.none(f"boxes that differ: {name}", trial.differing())
            measured.none(f"elements not sent once: {name}", not_once(trial.plan(), pair.target))

    @requirement("sync.chains", since=(2, 0))
    def test_chains(self, lab: ShardingLab, measured: Measured) -> None:
        """If replicas forward weights, they do so by an allowed transport, managers and syncs have unique names, and a
        replica that was started anew forwards as well."""
        arguments: Mapping[str, Any] = {"transports": ("object_store",), "timeout_s": CHAIN_S}
        first, second = lab.trial(chain(), **arguments), lab.trial(chain(), **arguments)
        for trial in (first, second):
            trial.sync(1)
            trial.restart(0)
            trial.step()
            trial.sync(2)
            measured.none("boxes that differ after a replica was started anew", trial.differing())
        relays = [[relay for host in t.replicas for relay in host.relays if relay is not None] for t in (first, second)]
        used = {relay.transport for mine in relays for relay in mine if relay.parent is not None}
        measured.none("transports that were not allowed", sorted(used - {"object_store"}))
        for what in ("manager", "sync"):
            one, other = ({getattr(relay, what) for relay in mine} for mine in relays)
            measured.none(f"names of a {what} that two managers share", sorted(one & other))

    @requirement("sync.values", since=(2, 0))
    def test_values(self, lab: ShardingLab, measured: Measured) -> None:
        """Only the cast that the replica needs changes values: this covers signed zeros, infinities, NaN, and integers
        of every width."""
        for held in ("float32", "bfloat16", "float16", "float64"):
            for served in ("float32", "bfloat16"):
                pair = Pair(source=sharded(2, dtype=held), replicas=[complete(0, served)])
                # Casts may change the payload of a NaN.
                trial = lab.trial(
                    pair,
                    bucket_bytes=1 << 14,
                    tensors=strange_tensors((*STRANGE, math.nan) if held == served else STRANGE),
                )
                trial.sync(1)
                measured.none(f"boxes that differ: {held} to {served}", trial.differing())
        for dtype in ("int8", "uint8", "int64", "bool"):
            pair = Pair(source=sharded(2, dtype=dtype), replicas=[complete(0, dtype)])
            trial = lab.trial(pair, whole_numbers(), bucket_bytes=1 << 14)
            trial.sync(1)
            measured.none(f"boxes that differ: {dtype}", trial.differing())

    @requirement("sync.report", since=(2, 0))
    def test_report(self, lab: ShardingLab, measured: Measured) -> None:
        """The report is right: version, tensors and bytes that arrived and crossed processes, changed tensors, and each
        replica's receipt."""
        unlike = pairs()["tensor parallel to another"]
        alternating = Pair(source=unlike.source, replicas=[complete(0), split(2, "rollout", 1), complete(2)])
        for name, pair in {
            **{name: pairs()[name] for name in ("float32 to bfloat16", "partly in one process")},
            "tensor parallel to another": unlike,
            "unlike replicas in turn": alternating,
        }.items():
            trial = lab.trial(pair)
            wire, plan = wire_dtypes(pair.source, pair.target), trial.plan()
            measured.equal(f"changed tensors of the first sync: {name}", trial.sync(1).changed_tensors, len(SHAPES))
            measured.equal(f"changed tensors of the same again: {name}", trial.sync(1).changed_tensors, 0)
            trial.truth["layers.0.experts.up"][-1, -1, -1] += 1
            trial.truth["scale"] -= 1
            trial.load()
            start = time.perf_counter()
            report = trial.sync(7)
            elapsed, timed = time.perf_counter() - start, report
            measured.equal(f"version: {name}", report.version, 7)
            measured.equal(f"tensors: {name}", report.num_tensors, len(SHAPES))
            num_bytes = sum(box.numel * DTYPE_BYTES[wire[tensor]] for _, tensor, box in wanted_boxes(pair))
            measured.equal(f"bytes: {name}", report.num_bytes, num_bytes)
            measured.equal(f"bytes that crossed: {name}", report.moved_bytes, plan.moved_bytes)
            measured.equal(f"lower bound: {name}", report.lower_bound_bytes, plan.lower_bound_bytes)
            measured.equal(f"changed tensors: {name}", report.changed_tensors, 2)
            measured.equal(
                f"changed tensors of none since: {name}", trial.sync(8, expect_change=False).changed_tensors, 0
            )
            trial.truth["scale"] -= 1
            trial.load()
            measured.equal(f"changed tensors of one since: {name}", trial.sync(9).changed_tensors, 1)
            report = trial.sync(9)
            wrong = [at for at, host in enumerate(trial.replicas) if report.receipts[at] != host.receipt]
            measured.none(f"receipts that are another replica's: {name}", wrong)
            used = {bucket.transport for bucket in plan.buckets}
            measured.none(f"transports: {name}", sorted(used ^ set(report.transports)))
            assert timed.seconds > 0, f"seconds: {timed.seconds}"
            measured.at_most(f"seconds, of those that passed: {name}", timed.seconds / elapsed, 1.05)
            measured.none(f"negative stages: {name}", [what for what, took in timed.stages_s.items() if took < 0])
            stages = sum(timed.stages_s.values())
            measured.at_most(f"seconds of the stages, of all: {name}", stages / timed.seconds, 1.05)

    @requirement("sync.report.whole", since=(2, 0))
    def test_report_whole(self, lab: ShardingLab, measured: Measured) -> None:
        """The report's seconds cover the whole sync, including verification; several used transports are in the order
        of preference; a change that the served dtype does not show is none. If replicas forward weights, each sync has
        its own name."""
        trial = lab.trial(pairs()["sharded to whole, two replicas"])
        trial.sync(1)
        trial.step()
        for host in trial.sources:
            host.proof_s = PROOF_S
        start = time.perf_counter()
        report = trial.sync(2)
        elapsed = time.perf_counter() - start
        measured.at_least("seconds, of those that passed", report.seconds / elapsed, 0.8)
        trial = lab.trial(pairs()["float32 to bfloat16"])
        trial.truth["scale"].fill_(1.0)
        trial.load()
        trial.sync(1)
        trial.truth["scale"].fill_(1.0 + 2.0**-20)
        trial.load()
        measured.equal("changed tensors, by less than is served", trial.sync(1).changed_tensors, 0)
        near_and_far = Pair(
            source=placed(sharded(2), node="a"),
            replicas=[placed(complete(0), node="a"), placed(complete(1), node="b")],
        )
        for order in (("ring", "object_store"), ("object_store", "ring")):
            trial = lab.trial(near_and_far, transports=order)
            used = {bucket.transport for bucket in trial.plan().buckets}
            expected = [name for name in order if name in used]
            said = list(trial.sync(1).transports)
            measured.none(f"transports, of {order}", [] if said == expected else [f"{said}, expected {expected}"])
        away = [placed(complete(at), node="b") for at in range(3)]
        trial = lab.trial(Pair(source=placed(sharded(2), node="a"), replicas=away))
        for version in (1, 2, 3):
            trial.sync(version, expect_change=False)
        taken = [host.relays for host in trial.replicas]
        names = [
            next((relay.sync for relay in relays if relay is not None), None) for relays in zip(*taken, strict=True)
        ]
        again = [name for at, name in enumerate(names) if name is not None and name in names[:at]]
        measured.none("names of an earlier sync", again)

    @requirement("sync.given_plan", since=(2, 0))
    def test_given_plan(self, lab: ShardingLab, measured: Measured) -> None:
        """The given plan is executed, not the latest one, the first one, or one of the manager's own; also a plan that
        another manager of the class, with other arguments, made in another process."""
        trial = lab.trial(pairs()["sharded to tensor parallel"], bucket_bytes=1 << 14)
        plan = trial.plan()
        other = pairs()["uneven shards"]
        trial.manager.plan(tuple(other.source), tuple(other.target))
        trial.manager.sync_weights(plan, 1)
        measured.none("boxes that differ: planned before another", trial.differing())
        sent = pickle.loads(pickle.dumps(plan))
        anew = lab.trial(trial.pair, bucket_bytes=1 << 14)
        anew.manager.sync_weights(sent, 1)
        measured.none("boxes that differ: planned elsewhere", anew.differing())
        others = {bound: lab.trial(trial.pair, bucket_bytes=bound).plan() for bound in (1 << 10, 1 << 13)}
        for bound, given in others.items():
            trial.step()
            trial.manager.sync_weights(given, bound)
            pulled = [bucket.transfers for bucket in trial.replicas[0].pulls[-1][0]]
            same = pulled == [bucket.transfers for bucket in given.buckets]
            measured.none(f"plans that were not executed: buckets of {bound} bytes", [] if same else [bound])
            measured.none(f"boxes that differ: buckets of {bound} bytes", trial.differing())

    @requirement("sync.large", since=(2, 0))
    def test_large(self, lab: ShardingLab, measured: Measured) -> None:
        """Tensors of many buckets or five dimensions arrive to their last element, even from sources whose memory is
        not contiguous."""
        shapes = {"large": (530, 270), "stacked": (5, 130, 111), "norm": (270,), "patches": (6, 3, 2, 5, 4)}
        metas = [TensorMeta(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]
        source = [
            tensor_layout(
                metas, [(m.name, cut(m.shape, 0, 2)[rank]) for m in metas], rank=rank, process=f"train:{rank}"
            )
            for rank in range(2)
        ]
        target = tensor_layout(metas, [(m.name, Box.whole(m.shape)) for m in metas], process="rollout:0")
        generator = torch.Generator().manual_seed(1)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        trial = lab.trial(Pair(source=source, replicas=[[target]]), tensors, bucket_bytes=100_000)
        trial.scatter()
        trial.sync(1)
        measured.none("boxes that differ", trial.differing())
        trial.truth["large"][-1, -1] += 1
        trial.load()
        measured.equal("changed tensors", trial.sync(2).changed_tensors, 1)
        measured.none("boxes that differ after the last element changed", trial.differing())

    @requirement("sync.calls", since=(2, 0))
    def test_calls(self, lab: ShardingLab, measured: Measured) -> None:
        """A replica pulls once per sync, the plan's buckets in order, with the version and a deadline; every call of
        ranks has a deadline."""
        for name in ("tensor parallel to another", "four copies to four replicas"):
            trial = lab.trial(pairs()[name], timeout_s=77.0)
            plan = trial.plan()
            trial.sync(5)
            first = 0
            for replica, host in enumerate(trial.replicas):
                assert len(host.pulls) == 1, f"replica {replica} pulled {len(host.pulls)} times"
                buckets, peers, version, timeout_s = host.pulls[0]
                parts = plan.parts[first : first + len(trial.pair.replicas[replica])]
                first += len(parts)
                planned = [bucket for part in parts for bucket in part]
                same = [b.transfers for b in buckets] == [b.transfers for b in planned]
                measured.none(f"replicas that pull something else: {name}", [] if same else [replica])
                measured.none("sources without a peer", sorted({b.source for b in buckets} - peers))
                measured.equal("version of the pull", version, 5)
                measured.at_most("seconds of its deadline", timeout_s, 77.0)
                assert timeout_s > 0
            calls = trial.train.calls + trial.rollout.calls
            measured.none("calls without a deadline", [method for method, timeout_s in calls if timeout_s is None])
            longest = max(timeout_s for _, timeout_s in calls if timeout_s is not None)
            measured.at_most("longest deadline of a call, of timeout_s", longest / 77.0, MOST_DEADLINE)

    @requirement("sync.consecutive_pieces", since=(2, 0))
    def test_consecutive_pieces(self, lab: ShardingLab, measured: Measured) -> None:
        """Replicas pull all pieces of one tensor consecutively."""
        for name in ("uneven shards", "four copies to four replicas", "expert parallel to tensor parallel"):
            trial = lab.trial(pairs()[name])
            trial.sync(1)
            pulled = [host.pulls[0][0] for host in trial.replicas]
            targets = sorted({bucket.target for buckets in pulled for bucket in buckets})
            parts = [[b for buckets in pulled for b in buckets if b.target == target] for target in targets]
            measured.none(f"out of order: {name}", list(out_of_order(parts)))
            for host in trial.replicas:
                names = host.serving.arrived
                runs = Counter(b for a, b in zip(["", *names], names, strict=False) if a != b)
                places = max(len(host.target.layouts()), 1)
                again = [tensor for tensor, number in runs.items() if number > places]
                measured.none(f"tensors that came in pieces, others between them: {name}", again)

    @requirement("sync.again", since=(2, 0))
    def test_again(self, lab: ShardingLab, measured: Measured) -> None:
        """Every sync transfers the current weights under any version: a repeated one, a lower one, 0, for a restarted
        replica, and if no change is expected."""
        trial = lab.trial(in_one_process(replicas=2))
        trial.sync(0)
        measured.none("boxes that differ: version 0", trial.differing())
        self._changed(trial, measured, "the same version again", 0)
        self._changed(trial, measured, "a higher version", 9)
        self._changed(trial, measured, "a very high version", 2**40 + 1)
        self._changed(trial, measured, "back to a lower version", 4)
        self._changed(trial, measured, "no change expected", 5, expect_change=False)
        for name, version in (("the same version", 5), ("a lower one", 3)):
            trial.forget(1)
            trial.sync(version)
            measured.none(f"boxes that differ: a replica started anew, {name}", trial.differing())
        trial.forget(0)
        trial.sync(8, expect_change=False)
        measured.none("boxes that differ: a replica started anew, no change expected", trial.differing())

    def _changed(
        self, trial: Trial, measured: Measured, name: str, version: int, *, expect_change: bool | None = None
    ) -> None:
        trial.step()
        report = trial.sync(version, expect_change=expect_change)
        measured.none(f"boxes that differ: {name}", trial.differing())
        measured.equal(f"version: {name}", report.version, version)
        measured.none(
            f"replicas at another version: {name}",
            [at for at, host in enumerate(trial.replicas) if host.serving.version != version],
        )

    @requirement("sync.isolation", since=(2, 0))
    def test_isolation(self, lab: ShardingLab, measured: Measured) -> None:
        """Two managers in one process do not affect each other."""
        first, second = lab.trial(in_one_process()), lab.trial(in_one_process())
        first.sync(3)
        second.sync(4, expect_change=True)
        other = lab.trial(pairs()["tensor parallel to another"])
        other.sync(1)
        first.step()
        first.sync(4, expect_change=True)
        second.step()
        second.sync(5)
        measured.none("boxes that differ", first.differing() + second.differing() + other.differing())

    @requirement("sync.leaks", since=(2, 0))
    def test_leaks(self, lab: ShardingLab, measured: Measured) -> None:
        """Syncs, including failed ones, leave no threads, no open files and no copies of weights."""
        trial = lab.trial(in_one_process(replicas=2))
        for version in range(3):
            trial.step()
            trial.sync(version)
        before = held_here()
        for version in range(3, 12):
            trial.step()
            trial.sources[0].left = 10**9 if version % 3 else 0
            try:
                trial.sync(version)
            except Exception:
                assert version % 3 == 0, "a sync failed behind one that broke off"
        measured.none("left behind", grown(before))
        for fails in (False, True):
            measured.none(
                "copies of weights, of a sync that failed" if fails else "copies of weights", copied(lab, fails=fails)
            )


def copied(lab: ShardingLab, *, fails: bool) -> list[str]:
    """Tensors of weights that exist after a sync and did not before, apart from those that the replica serves."""
    trial = lab.trial(in_one_process())
    known = storages()
    trial.sources[0].left = 0 if fails else 10**9
    with contextlib.suppress(RlsdkError, OSError):
        trial.manager.sync(1)
    served = {tensor.untyped_storage().data_ptr() for _, _, tensor in trial.replicas[0].serving.served}
    return [f"{size} bytes" for pointer, size in storages() - known if size >= LEAST_COPY and pointer not in served]


def strange_tensors(values: Sequence[float]) -> dict[str, Tensor]:
    """Tensors with values that a careless copy changes."""
    line = torch.tensor(values, dtype=torch.float64).repeat(max(map(math.prod, SHAPES.values())))
    return {name: line[: math.prod(shape)].reshape(shape) for name, shape in SHAPES.items()}


def whole_numbers() -> dict[str, Tensor]:
    """Tensors with all values of a byte."""
    return {name: (torch.arange(math.prod(shape)) % 128).reshape(shape) for name, shape in SHAPES.items()}


def held_here() -> tuple[int, int]:
    """(threads, open files) of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def grown(before: tuple[int, int]) -> list[str]:
    """Increases since `before`, after resources that are being freed had time to disappear."""
    deadline = time.monotonic() + GRACE_S
    while True:
        now = held_here()
        found = [
            f"{b} {what}, {a} before" for what, a, b in zip(("threads", "files"), before, now, strict=True) if b > a
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
