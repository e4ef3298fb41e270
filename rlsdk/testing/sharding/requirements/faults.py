"""Requirements: a failed sync is an error; replicas never silently serve anything but the trained weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlsdk.interfaces import DeadlineError, RlsdkError, SyncReceipt, WeightSyncError, WorkerError
from rlsdk.testing.sharding.faulty_replicas import damages, lies
from rlsdk.testing.sharding.lab import ShardingLab, Trial, WatchedRolloutHost, WatchedTrainHost
from rlsdk.testing.sharding.layouts import TIED, Pair, chain, copies, in_one_process, pairs, placed, tied, with_head
from rlsdk.testing.sharding.tensor_engines import TensorTrainEngine
from rlsdk.testing.suites.requirements import Measured, requirement

LARGE: Mapping[str, Any] = {"bucket_bytes": 1 << 14}
"""Bucket size of requirements that are not about buckets: few buckets are faster."""
PATIENCE_S = 2.0
"""`timeout_s` of a sync that takes longer: so much more than one of its items that no machine is too busy."""
REFUSED = (RlsdkError, OSError)
"""Errors of an interrupted sync: an error of the SDK, or the rank's own."""


class SyncFaultRequirements:
    """Mixed into `ShardingConformance`."""

    @requirement("sync.verified")
    def test_verified(self, lab: ShardingLab, measured: Measured) -> None:
        """If any of four replicas serves other weights than it was sent, or only some of them, it is a WeightSyncError,
        even if all four serve the same; the next sync is not affected."""
        accepted, harmed = [], []
        for at, (name, lie) in enumerate(lies().items()):
            # Each lie is tried on one replica and on all of them; the first, the coarsest, on each.
            for liars in [[liar] for liar in range(4) if at == 0 or liar == at % 4] + [list(range(4))]:
                trial = lab.trial(in_one_process(replicas=4), **LARGE)
                trial.sync(1)
                trial.step()
                for liar in liars:
                    trial.replicas[liar].lie = lie
                if not refused(trial, 2, WeightSyncError):
                    who = f"replica {liars[0]} of 4" if len(liars) == 1 else "every replica of 4"
                    accepted.append(f"{who} {name}")
                    continue
                for liar in liars:
                    trial.replicas[liar].lie = None
                trial.sync(2, expect_change=True)
                harmed += [name] if trial.differing() else []
        measured.none("accepted", accepted)
        measured.none("the next sync left something else", harmed)

    @requirement("sync.verified.first", since=(2, 0))
    def test_verified_first(self, lab: ShardingLab, measured: Measured) -> None:
        """A replica that serves wrong weights is a WeightSyncError even after the first sync; even if it has several
        ranks and other replicas have other layouts; and even if it receives weights from, or forwards them to, another
        replica."""
        accepted = []
        for name, lie in lies().items():
            trial = lab.trial(in_one_process(replicas=2), **LARGE)
            trial.replicas[1].lie = lie
            accepted += [] if refused(trial, 1, WeightSyncError) else [name]
        for where, pair in {"unlike ones": pairs()["tensor parallel to another"], "a chain": chain()}.items():
            for liar in range(3):
                trial = lab.trial(pair, **LARGE)
                trial.replicas[liar].lie = lies()["keeps one element of its experts"]
                accepted += [] if refused(trial, 1, WeightSyncError) else [f"replica {liar} of {where}"]
        measured.none("accepted", accepted)

    @requirement("sync.verified.each", since=(2, 0))
    def test_verified_each(self, lab: ShardingLab, measured: Measured) -> None:
        """A replica that serves any one tensor wrongly, or its own copy of a tied one, is a WeightSyncError, even if
        the trained tensor, or all of them, have not changed since the last sync."""
        pair = in_one_process()
        headed = Pair(source=tied(pair.source), replicas=[placed(with_head(pair.target), process="one")])
        accepted = []
        for where, tried in (("", pair), (", beside a head of its own", headed)):
            trial = lab.trial(tried, **LARGE)
            trial.sync(4)
            names = sorted({name for name, _, _ in trial.replicas[0].serving.served})
            for at, name in enumerate(names):
                trial.replicas[0].lie = damages(name)
                how, version, change = UNMOVED[at % len(UNMOVED)]
                if change:
                    held = trial.tied.get(name, name)
                    other = next(known for known in trial.truth if known != held)
                    trial.truth[other].add_(1)
                    trial.load()
                accepted += (
                    [] if refused(trial, version, WeightSyncError, expect_change=change) else [name + how + where]
                )
            trial.replicas[0].lie = None
            trial.sync(9, expect_change=False)
            measured.none(f"boxes that differ after the next sync{where}", trial.differing())
        measured.none("accepted", accepted)

    @requirement("sync.sources", since=(2, 0))
    def test_sources(self, lab: ShardingLab, measured: Measured) -> None:
        """If copies of a shard are no longer equal, it is a WeightSyncError, or all served weights are of one copy."""
        mixed = []
        for number, replicas, ranks in ((2, 1, range(4)), (2, 2, (0, 3)), (4, 1, (2, 7))):
            for stale in ranks:
                trial = lab.trial(copies(number, replicas), **LARGE)
                trial.sync(1)
                old = trial.snapshot()
                trial.step(without=[stale])
                is_mixed = not refused(trial, 2, WeightSyncError) and trial.differing() and trial.differing(old)
                mixed += [f"{number} copies, rank {stale}"] if is_mixed else []
        measured.none("mixtures accepted", mixed)

    @requirement("sync.unchanged")
    def test_unchanged(self, lab: ShardingLab, measured: Measured) -> None:
        """Weights that equal those of a lower version are a WeightSyncError: the steps did not change them."""
        wrong = [name for name, course in UNCHANGED.items() if (fault := course.fault(lab)) and not fault.allowed]
        for name, breaks in FAILURES.items():
            trial = lab.trial(in_one_process(replicas=4), **LARGE)
            trial.sync(1)
            breaks(trial, True)
            refused(trial, 2, *REFUSED)
            breaks(trial, False)
            if not refused(trial, 2, WeightSyncError):
                wrong.append(f"version 2 with the weights of version 1, asked again after {name}")
        measured.none("accepted", wrong)

    @requirement("sync.changed", since=(2, 0))
    def test_changed(self, lab: ShardingLab, measured: Measured) -> None:
        """Weights that changed, however little, are no error, and neither are unchanged ones if no change was
        expected."""
        wrong = [f"{name}: {fault.why}" for name, course in CHANGED.items() if (fault := course.fault(lab))]
        measured.none("refused", wrong)

    @requirement("sync.interrupted")
    def test_interrupted(self, lab: ShardingLab, measured: Measured) -> None:
        """A source that fails in the middle is an error; no replica serves a mixture, and the next sync repairs it."""
        trial = lab.trial(pairs()["sharded to tensor parallel"])
        trial.sync(1)
        old = trial.snapshot()
        trial.step()
        ranks = len(trial.sources)
        accepted, mixtures = [], []
        for after in (0, 1, len(trial.plan().buckets) // ranks // 2):
            for host in trial.sources:
                host.left = after
            if not refused(trial, 2, *REFUSED):
                accepted.append(f"broken off after {after} buckets of each rank")
            mixtures += [f"after {after} buckets"] if trial.differing() and trial.differing(old) else []
        measured.none("accepted", accepted)
        measured.none("mixtures served", mixtures)
        for host in trial.sources:
            host.left = 10**9
        trial.sync(2, expect_change=True)
        measured.none("boxes that differ after the next sync", trial.differing())

    @requirement("sync.failures", since=(2, 0))
    def test_failures(self, lab: ShardingLab, measured: Measured) -> None:
        """A replica that fails, dies or hangs, a rank without fingerprints, or a rank that fails at a first sync is an
        error, which says what happened: no replica is left out. A repeated sync brings the weights everywhere, under
        the same version or a higher one, even to a replica that was restarted meanwhile."""
        accepted, misnamed, harmed, repeated = [], [], [], []
        for name, breaks in FAILURES.items():
            for first in (False, True):
                trial = lab.trial(in_one_process(replicas=4), **LARGE)
                if not first:
                    trial.sync(1)
                trial.step()
                breaks(trial, True)
                if (error := error_of(trial, 2)) is None:
                    accepted.append(name)
                    continue
                if not isinstance(error, NAMED.get(name, REFUSED)):
                    misnamed.append(f"{name}: {type(error).__name__}")
                tried = [len(host.pulls) for host in trial.replicas]
                repeated += [] if max(tried) <= (1 if first else 2) else [f"{name}: {tried} pulls"]
                breaks(trial, False)
                trial.forget(1)
                trial.sync(3 if first else 2, expect_change=True)
                harmed += [f"{name}: {what}" for what in trial.differing()]
        measured.none("accepted", accepted)
        measured.none("errors of another kind than what happened", misnamed)
        measured.none("replicas that a failed sync lets pull again", repeated)
        measured.none("boxes that differ after the next sync", harmed)

    @requirement("sync.failures.once", since=(2, 0))
    def test_failures_once(self, lab: ShardingLab, measured: Measured) -> None:
        """A replica or a rank that fails only once is an error too: a sync is repeated by its caller. So is a source
        that died, although others hold the same weights. Afterwards plans are as before, and a sync whose request for
        layouts failed can be repeated."""
        accepted, harmed = [], []
        for name, error in {"fails": WeightSyncError("once"), "hangs": DeadlineError("once")}.items():
            trial = lab.trial(in_one_process(replicas=2), **LARGE)
            trial.sync(1)
            trial.step()
            trial.replicas[1].lie = partial(_raise_once, error)
            if not refused(trial, 2, type(error)):
                accepted.append(f"a replica {name} once")
                continue
            trial.sync(2, expect_change=True)
            harmed += trial.differing()
        for rank in range(4):
            trial = lab.trial(copies(2, 2), **LARGE)
            plan = trial.plan()
            if rank not in {bucket.source for bucket in plan.buckets}:
                continue
            trial.sources[rank].left = 0
            accepted += [] if refused(trial, 1) else [f"rank {rank} of two copies is dead"]
            same = list(trial.plan().buckets) == list(plan.buckets)
            measured.none("other plans after a failure", [] if same else [rank])
            trial.sources[rank].left = 10**9
            trial.sync(1)
            harmed += trial.differing()
        for side in ("train", "rollout"):
            trial = lab.trial(in_one_process(), **LARGE)
            group = getattr(trial, side)
            group.dead = True
            accepted += [] if refused(trial, 1) else [f"the {side} group gives no layouts"]
            group.dead = False
            trial.sync(1)
            harmed += trial.differing()
        measured.none("accepted", accepted)
        measured.none("boxes that differ after the next sync", harmed)

    @requirement("sync.checksums", since=(2, 0))
    def test_checksums(self, lab: ShardingLab, measured: Measured) -> None:
        """If replicas of the same boxes give different checksums of their own (`SyncReceipt.engine_checksum`), it is a
        WeightSyncError, although all fingerprints are right, also after syncs that succeeded; with equal ones, or if
        some have none, the sync succeeds. Replicas of other boxes may give others."""
        for first, sums in (("", "aaaa"), ("", "aaab"), ("", "baaa"), ("", "abab"), ("", "aa-a"), ("aaaa", "aaba")):
            trial = lab.trial(in_one_process(replicas=4), **LARGE)
            if first:
                _give_checksums(trial, first)
                trial.sync(0)
            _give_checksums(trial, sums)
            was_refused = refused(trial, 1, WeightSyncError, expect_change=False)
            measured.equal(f"refused, checksums {sums}", was_refused, len({*sums} - {"-"}) > 1)
        trial = lab.trial(pairs()["tensor parallel to another"], **LARGE)
        _give_checksums(trial, "abc")
        measured.equal("refused, checksums abc of unlike replicas", refused(trial, 1, WeightSyncError), 0)

    @requirement("sync.names", since=(2, 0))
    def test_names(self, lab: ShardingLab, measured: Measured) -> None:
        """Receipts may name more tensors than were sent: tied copies, also of another dtype, buffers of the engine."""
        for name, pair in {"two replicas": in_one_process(replicas=2), "tied": pairs()["tied on both sides"]}.items():
            trial = lab.trial(pair, **LARGE)
            trial.replicas[-1].lie = _with_more_names
            trial.sync(1)
            trial.step()
            trial.sync(2, expect_change=True)
            measured.none(f"boxes that differ, {name}", trial.differing())

    @requirement("sync.slow", since=(2, 0))
    def test_slow(self, lab: ShardingLab, measured: Measured) -> None:
        """A sync that takes longer than `timeout_s` succeeds, because weights arrive all the time."""
        trial = lab.trial(pairs()["one rank to one"], timeout_s=PATIENCE_S)
        num_items = len({meta.name for meta in trial.pair.target[0].tensors})
        trial.replicas[0].serving.pause_s = PATIENCE_S / num_items
        start = time.perf_counter()
        trial.sync(1)
        measured.at_least("seconds", time.perf_counter() - start, PATIENCE_S)
        measured.none("boxes that differ", trial.differing())


UNMOVED: Sequence[tuple[str, int, bool]] = (
    (", where another tensor was trained", 5, True),
    (", where none was trained", 5, False),
    (", under the version of before", 4, False),
    (", under a lower version", 2, False),
)
"""Description, version, and whether a tensor other than the tested one has changed since the last sync."""


def refused(trial: Trial, version: int, *errors: type[Exception], expect_change: bool | None = None) -> bool:
    """Whether a sync ends in one of these errors."""
    return error_of(trial, version, *errors, expect_change=expect_change) is not None


def error_of(
    trial: Trial, version: int, *errors: type[Exception], expect_change: bool | None = None
) -> Exception | None:
    """The error of these kinds (by default `REFUSED`) that ended a sync; None: it succeeded."""
    expected = errors or REFUSED
    try:
        trial.sync(version, expect_change=expect_change)
    except expected as error:
        return error
    return None


@dataclass(frozen=True)
class Fault:
    """A course with a wrong result."""

    why: str
    allowed: bool = False
    """Whether a sync that should succeed raised an error."""


@dataclass(frozen=True)
class Course:
    """A sequence of syncs."""

    syncs: Sequence[tuple[Callable[[Trial], None] | None, int, bool | None, bool]]
    """For each sync: how the weights change before it, version, `expect_change`, and whether it is refused."""

    def fault(self, lab: ShardingLab) -> Fault | None:
        """The first wrong result; None: all are right."""
        trial = lab.trial(in_one_process(), **LARGE)
        for change, version, expect_change, refused in self.syncs:
            if change is not None:
                change(trial)
            try:
                trial.sync(version, expect_change=expect_change)
            except WeightSyncError as error:
                if not refused:
                    return Fault(f"version {version}: {error}", allowed=True)
            else:
                if refused:
                    return Fault(f"version {version} was accepted")
                if found := trial.differing():
                    return Fault(f"version {version}: {found[0]} differs")
        return None


def _step(trial: Trial) -> None:
    trial.step()


def _one_element(trial: Trial) -> None:
    trial.truth["layers.0.experts.up"][5, 9, 23] += 1
    trial.load()


def _exchange(trial: Trial) -> None:
    """Swaps two tensors of one shape: the set of all fingerprints does not change."""
    a, b = trial.truth["layers.0.qkv.bias"], trial.truth["layers.1.qkv.bias"]
    a[:], b[:] = b.clone(), a.clone()
    trial.load()


UNCHANGED = {
    "version 2 with the weights of version 1": Course([(None, 1, None, False), (None, 2, None, True)]),
    "version 1 with the weights of version 0": Course([(None, 0, None, False), (None, 1, None, True)]),
    "the same, asked again": Course([(None, 1, None, False), (None, 2, None, True), (None, 2, None, True)]),
    "the same, asked for a later one": Course([(None, 1, None, False), (None, 2, None, True), (None, 3, None, True)]),
    "version 4 with the weights of 3, behind version 5": Course(
        [(None, 5, None, False), (_step, 3, None, False), (None, 4, None, True)]
    ),
    "the same version, though a change is expected": Course([(None, 1, None, False), (None, 1, True, True)]),
    "a lower version, though a change is expected": Course([(None, 4, None, False), (None, 2, True, True)]),
    "version 3 with the weights of 2, which none were expected to change": Course(
        [(None, 1, None, False), (None, 2, False, False), (None, 3, None, True)]
    ),
    "version 3 with the weights of 2, long after": Course(
        [(None, 1, None, False), (_step, 2, None, False), (None, 3, None, True)]
    ),
}
"""Courses with a sync that must be refused."""
CHANGED = {
    "the first sync": Course([(None, 700, True, False)]),
    "the same version": Course([(None, 1, None, False), (None, 1, None, False)]),
    "a lower version": Course([(None, 5, None, False), (None, 2, None, False)]),
    "a higher version, no change expected": Course([(None, 1, None, False), (None, 2, False, False)]),
    "a step": Course([(None, 1, None, False), (_step, 2, None, False), (_step, 3, True, False)]),
    "one element": Course([(None, 1, None, False), (_one_element, 2, True, False)]),
    "two tensors changed places": Course([(None, 1, None, False), (_exchange, 2, True, False)]),
    "a step, behind one that was refused": Course(
        [(None, 1, None, False), (None, 2, None, True), (_step, 2, None, False)]
    ),
    "a step under a lower version, a change expected": Course([(None, 5, None, False), (_step, 2, True, False)]),
    **{
        f"{name}, {how} version, expect_change {expected}": Course(
            [(None, 5, None, False), (change, version, expected, False)]
        )
        for name, change in {"a step": _step, "one element": _one_element, "an exchange": _exchange}.items()
        for how, version in {"a lower": 4, "the same": 5, "a higher": 6}.items()
        for expected in (None, False, True)
    },
}
"""Courses whose syncs must all be accepted."""


def _replica_fails(error: RlsdkError, trial: Trial, on: bool) -> None:
    def fail(host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]) -> SyncReceipt:
        raise error

    trial.replicas[3].lie = fail if on else None


