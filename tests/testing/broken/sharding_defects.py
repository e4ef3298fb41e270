"""The broken sharding managers by family, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect
from broken.state_defects import SHARDING_CHAINS

SHARDING_LAYOUTS = {
    "unknown-left-out": Defect("sharding_layouts:UnknownLeftOut", {"plan.refusals": "beside all that are known"}),
    "first-target-counts": Defect(
        "sharding_layouts:FirstTargetCounts",
        {"plan.refusals": "the last target's shape differs", "plan.served": "whole numbers at the last target"},
    ),
    "clips-boxes": Defect("sharding_layouts:ClipsBoxes", {"plan.refusals": "rows beyond the tensor"}),
    "tied-of-the-first": Defect("sharding_layouts:TiedOfTheFirst", {"sync.tied": "which no source rank holds"}),
    "one-other-name": Defect("sharding_layouts:OneOtherName", {"sync.tied": "which no source rank holds"}),
    "held-names-only": Defect("sharding_layouts:HeldNamesOnly", {"sync.tied": "is not served"}),
    "tuples-only": Defect("sharding_layouts:TuplesOnly", {"plan.pure": "expected a tuple"}),
    "one-dtype-of-targets": Defect("sharding_layouts:OneDtypeOfTargets", {"plan.any_layouts": "targets want"}),
    "columns-are-vectors": Defect("sharding_layouts:ColumnsAreVectors", {"plan.refusals": "a vector as a column"}),
    "plans-by-identity": Defect("sharding_layouts:PlansByIdentity", {"plan.any_layouts": "lists used again"}),
    "sorts-in-place": Defect("sharding_layouts:SortsInPlace", {"plan.pure": "lists that planning changed"}),
    "devices-by-name": Defect("sharding_layouts:DevicesByName", {"plan.near": "devices of one name on two nodes"}),
    "forwards-apart": Defect("sharding_layouts:ForwardsApart", {"plan.fields": "is apart from its replica's process"}),
    "prefers-in-process": Defect("sharding_layouts:PrefersInProcess", {"plan.preference": "in one process"}),
    "falls-back": Defect("sharding_layouts:FallsBack", {"plan.transports": "as none reaches"}),
    "whole-from-the-first": Defect("sharding_layouts:WholeFromTheFirst", {"plan.spread": "that every rank has"}),
    "counts-in-31-bits": Defect("sharding_layouts:CountsIn31Bits", {"plan.huge": "bytes"}),
    "four-dimensions": Defect("sharding_layouts:FourDimensions", {"sync.large": "more than four dimensions"}),
    "plan-of-its-own": Defect("sharding_repeats:PlanOfItsOwn", {"sync.given_plan": "plans that were not executed"}),
    "first-plan": Defect("sharding_repeats:FirstPlan", {"sync.given_plan": "plans that were not executed"}),
    "one-more-try": Defect(
        "sharding_repeats:OneMoreTry",
        {"sync.failures.once": "a replica hangs once", "sync.failures": "lets pull again"},
    ),
    "other-holders": Defect("sharding_repeats:OtherHolders", {"sync.failures.once": "of two copies is dead"}),
    "avoids-the-failed": Defect(
        "sharding_repeats:AvoidsTheFailed", {"sync.failures.once": "other plans after a failure"}
    ),
    "asks-once": Defect("sharding_repeats:AsksOnce", {"sync.failures.once": "there are no layouts"}),
    "first-replicas": Defect("sharding_repeats:FirstReplicas", {"sync.chains": "process"}),
    "one-name-for-managers": Defect("sharding_repeats:OneNameForManagers", {"sync.chains": "names of a manager"}),
    "syncs-by-number": Defect("sharding_repeats:SyncsByNumber", {"sync.chains": "names of a sync"}),
    "forwards-any-how": Defect("sharding_repeats:ForwardsAnyHow", {"sync.chains": "transports that were not allowed"}),
    "keeps-the-last": Defect("sharding_repeats:KeepsTheLast", {"sync.leaks": "copies of weights"}),
    "keeps-the-failed": Defect("sharding_repeats:KeepsTheFailed", {"sync.leaks": "of a sync that failed"}),
    "versions-in-16-bits": Defect("sharding_repeats:VersionsIn16Bits", {"sync.again": "a very high version"}),
    "receipts-by-kind": Defect("sharding_repeats:ReceiptsByKind", {"sync.report": "unlike replicas in turn"}),
    "negative-stage": Defect("sharding_repeats:NegativeStage", {"sync.report": "negative stages"}),
    "changed-as-trained": Defect("sharding_repeats:ChangedAsTrained", {"sync.report.whole": "by less than is served"}),
    "late-fingerprints": Defect("sharding_repeats:LateFingerprints", {"sync.calls": "longest deadline of a call"}),
    "checksums-of-all": Defect("sharding_repeats:ChecksumsOfAll", {"sync.checksums": "abc of unlike replicas"}),
    "checksums-are-due": Defect("sharding_repeats:ChecksumsAreDue", {"sync.checksums": "checksums aa-a"}),
    "checksums-at-first": Defect("sharding_repeats:ChecksumsAtFirst", {"sync.checksums": "checksums aaba"}),
    "short-checksums": Defect("sharding_repeats:ShortChecksums", {"sync.checksums": "checksums aaab"}),
    "later-is-fine": Defect("sharding_repeats:LaterIsFine", {"sync.proven": "names a later version"}),
}
SHARDING = {
    "big-buckets": Defect("sharding_plans:BigBuckets", {"plan.bytes": "largest bucket"}),
    "few-parameters": Defect(
        "sharding_plans:FewParameters",
        {"constructor": "parameters that it lacks", "plan.transports": "unexpected keyword argument"},
    ),
    "one-bucket-short": Defect(
        "sharding_plans:OneBucketShort", {"plan.cover": "elements not sent once", "sync.bitwise": "elements came"}
    ),
    "last-experts-lost": Defect(
        "sharding_plans:LastExpertsLost", {"plan.cover": "elements not sent once", "sync.bitwise": "elements came"}
    ),
    "two-dimensions": Defect(
        "sharding_plans:TwoDimensions", {"plan.cover": "elements not sent once", "sync.apart": "did not arrive"}
    ),
    "one-piece-twice": Defect(
        "sharding_plans:OnePieceTwice", {"plan.cover": "elements not sent once", "plan.order": "out of order"}
    ),
    "last-round-first": Defect(
        "sharding_plans:LastRoundFirst", {"plan.order": "out of order", "sync.together": "out of order"}
    ),
    "names-interleaved": Defect(
        "sharding_plans:NamesInterleaved", {"plan.order": "out of order", "sync.together": "out of order"}
    ),
    "bytes-of-floats": Defect("sharding_plans:BytesOfFloats", {"plan.fields": "fields that are wrong"}),
    "wide-wire": Defect("sharding_plans:WideWire", {"plan.bytes": "bytes", "sync.values": "does not serve version"}),
    "narrow-wire": Defect(
        "sharding_plans:NarrowWire", {"plan.fields": "fields that are wrong", "sync.values": "does not serve version"}
    ),
    "always-outside": Defect(
        "sharding_plans:AlwaysOutside", {"plan.bytes": "lower bound", "plan.near": "sent from afar"}
    ),
    "bound-per-source": Defect("sharding_plans:BoundPerSource", {"plan.bytes": "largest round"}),
    "first-copy-sends": Defect(
        "sharding_plans:FirstCopySends", {"plan.near": "sent from afar", "plan.spread": "largest load over a share"}
    ),
    "last-copy-sends": Defect(
        "sharding_plans:LastCopySends", {"plan.near": "sent from afar", "plan.spread": "largest load over a share"}
    ),
    "another-plan-each-time": Defect(
        "sharding_plans:AnotherPlanEachTime",
        {
            "plan.any_layouts": "plans that are not for these layouts",
            "plan.pure": "two plans of the same layouts differ",
        },
    ),
    "loads-of-nobody": Defect("sharding_plans:LoadsOfNobody", {"plan.fields": "fields that are wrong"}),
    "plans-once": Defect("sharding_plans:PlansOnce", {"plan.any_layouts": "plans that are not for these layouts"}),
    "plans-by-names": Defect(
        "sharding_plans:PlansByNames", {"plan.any_layouts": "plans that are not for these layouts"}
    ),
    "asks-while-planning": Defect(
        "sharding_plans:AsksWhilePlanning", {"plan.pure": "calls of ranks that planning made"}
    ),
    "holds-a-function": Defect(
        "sharding_plans:HoldsAFunction", {"plan.pure": "cannot pickle", "sync.given_plan": "cannot pickle"}
    ),
    "last-round-joined": Defect("sharding_plans:LastRoundJoined", {"plan.rounds": "bytes of"}),
    "tied-under-own-name": Defect(
        "sharding_plans:TiedUnderOwnName", {"plan.cover": "elements not sent once", "plan.order": "out of order"}
    ),
    "parts-by-rank": Defect(
        "sharding_plans:PartsByRank", {"plan.cover": "elements not sent once", "sync.apart": "elements came"}
    ),
    "only-the-last-plan": Defect("sharding_plans:OnlyTheLastPlan", {"sync.given_plan": "did not arrive"}),
    "plans-of-its-own": Defect("sharding_plans:PlansOfItsOwn", {"sync.given_plan": "KeyError"}),
    "rank-is-index": Defect(
        "sharding_plans:RankIsIndex", {"plan.fields": "holds no box with", "sync.bitwise": "did not arrive"}
    ),
    "order-of-its-own": Defect(
        "sharding_plans:OrderOfItsOwn", {"sync.together": "came in pieces, others between them"}
    ),
    "one-transport": Defect("sharding_plans:OneTransport", {"plan.fields": "which it does not reach"}),
    "bytes-of-the-first": Defect("sharding_plans:BytesOfTheFirst", {"plan.fields": "bytes of norm.weight"}),
    "single-numbers-lost": Defect("sharding_plans:SingleNumbersLost", {"plan.cover": "scale"}),
    "bound-is-what-moved": Defect("sharding_plans:BoundIsWhatMoved", {"plan.bytes": "lower bound"}),
    "last-rounds-together": Defect("sharding_plans:LastRoundsTogether", {"plan.bytes": "largest round"}),
    "any-transport": Defect("sharding_plans:AnyTransport", {"plan.preference": "other than the first"}),
    "unserved-is-fine": Defect("sharding_refusals:UnservedIsFine", {"plan.served": "nobody asks for a tensor"}),
    "holes-are-fine": Defect("sharding_refusals:HolesAreFine", {"plan.refusals": "a rank is missing"}),
    "same-size-is-same-shape": Defect(
        "sharding_refusals:SameSizeIsSameShape", {"plan.refusals": "a shape of as many elements"}
    ),
    "knows-no-ties": Defect(
        "sharding_refusals:KnowsNoTies",
        {"plan.near": "which no source rank holds", "plan.order": "which no source rank holds"},
    ),
    "transports-unread": Defect(
        "sharding_refusals:AnyTransport", {"plan.transports": "transports that were not allowed"}
    ),
    "serves-stale": Defect(
        "sharding_changes:ServesStale",
        {
            "sync.changed": "a step, behind one that was refused",
            "sync.unchanged": "version 2 with the weights of version 1",
        },
    ),
    "change-by-order": Defect(
        "sharding_changes:ChangeByOrder", {"sync.again": "no tensor changed", "sync.changed": "the same version"}
    ),
    "order-unread": Defect(
        "sharding_changes:OrderUnread",
        {"sync.again": "no tensor changed", "sync.unchanged": "the same version, though a change is expected"},
    ),
    "first-tensor-changed": Defect(
        "sharding_changes:FirstTensorChanged", {"sync.changed": "one element", "sync.report": "no tensor changed"}
    ),
    "sum-changed": Defect("sharding_changes:SumChanged", {"sync.changed": "two tensors changed places"}),
    "highest-version": Defect("sharding_changes:HighestVersion", {"sync.unchanged": "the same, asked again"}),
    "no-version-zero": Defect(
        "sharding_changes:NoVersionZero", {"sync.unchanged": "version 1 with the weights of version 0"}
    ),
    "forgets-refusals": Defect("sharding_changes:ForgetsRefusals", {"sync.unchanged": "the same, asked again"}),
    "less-when-unchanged": Defect("sharding_changes:LessWhenUnchanged", {"sync.again": "boxes that differ"}),
    "same-version-is-served": Defect(
        "sharding_changes:SameVersionIsServed",
        {"sync.again": "boxes that differ", "sync.report": "changed tensors of the same again"},
    ),
    "same-weights-are-served": Defect(
        "sharding_changes:SameWeightsAreServed",
        {"sync.again": "boxes that differ", "sync.report": "changed tensors of the same again"},
    ),
    "proof-of-the-version": Defect(
        "sharding_changes:ProofOfTheVersion",
        {"sync.again": "does not serve version", "sync.changed": "a step, behind one that was refused"},
    ),
    "says-nothing": Defect(
        "sharding_changes:SaysNothing",
        {"sync.again": "no tensor changed", "sync.unchanged": "the same version, though a change is expected"},
    ),
    "most-must-change": Defect(
        "sharding_changes:MostMustChange", {"sync.changed": "one element", "sync.large": "no tensor changed"}
    ),
    "failure-is-a-fresh-start": Defect(
        "sharding_changes:FailureIsAFreshStart",
        {"sync.unchanged": "version 2 with the weights of version 1, asked again"},
    ),
    "first-elements": Defect("sharding_changes:FirstElements", {"sync.large": "elements came"}),
    "versions-rise": Defect(
        "sharding_changes:VersionsRise", {"sync.again": "is older than", "sync.changed": "a lower version"}
    ),
    "change-is-an-error": Defect(
        "sharding_changes:ChangeIsAnError", {"sync.changed": "weights changed that should not"}
    ),
    "failed-sync-counts": Defect("sharding_changes:FailedSyncCounts", {"sync.unchanged": "asked again after"}),
    "false-is-none": Defect("sharding_changes:FalseIsNone", {"sync.changed": "no change expected"}),
    "all-changed": Defect(
        "sharding_reports:AllChanged",
        {"sync.large": "changed tensors", "sync.report": "changed tensors of the same again"},
    ),
    "receipts-sorted": Defect(
        "sharding_reports:ReceiptsSorted", {"sync.report": "receipts that are another replica's"}
    ),
    "bytes-of-one-replica": Defect("sharding_reports:BytesOfOneReplica", {"sync.report": "bytes"}),
    "changed-since-the-first": Defect(
        "sharding_reports:ChangedSinceTheFirst", {"sync.report": "changed tensors of none since"}
    ),
    "seconds-without-proof": Defect(
        "sharding_reports:SecondsWithoutProof", {"sync.report.whole": "of those that passed"}
    ),
    "ways-by-alphabet": Defect("sharding_reports:WaysByAlphabet", {"sync.report.whole": "transports, of"}),
    "one-name-for-all": Defect("sharding_reports:OneNameForAll", {"sync.report.whole": "names of an earlier sync"}),
    "says-the-version-before": Defect("sharding_reports:SaysTheVersionBefore", {"sync.report": "version"}),
    "all-has-moved": Defect("sharding_reports:AllHasMoved", {"sync.report": "bytes that crossed"}),
    "ways-unsaid": Defect("sharding_reports:WaysUnsaid", {"sync.report": "transports"}),
    "counts-transfers": Defect("sharding_reports:CountsTransfers", {"sync.report": "tensors"}),
    "seconds-are-milliseconds": Defect(
        "sharding_reports:SecondsAreMilliseconds", {"sync.report": "seconds, of those that passed"}
    ),
    "remembers-too-soon": Defect(
        "sharding_failures:RemembersTooSoon",
        {"sync.failures": "no tensor changed", "sync.interrupted": "no tensor changed"},
    ),
    "one-memory-for-all": Defect("sharding_failures:OneMemoryForAll", {"sync.apart": "no tensor changed"}),
    "failures-are-logged": Defect(
        "sharding_failures:FailuresAreLogged",
        {
            "sync.failures": "a rank gives no fingerprints",
            "sync.interrupted": "broken off after 0 buckets of each rank",
        },
    ),
    "one-replica-of-many": Defect(
        "sharding_failures:OneReplicaOfMany", {"sync.failures": "the last of four replicas fails"}
    ),
    "busy-for-ever": Defect(
        "sharding_failures:BusyForEver",
        {"sync.interrupted": "a sync is under way", "sync.leaks": "a sync failed behind one that broke off"},
    ),
    "waits-for-ever": Defect("sharding_failures:WaitsForEver", {"sync.calls": "calls without a deadline"}),
    "own-deadline": Defect("sharding_failures:OwnDeadline", {"sync.calls": "seconds of its deadline"}),
    "leaves-threads": Defect("sharding_failures:LeavesThreads", {"sync.leaks": "left behind"}),
    "one-place-each": Defect(
        "sharding_failures:OnePlaceEach", {"sync.apart": "elements came", "sync.interrupted": "elements came"}
    ),
    "shared-pool-of-the-class": Defect("sharding_failures:SharedPoolOfTheClass", {"sync.managers": ""}),
    "pulls-twice": Defect("sharding_failures:PullsTwice", {"sync.calls": "replica 0 pulled 2 times"}),
    "peers-by-count": Defect(
        "sharding_proofs:PeersByCount", {"sync.sources": "was not given", "sync.together": "was not given"}
    ),
    "bits-of-the-source": Defect(
        "sharding_proofs:BitsOfTheSource",
        {"sync.bitwise": "does not serve version", "sync.values": "does not serve version"},
    ),
    "trusts-receipts": Defect(
        "sharding_proofs:TrustsReceipts",
        {"sync.proven.first": "keeps all as it was", "sync.sources": "mixtures accepted"},
    ),
    "first-receipt-only": Defect(
        "sharding_proofs:FirstReceiptOnly",
        {"sync.proven": "replica 1 of 4 keeps all as it was", "sync.proven.first": "keeps all as it was"},
    ),
    "last-receipt-unread": Defect(
        "sharding_proofs:LastReceiptUnread",
        {"sync.proven": "replica 3 of 4 keeps all as it was", "sync.proven.first": "keeps all as it was"},
    ),
    "compares-tied-copies": Defect("sharding_proofs:ComparesTiedCopies", {"sync.names": "has other values than"}),
    "names-of-the-receipt": Defect(
        "sharding_proofs:NamesOfTheReceipt",
        {
            "sync.proven": "does not account for one tensor",
            "sync.proven.first": "does not account for one tensor",
        },
    ),
    "sum-of-fingerprints": Defect(
        "sharding_proofs:SumOfFingerprints",
        {
            "sync.proven": "replica 1 of 4 serves two tensors in each other's place",
            "sync.proven.first": "serves two tensors in each other's place",
        },
    ),
    "version-unread": Defect(
        "sharding_proofs:VersionUnread",
        {"sync.proven": "replica 3 of 4 names another version", "sync.proven.first": "names another version"},
    ),
    "matrices-only": Defect(
        "sharding_proofs:MatricesOnly",
        {"sync.proven": "replica 1 of 4 keeps one tensor", "sync.proven.first": "keeps one tensor"},
    ),
    "trusts-itself": Defect("sharding_proofs:TrustsItself", {"sync.sources": "mixtures accepted"}),
    "rank-zero-proves": Defect(
        "sharding_proofs:RankZeroProves",
        {"sync.proven.first": "replica 0 of unlike ones", "sync.sources": "mixtures accepted"},
    ),
    "other-errors": Defect(
        "sharding_proofs:OtherErrors", {"sync.proven": "does not serve version", "sync.failures": "no memory left"}
    ),
    "compares-what-changed": Defect(
        "sharding_proofs:ComparesWhatChanged", {"sync.proven.each": "where another tensor was trained"}
    ),
    "trusts-tied-copies": Defect("sharding_proofs:TrustsTiedCopies", {"sync.proven.each": "head.weight"}),
    "small-fingerprints": Defect("sharding_proofs:SmallFingerprints", {"sync.proven": "keeps one element"}),
    "weights-only": Defect("sharding_proofs:WeightsOnly", {"sync.proven": "in each other's place"}),
    "first-few": Defect("sharding_proofs:FirstFew", {"sync.proven": "keeps one tensor"}),
    "pairs-of-replicas": Defect(
        "sharding_proofs:PairsOfReplicas", {"sync.proven": "replica 1 of 4 keeps all as it was"}
    ),
    "tied-names-of-any": Defect(
        "sharding_refusals:TiedNamesOfAny", {"plan.refusals": "a tied name that one rank lists"}
    ),
    "more-is-wrong": Defect("sharding_proofs:MoreIsWrong", {"sync.names": "was not sent"}),
    "checksums-are-ignored": Defect("sharding_proofs:ChecksumsAreIgnored", {"sync.checksums": "checksums aaab"}),
    "quantized-by-replica": Defect("sharding_reports:QuantizedByReplica", {"sync.quantized": "4 quantized tensors"}),
    "first-peers": Defect("sharding_failures:FirstPeers", {"sync.failures": "the line is dead"}),
    "every-error-is-a-sync-error": Defect(
        "sharding_failures:EveryErrorIsASyncError", {"sync.failures": "dies: WeightSyncError"}
    ),
    "leaves-dead-out": Defect("sharding_failures:LeavesDeadOut", {"sync.failures": "dies"}),
    "replicas-agree": Defect("sharding_proofs:ReplicasAgree", {"sync.proven": "every replica of 4"}),
    "scales-are-no-change": Defect("sharding_changes:ScalesAreNoChange", {"sync.quantized": "doubled"}),
    **SHARDING_CHAINS,
    **SHARDING_LAYOUTS,
}
