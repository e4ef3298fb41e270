"""Which models fit on how many GPUs, and with what: the table of `docs/plans.md`. Takes no device.

    python -m benchmarks.plan_table --page docs/plans.md    # six models on 1 to 512 GPUs of 80 GB
    python -m benchmarks.plan_table --models qwen2.5-7b --devices 1 8

A row begins with the defaults of `fsdp` and `vllm`, which share all devices, and rows of 8,192 tokens. What does not
fit gets the smallest change that does, as `rlsdk plan` names it; where there is none, an adapter (LoRA) in place of all
weights, and then the smallest change beside it. Backends that refuse a model's family are named below the table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlsdk
from rlsdk.interfaces import ConfigError
from rlsdk.kit.memory.forecast import NoRoomError
from rlsdk.kit.memory.pass_memory import remembered_passes
from rlsdk.planning import RunPlan
from rlsdk.system.atomic import atomic_write_text

MODELS = ("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3-671b")
DEVICES = (1, 8, 64, 512)
NODE = 8
"""GPUs of a node."""
GIB = 1 << 30
SAMPLES = 8
"""Samples of a prompt."""
ADAPTER: Mapping[str, object] = {"model.lora.rank": 32}
OTHERS = ("megatron", "deepspeed")
"""Train backends that are asked whether they know a family."""
PAGE = """\
# What fits on how many GPUs

Written by `python -m benchmarks.plan_table --page docs/plans.md`, from what `rlsdk plan` predicts for GPUs of 80 GB in
nodes of eight; no row has been run on a device. A row begins with the defaults of `fsdp` and `vllm`, which share all
GPUs, and rows of 8,192 tokens, 1,024 of them the prompt's. What does not fit gets the smallest change that does, as
`rlsdk plan` names it. Where there is none, an adapter is trained in place of all weights, with the smallest change
beside it. "Main memory" is what a node's processes hold at once.

{table}

{refused}

Your own case: `rlsdk plan --model shape:NAME --hardware h100:NODESxGPUS` with your other arguments; shapes are known
without a network ([running](running.md)). Longer rows: [long rows](long_rows.md). What a run needs on GPUs:
[GPUs](gpu.md).
"""
HEAD = """\
| model | GPUs | beside the defaults | fullest device | weights of a sync | main memory of a node |
|---|---|---|---|---|---|"""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What all plans share."""

    data: Path

    def plan(self, model: str, devices: int, change: Mapping[str, object], *, train: str = "fsdp") -> RunPlan:
        """The plan of a run on all devices; what `rlsdk plan` says beside it is not shown.

        Raises:
            RlsdkError: there can be no such run.
        """
        nodes, per_node = max(1, devices // NODE), min(devices, NODE)
        fields: dict[str, Any] = {
            "train.backend": train,
            "rollout.backend": "vllm",
            "rollout.max_response_tokens": 7168,
            "placement.device": "cuda",
            "placement.num_nodes": nodes,
            "placement.devices_per_node": per_node,
            "trainer.samples_per_prompt": SAMPLES,
            "trainer.prompts_per_step": max(8, devices),
            "data.max_prompt_tokens": 1024,
            **change,
        }
        with contextlib.redirect_stderr(io.StringIO()):
            return rlsdk.plan(f"shape:{model}", str(self.data), "exact", hardware=f"h100:{nodes}x{per_node}", **fields)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model on a number of devices."""

    model: str
    devices: int
    plan: RunPlan | None
    """None: nothing is known with which it fits."""
    change: Mapping[str, object]
    """What is set beside the defaults."""
    why: str = ""
    """What is missing with the last change that was tried."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="SHAPE")
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--page", type=Path, help="write the page")
    args = parser.parse_args()
    table, refused = [HEAD], []
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder, remembered_passes():
        given = Given(data=Path(folder) / "rows.jsonl")
        rows = ({"prompt": f"{n} + {n} =", "answer": f"{2 * n}"} for n in range(64))
        given.data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for model in args.models:
            for devices in args.devices:
                table.append(shown(found(given, model, devices)))
                print(table[-1], flush=True)
        for model in args.models:
            refused += [f"- `{backend}` does not train {model}: {why}" for backend, why in refusals(given, model)]
    print("", *refused, sep="\n")
    if args.page:
        every = f"{' and '.join(f'`{name}`' for name in OTHERS)} know all of these families."
        text = PAGE.format(table="\n".join(table), refused="\n".join(refused) or every)
        atomic_write_text(args.page, text)


def found(given: Given, model: str, devices: int) -> Row:
    """The plan with the smallest change."""
    why = ""
    for base in bases(devices):
        try:
            plan = given.plan(model, devices, base)
        except ConfigError as error:
            if not isinstance(error.__cause__, NoRoomError):
                raise
            why = str(error.__cause__).partition(";")[0]
            continue
        if plan.fits is not False:
            return Row(model=model, devices=devices, plan=plan, change=base, why=why)
        if plan.change:
            change = {**base, **plan.change}
            return Row(model=model, devices=devices, plan=given.plan(model, devices, change), change=change, why=why)
        why = f"{plan.peak.known_bytes / GIB:,.0f} GiB in {plan.peak.phase}, as {shown_change(base)}"
    return Row(model=model, devices=devices, plan=None, change={}, why=why)


def bases(devices: int) -> Iterator[Mapping[str, object]]:
    """What is tried first: replicas of more devices, where one has no room for the weights; then the same with an
    adapter."""
    for adapter in ({}, ADAPTER):
        for tp_size in (1, 2, 4, 8, 16, 32):
            if tp_size <= devices:
                yield {**({"rollout.tp_size": tp_size} if tp_size > 1 else {}), **adapter}


def refusals(given: Given, model: str) -> Iterator[tuple[str, str]]:
    """Train backends that do not know the family of a model, with the reason."""
    for train in OTHERS:
        try:
            given.plan(model, NODE, {}, train=train)
        except ConfigError as error:
            if not isinstance(error.__cause__, NoRoomError):
                yield train, str(error).splitlines()[0]


def shown_change(change: Mapping[str, object]) -> str:
    return ", ".join(f"`{name} {json.dumps(value)}`" for name, value in change.items()) or "nothing"


def shown(row: Row) -> str:
    """A line of the table."""
    head = f"| {row.model} | {row.devices} |"
    if row.plan is None:
        return f"{head} does not fit: {row.why} | | | |"
    peak, size = row.plan.peak, row.plan.hardware.device_bytes
    share = f" ({peak.known_bytes / size:.0%})" if size else ""
    change = shown_change(row.change)
    reshard = row.plan.reshard
    sync = "" if reshard is None else f"{(row.plan.adapter_bytes or reshard.num_bytes) / 1e9:,.1f} GB"
    return (
        f"{head} {change} | {peak.known_bytes / GIB:.0f} GiB{share}, {peak.phase} | {sync} | "
        f"{row.plan.host_bytes / GIB:,.0f} GiB |"
    )


if __name__ == "__main__":
    main()
