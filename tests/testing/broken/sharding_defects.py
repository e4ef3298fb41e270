"""The broken sharding managers, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect

SHARDING = {
    "big-buckets": Defect("BigBuckets", {"plan.bytes": "largest bucket"}),
    "few-parameters": Defect(
        "FewParameters", {"constructor": "parameters that it lacks", "plan.transports": "unexpected keyword argument"}
    ),
    "one-bucket-short": Defect(
        "OneBucketShort", {"plan.cover": "elements not sent once", "sync.bitwise": "elements came"}
    ),
    "last-experts-lost": Defect(
        "LastExpertsLost", {"plan.cover": "elements not sent once", "sync.bitwise": "elements came"}
    ),
    "two-dimensions": Defect("TwoDimensions", {"plan.cover": "elements not sent once", "sync.apart": "did not arrive"}),
    "one-piece-twice": Defect("OnePieceTwice", {"plan.cover": "elements not sent once", "plan.order": "out of order"}),
    "last-round-first": Defect("LastRoundFirst", {"plan.order": "out of order", "sync.together": "out of order"}),
    "names-interleaved": Defect("NamesInterleaved", {"plan.order": "out of order", "sync.together": "out of order"}),
    "bytes-of-floats": Defect("BytesOfFloats", {"plan.fields": "fields that are wrong"}),
    "wide-wire": Defect("WideWire", {"plan.bytes": "bytes", "sync.values": "does not serve version"}),
    "narrow-wire": Defect(
        "NarrowWire", {"plan.fields": "fields that are wrong", "sync.values": "does not serve version"}
    ),
    "always-outside": Defect("AlwaysOutside", {"plan.bytes": "lower bound", "plan.near": "sent from afar"}),
    "bound-per-source": Defect("BoundPerSource", {"plan.bytes": "largest round"}),
    "first-copy-sends": Defect(
        "FirstCopySends", {"plan.near": "sent from afar", "plan.spread": "largest load over a share"}
    ),
    "last-copy-sends": Defect(
        "LastCopySends", {"plan.near": "sent from afar", "plan.spread": "largest load over a share"}
    ),
    "another-plan-each-time": Defect(
        "AnotherPlanEachTime",
        {
            "plan.any_layouts": "plans that are not for these layouts",
            "plan.pure": "two plans of the same layouts differ",
        },
    ),
    "loads-of-nobody": Defect("LoadsOfNobody", {"plan.fields": "fields that are wrong"}),
    "plans-once": Defect("PlansOnce", {"plan.any_layouts": "plans that are not for these layouts"}),
    "plans-by-names": Defect("PlansByNames", {"plan.any_layouts": "plans that are not for these layouts"}),
    "asks-while-planning": Defect("AsksWhilePlanning", {"plan.pure": "calls of ranks that planning made"}),
    "holds-a-function": Defect("HoldsAFunction", {"plan.pure": "cannot pickle", "sync.given_plan": "cannot pickle"}),
    "unserved-is-fine": Defect("UnservedIsFine", {"plan.served": "nobody asks for a tensor"}),
    "holes-are-fine": Defect("HolesAreFine", {"plan.refusals": "a rank is missing"}),
    "same-size-is-same-shape": Defect("SameSizeIsSameShape", {"plan.refusals": "a shape of as many elements"}),
    "knows-no-ties": Defect(
        "KnowsNoTies", {"plan.near": "which no source rank holds", "plan.order": "which no source rank holds"}
    ),
    "any-transport": Defect("AnyTransport", {"plan.transports": "transports that were not allowed"}),
    "trusts-receipts": Defect(
        "TrustsReceipts", {"sync.proven.first": "keeps all as it was", "sync.sources": "mixtures accepted"}
    ),
    "first-receipt-only": Defect(
        "FirstReceiptOnly",
        {"sync.proven": "replica 1 of 4 keeps all as it was", "sync.proven.first": "keeps all as it was"},
    ),
    "last-receipt-unread": Defect(
        "LastReceiptUnread",
        {"sync.proven": "replica 3 of 4 keeps all as it was", "sync.proven.first": "keeps all as it was"},
    ),
    "names-of-the-receipt": Defect(
        "NamesOfTheReceipt",
        {
            "sync.proven": "replica 0 of 4 does not account for one tensor",
            "sync.proven.first": "does not account for one tensor",
        },
    ),
    "sum-of-fingerprints": Defect(
        "SumOfFingerprints",
        {
            "sync.proven": "replica 1 of 4 serves two tensors in each other's place",
            "sync.proven.first": "serves two tensors in each other's place",
        },
    ),
    "version-unread": Defect(
        "VersionUnread",
        {"sync.proven": "replica 3 of 4 names another version", "sync.proven.first": "names another version"},
    ),
    "matrices-only": Defect(
        "MatricesOnly", {"sync.proven": "replica 1 of 4 keeps one tensor", "sync.proven.first": "keeps one tensor"}
    ),
    "trusts-itself": Defect("TrustsItself", {"sync.sources": "mixtures accepted"}),
    "serves-stale": Defect(
        "ServesStale",
        {
            "sync.changed": "a step, behind one that was refused",
            "sync.unchanged": "version 2 with the weights of version 1",
        },
    ),
    "change-by-order": Defect("ChangeByOrder", {"sync.again": "no tensor changed", "sync.changed": "the same version"}),
    "order-unread": Defect(
        "OrderUnread",
        {"sync.again": "no tensor changed", "sync.unchanged": "the same version, though a change is expected"},
    ),
    "first-tensor-changed": Defect(
        "FirstTensorChanged", {"sync.changed": "one element", "sync.report": "no tensor changed"}
    ),
    "sum-changed": Defect("SumChanged", {"sync.changed": "two tensors changed places"}),
    "highest-version": Defect("HighestVersion", {"sync.unchanged": "the same, asked again"}),
    "no-version-zero": Defect("NoVersionZero", {"sync.unchanged": "version 1 with the weights of version 0"}),
    "forgets-refusals": Defect("ForgetsRefusals", {"sync.unchanged": "the same, asked again"}),
    "remembers-too-soon": Defect(
        "RemembersTooSoon", {"sync.failures": "no tensor changed", "sync.interrupted": "no tensor changed"}
    ),
    "less-when-unchanged": Defect("LessWhenUnchanged", {"sync.again": "boxes that differ"}),
    "same-version-is-served": Defect(
        "SameVersionIsServed", {"sync.again": "boxes that differ", "sync.report": "changed tensors of the same again"}
    ),
    "same-weights-are-served": Defect(
        "SameWeightsAreServed", {"sync.again": "boxes that differ", "sync.report": "changed tensors of the same again"}
    ),
    "one-memory-for-all": Defect("OneMemoryForAll", {"sync.apart": "no tensor changed"}),
    "proof-of-the-version": Defect(
        "ProofOfTheVersion",
        {"sync.again": "does not serve version", "sync.changed": "a step, behind one that was refused"},
    ),
    "failures-are-logged": Defect(
        "FailuresAreLogged",
        {
            "sync.failures": "a rank gives no fingerprints",
            "sync.interrupted": "broken off after 0 buckets of each rank",
        },
    ),
    "one-replica-of-many": Defect("OneReplicaOfMany", {"sync.failures": "the last of four replicas fails"}),
    "busy-for-ever": Defect(
        "BusyForEver",
        {"sync.interrupted": "a sync is under way", "sync.leaks": "a sync failed behind one that broke off"},
    ),
    "waits-for-ever": Defect("WaitsForEver", {"sync.calls": "calls without a deadline"}),
    "own-deadline": Defect("OwnDeadline", {"sync.calls": "seconds of its deadline"}),
    "leaves-threads": Defect("LeavesThreads", {"sync.leaks": "left behind"}),
    "one-place-each": Defect("OnePlaceEach", {"sync.apart": "elements came", "sync.interrupted": "elements came"}),
    "peers-by-count": Defect("PeersByCount", {"sync.sources": "did not arrive", "sync.together": "did not arrive"}),
    "bits-of-the-source": Defect(
        "BitsOfTheSource", {"sync.bitwise": "does not serve version", "sync.values": "does not serve version"}
    ),
    "all-changed": Defect(
        "AllChanged", {"sync.large": "changed tensors", "sync.report": "changed tensors of the same again"}
    ),
    "receipts-sorted": Defect("ReceiptsSorted", {"sync.report": "receipts that are another replica's"}),
    "bytes-of-one-replica": Defect("BytesOfOneReplica", {"sync.report": "bytes"}),
    "says-nothing": Defect(
        "SaysNothing",
        {"sync.again": "no tensor changed", "sync.unchanged": "the same version, though a change is expected"},
    ),
    "tied-under-own-name": Defect(
        "TiedUnderOwnName", {"plan.cover": "elements not sent once", "plan.order": "out of order"}
    ),
    "parts-by-rank": Defect("PartsByRank", {"plan.cover": "elements not sent once", "sync.apart": "elements came"}),
    "pulls-twice": Defect("PullsTwice", {"sync.calls": "replica 0 pulled 2 times"}),
    "most-must-change": Defect("MostMustChange", {"sync.changed": "one element", "sync.large": "no tensor changed"}),
    "failure-is-a-fresh-start": Defect(
        "FailureIsAFreshStart", {"sync.unchanged": "version 2 with the weights of version 1, asked again"}
    ),
    "only-the-last-plan": Defect("OnlyTheLastPlan", {"sync.given_plan": "did not arrive"}),
    "plans-of-its-own": Defect("PlansOfItsOwn", {"sync.given_plan": "KeyError"}),
    "rank-zero-proves": Defect(
        "RankZeroProves", {"sync.proven.first": "replica 0 of unlike ones", "sync.sources": "mixtures accepted"}
    ),
    "first-elements": Defect("FirstElements", {"sync.large": "elements came"}),
    "rank-is-index": Defect("RankIsIndex", {"plan.fields": "holds no box with", "sync.bitwise": "did not arrive"}),
    "order-of-its-own": Defect("OrderOfItsOwn", {"sync.together": "came in pieces, others between them"}),
    "one-transport": Defect("OneTransport", {"plan.fields": "which it does not reach"}),
    "bytes-of-the-first": Defect("BytesOfTheFirst", {"plan.fields": "bytes of norm.weight"}),
    "versions-rise": Defect("VersionsRise", {"sync.again": "is older than", "sync.changed": "a lower version"}),
    "other-errors": Defect("OtherErrors", {"sync.proven": "does not serve version", "sync.failures": "no memory left"}),
}
