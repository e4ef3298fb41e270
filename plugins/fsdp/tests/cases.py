"""Every case, by the size of the world that it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import probes
from worlds import Case

from rlsdk.interfaces import AdapterSpec
from rlsdk_fsdp.config import FsdpOptions

HYBRID = FsdpOptions(replicate_size=2)
SHARDED = FsdpOptions(accumulate="sharded")
ADAPTER = AdapterSpec(rank=3, alpha=6.0)
SPLIT = FsdpOptions(context_parallel=2)
SPLIT_SHARDED = FsdpOptions(context_parallel=2, accumulate="sharded")


def alone(models: Mapping[str, str], folder: Path) -> list[Case]:
    plain = models["plain"]
    return [
        Case("all rows", plain),
        Case("micro 3", plain, rows=3),
        Case("adapter", plain, rows=3, adapter=ADAPTER),
        Case("adapter resumed", plain, adapter=ADAPTER, load=str(folder / "saved_adapter")),
        Case("resumed", plain, load=str(folder / "saved")),
        Case("resumed from hybrid", plain, load=str(folder / "saved_hybrid")),
        Case("resumed from split rows", plain, load=str(folder / "saved_split")),
    ]


def pair(models: Mapping[str, str], folder: Path) -> list[Case]:
    plain = models["plain"]
    return [
        Case("all rows", plain, export=str(folder / "export")),
        Case("micro 1", plain, rows=1),
        Case("micro 3", plain, rows=3),
        Case("by tokens", plain, tokens=45),
        Case("packed", plain, rows=3, options=FsdpOptions(packing="always")),
        Case("padded", plain, rows=3, options=FsdpOptions(packing="never")),
        Case("two calls", plain, calls=2, rows=3),
        Case("two calls sharded", plain, calls=2, rows=3, options=SHARDED),
        Case("kept gathered", plain, rows=3, options=FsdpOptions(reshard_after_forward=False)),
        Case("one group", plain, rows=3, options=FsdpOptions(wrap="model")),
        Case("recomputed", plain, rows=3, checkpointing=True),
        Case("idle rank", plain, rows=2, lonely=True),
        Case("host", plain, options=FsdpOptions(cpu_offload=True)),
        Case("offload and onload", plain, rows=3, offloaded=True),
        Case("after a failure", plain, rows=3, failed_before=True),
        Case("random", plain, random=True),
        Case("value", plain, head="value", rows=3),
        Case("score", plain, head="score", rows=3),
        Case("tied", models["tied"], rows=3),
        Case("odd vocabulary", models["qwen3"], rows=3),
        *(Case(name, models[name], rows=3) for name in ("gpt2", "gemma3", "mixture")),
        Case("adapter", plain, rows=3, adapter=ADAPTER),
        Case(
            "adapter rank 1", models["tied"], rows=1, options=SHARDED, adapter=AdapterSpec(rank=1, targets=("q_proj",))
        ),
        Case("adapter offloaded", plain, rows=3, adapter=ADAPTER, offloaded=True),
        Case("adapter bfloat16", plain, rows=3, adapter=ADAPTER, dtype="bfloat16"),
        Case("adapter went on", plain, adapter=ADAPTER, first=True, save=str(folder / "saved_adapter")),
        Case("adapter resumed", plain, adapter=ADAPTER, load=str(folder / "saved_adapter")),
        Case("adapter probe", plain, adapter=ADAPTER, export=str(folder), probe=probes.adapter),
        Case("bfloat16", plain, rows=3, dtype="bfloat16"),
        Case("bfloat16 passes", plain, rows=3, options=FsdpOptions(mixed_precision="bfloat16")),
        Case("bfloat16 weights", plain, rows=3, dtype="bfloat16", options=FsdpOptions(mixed_precision="none")),
        Case("went on", plain, first=True, save=str(folder / "saved")),
        Case("resumed", plain, load=str(folder / "saved")),
        Case("split rows", plain, options=SPLIT),
        Case("split rows micro 1", plain, rows=1, options=SPLIT),
        Case("split rows sharded", plain, rows=3, calls=2, options=SPLIT_SHARDED),
        Case("split rows recomputed", plain, rows=3, checkpointing=True, options=SPLIT),
        Case("split rows after a failure", plain, rows=3, failed_before=True, options=SPLIT),
        Case("split rows value", plain, head="value", rows=3, options=SPLIT),
        Case("split rows score", plain, head="score", rows=3, options=SPLIT),
        Case("split rows mixture", models["mixture"], rows=3, options=SPLIT),
        Case("split rows adapter", plain, rows=3, adapter=ADAPTER, options=SPLIT),
        Case("split rows bfloat16", plain, rows=3, dtype="bfloat16", options=SPLIT),
        Case("split rows went on", plain, first=True, save=str(folder / "saved_split"), options=SPLIT),
        Case("split rows resumed", plain, load=str(folder / "saved"), options=SPLIT),
        Case("not packed", plain, options=FsdpOptions(context_parallel=2, packing="never")),
        Case("tied export", models["tied"], export=str(folder / "export_tied")),
        Case("uneven copies", plain, options=FsdpOptions(replicate_size=3)),
        Case("skipped", plain, probe=probes.skipped_step),
        Case("frozen", plain, rows=3, dtype="bfloat16", probe=probes.frozen),
        Case("offloaded", plain, probe=probes.offloaded),
        Case("reset", plain, probe=probes.reset),
        Case("refused", plain, probe=probes.refusals),
        Case("no disk", plain, probe=probes.disk_refuses),
        Case("kwargs", plain, probe=probes.kwargs),
    ]


def three(models: Mapping[str, str], folder: Path) -> list[Case]:
    return [Case("split rows", models["six heads"], rows=1, options=FsdpOptions(context_parallel=3))]


def four(models: Mapping[str, str], folder: Path) -> list[Case]:
    plain = models["plain"]
    return [
        Case("all rows", plain),
        Case("micro 1", plain, rows=1),
        Case("micro 3", plain, rows=3),
        Case("value", plain, head="value"),
        Case("hybrid", plain, options=HYBRID),
        Case("hybrid micro 1", plain, rows=1, options=HYBRID),
        Case("hybrid micro 3", plain, rows=3, options=HYBRID),
        Case("hybrid sharded", plain, rows=2, calls=2, options=FsdpOptions(replicate_size=2, accumulate="sharded")),
        Case("hybrid idle rank", plain, rows=2, lonely=True, options=HYBRID),
        Case("split rows", plain, options=SPLIT),
        Case("split rows idle rank", plain, rows=2, lonely=True, options=SPLIT),
        Case("split rows hybrid", plain, rows=3, options=FsdpOptions(context_parallel=2, replicate_size=2)),
        Case("split rows over 4", plain, rows=3, options=FsdpOptions(context_parallel=4)),
        Case("copies only", plain, rows=3, options=FsdpOptions(replicate_size=4)),
        Case("hybrid went on", plain, first=True, save=str(folder / "saved_hybrid"), options=HYBRID),
        Case("resumed", plain, load=str(folder / "saved")),
        Case("hybrid resumed", plain, load=str(folder / "saved"), options=HYBRID),
        Case("export in parts", plain, export=str(folder / "parts"), probe=probes.exported_in_parts),
        Case("export of copies", models["gemma3"], export=str(folder / "parts_hybrid"), options=HYBRID,
             dtype="bfloat16", probe=probes.exported_in_parts),
        Case("opened", plain, load=str(folder / "saved"), probe=probes.opened),
        Case("damaged", plain, load=str(folder / "damaged"), probe=probes.damaged),
    ]  # fmt: skip
