"""Where five roles stand on two nodes, and what a device holds: the plan of a run of PPO."""

from __future__ import annotations

from collections.abc import Iterator

from rlsdk.planning import RunPlan, make_plan, parse_hardware
from rlsdk.trainer.runs.prepare import PreparedRun

from .given import config_of, planning_registry
from .svg import COLORS, SHADE, box, frame, picture, text

HARDWARE = "h100:2x8"
RUN = {
    "algorithm": {"recipe": "ppo", "kl_coef": 0.01},
    "train": {"backend": "fsdp", "activation_checkpointing": True},
    "rollout": {"backend": "vllm", "tp_size": 2},
    "reward_models": [{"path": "MODEL"}],
    "placement": {
        "num_nodes": 2, "devices_per_node": 8,
        "pools": {
            "training": {"devices_per_node": [4, 4]},
            "sampling": {"devices_per_node": [2, 2]},
            "judging": {"devices_per_node": [2, 2]},
        },
        "roles": {"actor": "training", "ref": "training", "rollout": "sampling", "critic": "judging",
                  "reward": "judging"},
    },
}  # fmt: skip
WIDTH, TOP, DEVICE, GAP, ROW = 860, 52, 94, 8, 26
GIB = 1 << 30


def five_roles() -> RunPlan:
    """The plan of the run."""
    registry = planning_registry()
    with config_of(RUN, registry) as config:
        return make_plan(PreparedRun.of(config, registry, "cuda"), hardware=parse_hardware(HARDWARE))


def placement_picture() -> str:
    """Nodes, their devices with the ranks on them, and the memory of the fullest device of each pool."""
    plan = five_roles()
    colors = {role.name: COLORS[at % len(COLORS)] for at, role in enumerate(plan.roles)}
    rows = max(len(device.ranks) for device in plan.places.devices)
    tall = 44 + rows * ROW + 16
    body = [
        text(20, 18, f"PPO of Qwen3-8B on {plan.num_nodes} nodes of {plan.devices_per_node} GPUs", bold=True, size=13),
        text(20, 36, "a column is a device with its process; a block is a rank; a rank of rollout spans two devices"),
    ]
    for node in range(plan.num_nodes):
        body += _node(plan, node, TOP + node * (tall + 12), tall, colors)
    top = TOP + plan.num_nodes * (tall + 12) + 24
    body.append(text(20, top, "The fullest device of each pool, by phase", bold=True))
    memory = list(_memory(plan, top + 14, colors))
    return picture(WIDTH, top + 40 + 22 * len(plan.memory), "Five roles in three pools", [*body, *memory])


def _node(plan: RunPlan, node: int, top: float, tall: float, colors: dict[str, str]) -> Iterator[str]:
    yield frame(10, top, WIDTH - 20, tall)
    yield text(20, top + 18, f"node {node}", bold=True)
    for at, device in enumerate(device for device in plan.places.devices if device.node == node):
        x = 20 + at * (DEVICE + GAP)
        yield box(x, top + 28, DEVICE, tall - 38, SHADE)
        yield text(x + DEVICE / 2, top + 42, device.process, size=10, anchor="middle")
        for row, (role, rank) in enumerate(sorted(device.ranks.items())):
            y = top + 48 + row * ROW
            yield box(x + 4, y, DEVICE - 8, ROW - 4, colors[role], tip=f"{role}: rank {rank}")
            yield text(x + DEVICE / 2, y + 15, f"{role} {rank}", size=11, anchor="middle", fill="#ffffff")


def _memory(plan: RunPlan, top: float, colors: dict[str, str]) -> Iterator[str]:
    """A bar for each phase, cut by role; its whole length is the device."""
    assert plan.hardware.device_bytes is not None
    left, width = 190, 500
    for at, phase in enumerate(plan.memory):
        y = top + at * 22
        yield text(left - 8, y + 13, f"{phase.place}: {phase.phase}", size=11, anchor="end")
        yield box(left, y, width, 16, SHADE)
        x = float(left)
        for part in phase.parts:
            length = width * (part.num_bytes or 0) / plan.hardware.device_bytes
            color = next((c for role, c in colors.items() if part.role == role), "#888888")
            yield box(
                x, y, length, 16, color, tip=f"{part.role} {part.what}: {(part.num_bytes or 0) / GIB:.2f} GiB", radius=0
            )
            x += length
        said = f"{phase.known_bytes / GIB:.1f} of {plan.hardware.device_bytes / GIB:.1f} GiB"
        yield text(left + width + 8, y + 13, said, size=11)