def _raise_once(
    error: RlsdkError, host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]
) -> SyncReceipt:
    host.lie = None
    raise error


def _give_checksums(trial: Trial, sums: str) -> None:
    """Checksums of equal length that differ in the last character; `-`: none."""
    for host, own in zip(trial.replicas, sums, strict=True):
        host.lie = partial(_with_checksum, None if own == "-" else f"{'0' * 63}{own}")


def _with_checksum(
    own: str | None, host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]
) -> SyncReceipt:
    return replace(pull(), engine_checksum=own)


def _with_more_names(host: WatchedRolloutHost, old: SyncReceipt, pull: Callable[[], SyncReceipt]) -> SyncReceipt:
    receipt = pull()
    more = {"lm_head.copy": 1, "rotary.frequencies": 2, **dict.fromkeys(TIED, 3)}
    return replace(receipt, fingerprints={**receipt.fingerprints, **more})


def _is_started_anew(trial: Trial, on: bool) -> None:
    """A rank dies, and another one takes its place."""
    if on:
        trial.sources[0].left, trial.sources[0].proof_error = 0, WorkerError("the rank's process has died")
    else:
        trial.sources[0] = WatchedTrainHost(TensorTrainEngine(trial.truth, trial.pair.source[0]))


def _no_fingerprints(error: Exception, trial: Trial, on: bool) -> None:
    trial.sources[0].proof_error = error if on else None


