"""Every case, by the size of the world that it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import probes
from worlds import Case

from rlsdk.interfaces import AdapterSpec
from rlsdk_megatron.config import MegatronOptions

TP2 = MegatronOptions(tensor_parallel=2)
SP2 = MegatronOptions(tensor_parallel=2, sequence_parallel=True)
PP2 = MegatronOptions(pipeline_parallel=2)
VPP2 = MegatronOptions(pipeline_parallel=2, virtual_stages=2)
TP2PP2 = MegatronOptions(tensor_parallel=2, pipeline_parallel=2)
FOLDERS = (
    "saved_tp2", "saved_pp2", "saved_dp2", "saved_ep2", "export", "export_tied", "export_mixture", "parts",
    "parts_mixture", "saved_adapter",
)  # fmt: skip


def started(folder: Path, model: str, *targets: str) -> AdapterSpec:
    """The adapter that `conftest` wrote beside these layers of a model; none named: all linear layers."""
    return AdapterSpec(
        rank=3, alpha=6.0, targets=targets or ("all-linear",), path=str(folder / "-".join(["start", model, *targets]))
    )


ONE_LAYER = ("model.layers.3.self_attn.v_proj",)
SOME = ("k_proj", "o_proj", "up_proj")
STARTED = (("plain",), ("tied",), ("qwen3", *SOME), ("mixture",), ("plain", *ONE_LAYER))


def alone(models: Mapping[str, str], folder: Path) -> list[Case]:
    plain = models["plain"]
    return [
        Case("all rows", plain),
        Case("micro 3", plain, rows=3),
        Case("scaled positions", models["llama3"], rows=3),
        Case("mixture", models["mixture"], rows=3),
        Case("resumed from tp2", plain, rows=3, load=str(folder / "saved_tp2")),
        Case("resumed from ep2", models["mixture"], rows=3, load=str(folder / "saved_ep2")),
        Case("adapter", plain, rows=3, adapter=started(folder, "plain")),
        Case("adapter from tp2", plain, rows=3, adapter=started(folder, "plain"), load=str(folder / "saved_adapter")),
    ]


def pair(models: Mapping[str, str], folder: Path) -> list[Case]:
    plain, tied, qwen3, mixture = (models[name] for name in ("plain", "tied", "qwen3", "mixture"))
    low, experts = started(folder, "plain"), started(folder, "mixture")
    # In the order of their groups, which are made anew where they change.
    return [
        Case("tp2", plain, TP2, export=str(folder / "export")),
        Case("tp2 micro 3", plain, TP2, rows=3, first=True, save=str(folder / "saved_tp2")),
        Case("tp2 sp", plain, SP2),
        Case("tp2 sp micro 3", plain, SP2, rows=3),
        Case(
            "tp2 offloaded",
            plain,
            MegatronOptions(tensor_parallel=2, distributed_optimizer=False),
            rows=3,
            offloaded=True,
        ),
        Case("random", plain, TP2, rows=3, random=True),
        Case("recomputed", plain, TP2, rows=3, checkpointing=True),
        Case("recomputed in part", plain, MegatronOptions(tensor_parallel=2, recompute="selective"), rows=3),
        Case("value tp2", plain, TP2, head="value", rows=3),
        Case("value sp", plain, SP2, head="value", rows=3),
        Case("tied tp2 sp", tied, SP2, rows=3),
        Case("odd vocabulary tp2", qwen3, TP2, rows=3),
        Case("odd vocabulary sp", qwen3, SP2, rows=3),
        Case("scaled positions", models["llama3"], SP2, rows=3),
        Case("mixture tp2", mixture, SP2, rows=3),
        Case("chunked vocabulary", plain, TP2, rows=3, probe=probes.chunked),
        Case("bfloat16 tp2", plain, TP2, rows=3, dtype="bfloat16"),
        Case("frozen", plain, TP2, rows=3, probe=probes.frozen),
        Case("adapter tp2", plain, TP2, rows=3, adapter=low, first=True, save=str(folder / "saved_adapter")),
        Case("adapter sp", plain, SP2, rows=3, adapter=low),
        Case("adapter tied sp", tied, SP2, rows=3, adapter=started(folder, "tied"), checkpointing=True),
        Case("adapter offloaded", plain, MegatronOptions(tensor_parallel=2, distributed_optimizer=False), rows=3,
             adapter=low, offloaded=True),
        Case("adapter bfloat16", plain, TP2, rows=3, adapter=low, dtype="bfloat16"),
        Case("adapter probe", plain, TP2, adapter=AdapterSpec(rank=3, alpha=6.0), export=str(folder),
             probe=probes.adapter),
        Case("two roles", plain, TP2, probe=probes.two_roles),
        Case("pp2", plain, PP2),
        Case("pp2 micro 3", plain, PP2, rows=3, first=True, save=str(folder / "saved_pp2")),
        Case("two calls pp2", plain, PP2, calls=2, rows=3),
        Case("score pp2", plain, PP2, head="score", rows=3),
        Case("tied pp2", tied, PP2, rows=3, export=str(folder / "export_tied")),
        Case("resumed from tp2", plain, PP2, rows=3, load=str(folder / "saved_tp2")),
        Case("failed", plain, PP2, rows=3, probe=probes.failed_objective),
        Case("adapter tied pp2", tied, PP2, rows=3, adapter=started(folder, "tied"), checkpointing=True),
        Case("adapter of one stage", plain, PP2, rows=3, adapter=started(folder, "plain", *ONE_LAYER)),
        Case("adapter vpp2", plain, VPP2, rows=3, adapter=low),
        Case("vpp2", plain, VPP2),
        Case("vpp2 micro 3", plain, VPP2, rows=3),
        Case("dp2", plain),
        Case("dp2 micro 3", plain, rows=3, first=True, save=str(folder / "saved_dp2")),
        Case("dp2 by tokens", plain, tokens=45),
        Case("dp2 whole optimizer", plain, MegatronOptions(distributed_optimizer=False), rows=3),
        Case("dp2 overlapped", plain, MegatronOptions(overlap_grad_reduce=True, overlap_param_gather=True), rows=3),
        Case("dp2 offloaded", plain, rows=3, offloaded=True),
        Case("dp2 idle rank", plain, rows=2, lonely=True),
        Case("two calls", plain, calls=2, rows=3),
        Case("mixture dp2", mixture, rows=3),
        Case("bfloat16 dp2", plain, rows=3, dtype="bfloat16"),
        Case("resumed", plain, rows=3, load=str(folder / "saved_dp2")),
        Case("skipped", plain, probe=probes.skipped_step),
        Case("offloaded", plain, probe=probes.offloaded),
        Case("reset", plain, probe=probes.reset),
        Case("reset bfloat16", plain, dtype="bfloat16", probe=probes.reset),
        Case("reset bfloat16 whole", plain, MegatronOptions(distributed_optimizer=False), dtype="bfloat16",
             probe=probes.reset),
        Case("kwargs", plain, probe=probes.kwargs),
        Case("adapter dp2", plain, rows=2, adapter=low, lonely=True),
        Case("adapter overlapped", plain, MegatronOptions(overlap_grad_reduce=True, overlap_param_gather=True),
             rows=3, adapter=low),
        Case("adapter from tp2", plain, rows=3, adapter=low, load=str(folder / "saved_adapter")),
        Case("adapter cp2", plain, MegatronOptions(context_parallel=2), rows=3, adapter=low),
        Case("adapter ep2", mixture, MegatronOptions(expert_parallel=2), rows=3, adapter=experts),
        Case("cp2", plain, MegatronOptions(context_parallel=2)),
        Case("cp2 micro 3", models["qwen3"], MegatronOptions(context_parallel=2), rows=3),
        Case("cp2 value", plain, MegatronOptions(context_parallel=2), head="value", rows=3),
        Case("cp2 score", plain, MegatronOptions(context_parallel=2), head="score", rows=3),
        Case("mixture ep2", mixture, MegatronOptions(expert_parallel=2), rows=3, first=True,
             save=str(folder / "saved_ep2"), export=str(folder / "export_mixture")),
        Case("mixture tp2 ep2", mixture,
             MegatronOptions(tensor_parallel=2, sequence_parallel=True, expert_parallel=2), rows=3),
    ]  # fmt: skip


def four(models: Mapping[str, str], folder: Path) -> list[Case]:
    plain = models["plain"]
    return [
        Case("tp2 pp2", plain, TP2PP2, rows=3),
        Case("tp2 pp2 sp", models["tied"],
             MegatronOptions(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True), rows=3),
        Case("tp2 dp2", plain, SP2, rows=3),
        Case("pp2 dp2 idle rank", plain, PP2, rows=2, lonely=True),
        # More ranks than key-value heads: Megatron splits within a head, and gathers.
        Case("tp4", models["qwen3"], MegatronOptions(tensor_parallel=4), rows=3),
        Case("tp2 cp2 sp", plain,
             MegatronOptions(tensor_parallel=2, context_parallel=2, sequence_parallel=True), rows=3),
        Case("pp2 cp2", plain, MegatronOptions(pipeline_parallel=2, context_parallel=2), rows=3),
        Case("mixture dp4 ep2", models["mixture"], MegatronOptions(expert_parallel=2), rows=3),
        Case("resumed from dp2", plain, TP2PP2, rows=3, load=str(folder / "saved_dp2")),
        Case("resumed from pp2", plain, SP2, rows=3, load=str(folder / "saved_pp2")),
        Case("export in parts", models["tied"], TP2PP2, export=str(folder / "parts"), probe=probes.exported_in_parts),
        Case("export of experts", models["mixture"], MegatronOptions(expert_parallel=2),
             export=str(folder / "parts_mixture"), probe=probes.exported_in_parts),
        Case("opened", plain, PP2, load=str(folder / "saved_pp2"), probe=probes.opened),
        Case("adapter tp2 pp2 sp", plain,
             MegatronOptions(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True), rows=3,
             adapter=started(folder, "plain")),
        Case("adapter tp2 dp2", plain, TP2, rows=3, calls=2, adapter=started(folder, "plain")),
        # Some ranks have no rows of a key projection, whose A they hold all the same.
        Case("adapter tp4", models["qwen3"], MegatronOptions(tensor_parallel=4), rows=3,
             adapter=started(folder, "qwen3", *SOME)),
        Case("adapter tp2 ep2", models["mixture"],
             MegatronOptions(tensor_parallel=2, sequence_parallel=True, expert_parallel=2), rows=3,
             adapter=started(folder, "mixture")),
        Case("adapter from tp2", plain, MegatronOptions(tensor_parallel=2, pipeline_parallel=2), rows=3,
             adapter=started(folder, "plain"), load=str(folder / "saved_adapter")),
        Case("damaged", plain, TP2, probe=probes.damaged, load=str(folder / "damaged")),
    ]  # fmt: skip
