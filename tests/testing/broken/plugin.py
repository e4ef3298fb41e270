"""Entry module of the broken backends. Imports no engine, as every entry module should."""

from __future__ import annotations

from broken.defect import Defect
from broken.rollout_defects import ROLLOUT, ROLLOUT_CAPABILITIES
from broken.sharding_defects import SHARDING
from rlsdk.interfaces import BackendKind, BackendSpec, Capability, RegisterBackend, RegisterComponent, hookimpl

__all__ = ["ROLLOUT", "SHARDING", "TRAIN", "Defect"]

TRAIN_CAPABILITIES = frozenset(
    {
        Capability.VALUE_HEAD,
        Capability.SCORE_HEAD,
        Capability.ENTROPY,
        Capability.OFFLOAD,
        Capability.EXPORT,
        Capability.PACKING,
    }
)

COMPARED = ("", ".mask", ".entropy", ".values", ".scores", ".padding", ".calls")
"""Requirements on gradients that hold an engine to plain torch, and not to itself."""
TRAIN = {
    "log-prob-before-temperature": Defect("BeforeTemperature", {"outputs.temperature": "temperature 0.6"}),
    "entropy-in-bits": Defect("EntropyInBits", {"outputs.entropy": "largest difference of entropy"}),
    "values-one-late": Defect("ValuesOneLate", {"outputs.values": "largest difference of values"}),
    "scores-absent": Defect("ScoresAbsent", {"outputs.scores": "largest difference of scores"}),
    "mask-one-early": Defect(
        "MaskOneEarly", {"outputs.mask": "off the mask", "gradient.mask": "largest difference of loss"}
    ),
    "rows-sorted": Defect("RowsSorted", {"outputs.row_order": "passes of 2 rows"}),
    "no-rows-fail": Defect("NoRowsFail", {"outputs.company": "list index out of range"}),
    "pads-in-secret": Defect("PadsInSecret", {"outputs.packing": "most tokens through a linear layer"}),
    "mean-of-means": Defect(
        "MeanOfMeans", {"gradient.micro_batches": "largest difference of loss", "gradient.calls": "loss"}
    ),
    "first-call-forgotten": Defect("FirstCallForgotten", {"gradient.calls": "largest difference of loss"}),
    "clipped-norm-told": Defect("ClippedNormTold", {"step.clipping": "gradient norm"}),
    "schedule-one-late": Defect("ScheduleOneLate", {"step.schedule": "of the rate, constant"}),
    "steps-on-nan": Defect("StepsOnNaN", {"step.skipped": "largest difference"}),
    "copies-for-shards": Defect("CopiesForShards", {"layout": "shards that are copies"}),
    "one-tensor-frozen": Defect(
        "OneTensorFrozen",
        {
            "layout": "a step did not change",
            **dict.fromkeys(
                (*(f"gradient{part}" for part in COMPARED), "step.clipping", "step.schedule"), "difference of"
            ),
        },
    ),
    "moments-forgotten": Defect("MomentsForgotten", {"checkpoint.resume": "largest difference of weights"}),
    "schedule-forgotten": Defect("ScheduleForgotten", {"checkpoint.schedule": "largest difference of rates"}),
    "damage-loaded": Defect("DamageLoaded", {"checkpoint.damaged": "nothing in it"}),
    "export-of-the-first": Defect("ExportOfTheFirst", {"export": "largest difference of weights"}),
    "offload-absent": Defect(
        "OffloadAbsent", {"registration.capabilities": "offload is claimed", "offload": "does not support"}
    ),
    "gradients-lost": Defect("GradientsLost", {"offload": "largest difference of weights"}),
    "frozen-in-half": Defect("FrozenInHalf", {"frozen": "largest difference"}),
    "any-size": Defect("AnySize", {"refusals": "2 ranks"}),
    "leaks": Defect("Leaks", {"memory": "MiB that 15 steps added"}),
    "leaves-memory": Defect("LeavesMemory", {"close": "shared memory"}),
}


@hookimpl
def rlsdk_register_sharding_managers(register: RegisterComponent) -> None:
    for name, defect in SHARDING.items():
        register(name, ":".join(defect.place("sharding")), "The generic manager with a defect.")


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    for name, defect in ROLLOUT.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.ROLLOUT,
                engine=":".join(defect.place("rollout")),
                description="The reference engine with a defect.",
                capabilities=ROLLOUT_CAPABILITIES - defect.lacks,
                max_ranks=1,
            )
        )
    for name, defect in TRAIN.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.TRAIN,
                engine=":".join(defect.place("train")),
                description="The reference engine with a defect.",
                capabilities=TRAIN_CAPABILITIES - defect.lacks,
                dtypes=frozenset({"float32", "bfloat16"}),
                max_ranks=1,
            )
        )