def _breaks_off(trial: Trial, on: bool) -> None:
    trial.sources[0].left = 1 if on else 10**9


PROOF_ERRORS = (
    OSError("no fingerprints"),
    WorkerError("the rank's process has died"),
    DeadlineError("the rank did not answer"),
)
FAILURES: Mapping[str, Callable[[Trial, bool], None]] = {
    "the last of four replicas fails": partial(_replica_fails, WeightSyncError("the replica has no memory left")),
    "the last of four replicas dies": partial(_replica_fails, WorkerError("the replica's process has died")),
    "the last of four replicas hangs": partial(_replica_fails, DeadlineError("the replica made no progress")),
    **{
        f"a rank gives no fingerprints: {type(error).__name__}": partial(_no_fingerprints, error)
        for error in PROOF_ERRORS
    },
    "a rank breaks off": _breaks_off,
    "a rank dies, and is started anew": _is_started_anew,
}
NAMED: Mapping[str, type[Exception]] = {
    "the last of four replicas fails": WeightSyncError,
    "the last of four replicas dies": WorkerError,
    "the last of four replicas hangs": DeadlineError,
    "a rank gives no fingerprints: WorkerError": WorkerError,
    "a rank gives no fingerprints: DeadlineError": DeadlineError,
}
"""The error by which the caller can tell whether to start a worker anew."""
