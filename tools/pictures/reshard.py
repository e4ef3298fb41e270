"""One sync of weights: the transfers of the plan that a run would carry out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rlsdk.interfaces import Bucket, ReshardPlan, WeightLayout
from rlsdk.planning import parse_hardware, weight_layouts
from rlsdk.planning.reshard import plan_move

from .given import config_of, planning_registry
from .svg import COLORS, SHADE, box, frame, picture, ribbon, text

HARDWARE = "h100:2x6"
RUN = {
    "train": {"backend": "megatron", "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}},
    "rollout": {"backend": "vllm", "tp_size": 2},
    "placement": {
        "num_nodes": 2, "devices_per_node": 6,
        "pools": {"training": {"devices_per_node": [4, 4]}, "sampling": {"devices_per_node": [2, 2]}},
        "roles": {"actor": "training", "rollout": "sampling"},
    },
}  # fmt: skip
TENSORS = (
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.35.self_attn.o_proj.weight",
)
WIDTH, RANK_HEIGHT, GAP, TOP = 860, 46, 8, 52
LEFT, RIGHT, BLOCK = 20, 630, 190
GB = 1e9


def planned() -> tuple[Sequence[WeightLayout], Sequence[WeightLayout], ReshardPlan]:
    """Layouts of both sides, and the plan between them."""
    registry = planning_registry()
    with config_of(RUN, registry) as config:
        layouts = weight_layouts(config, registry, parse_hardware(HARDWARE))
        assert layouts is not None
        plan = plan_move(*layouts, bucket_bytes=config.sharding.bucket_mb << 20)
    return *layouts, plan


def reshard_picture() -> str:
    """Bytes from each training rank to each worker of the replicas, and the boxes of four tensors."""
    source, target, plan = planned()
    sent, taken = _routes(plan.buckets)
    nodes = sorted({layout.node for layout in source})
    tall = max(len([one for one in source if one.node == node]) for node in nodes) * (RANK_HEIGHT + GAP) + 30
    places = {("s", at): _slot(at, source, nodes, tall) for at in range(len(source))}
    places |= {("t", at): _slot(at, target, nodes, tall) + 60 for at in range(len(target))}
    body = [text(LEFT, 18, _title(plan, target), bold=True, size=13), text(LEFT, 36, _facts(plan, source, target))]
    body += [frame(LEFT - 10, TOP + at * tall, WIDTH - 20, tall - 10) for at in range(len(nodes))]
    body += [text(LEFT, TOP + at * tall + 16, node, bold=True) for at, node in enumerate(nodes)]
    body += _ribbons(sent, taken, places, [_name(target, at) for at in range(len(target))])
    for at in range(len(source)):
        body += _rank(LEFT, places["s", at], f"training rank {at}", sum(sent[at].values()), COLORS[at % 4])
    for at in range(len(target)):
        body += _rank(RIGHT, places["t", at], _name(target, at), sum(taken[at].values()), COLORS[5])
    bottom = TOP + len(nodes) * tall + 22
    body.append(
        text(LEFT, bottom, f"What {_name(target, 0)}, takes of four tensors, and from which training rank", bold=True)
    )
    body += _boxes(plan, bottom + 16)
    return picture(WIDTH, bottom + 190, "A reshard, drawn from its plan", body)


def _title(plan: ReshardPlan, target: Sequence[WeightLayout]) -> str:
    replicas = len({_replica(layout) for layout in target})
    return (
        f"Qwen3-8B: megatron (tensor parallel 2, pipeline 2, data 2) to {replicas} replicas of vllm (tensor parallel "
        f"{len(target) // replicas}), {plan.num_bytes / GB:.1f} GB in all"
    )


def _replica(layout: WeightLayout) -> str:
    return layout.process.removesuffix(f" {layout.worker}")


def _name(target: Sequence[WeightLayout], at: int) -> str:
    replicas = list(dict.fromkeys(map(_replica, target)))
    return f"replica {replicas.index(_replica(target[at]))}, {target[at].worker}"


def _facts(plan: ReshardPlan, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> str:
    crossing = sum(b.num_bytes for b in plan.buckets if source[b.source].node != target[b.target].node)
    return (
        f"{len(plan.tensors)} tensors; between processes {plan.moved_bytes / plan.lower_bound_bytes:.4f} x the lower "
        f"bound; {crossing / GB:.1f} GB cross between nodes: the pipeline stage that a replica's node lacks"
    )


def _routes(buckets: Sequence[Bucket]) -> tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]]:
    """Bytes by source and target, and by target and source."""
    sent: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    taken: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for bucket in buckets:
        sent[bucket.source][bucket.target] += bucket.num_bytes
        taken[bucket.target][bucket.source] += bucket.num_bytes
    return sent, taken


def _slot(at: int, layouts: Sequence[WeightLayout], nodes: Sequence[str], tall: float) -> float:
    """Top of a rank's block: in the frame of its node, in order."""
    node = layouts[at].node
    before = sum(layout.node == node for layout in layouts[:at])
    return TOP + nodes.index(node) * tall + 24 + before * (RANK_HEIGHT + GAP)


def _rank(x: float, y: float, name: str, num_bytes: int, color: str) -> Iterator[str]:
    yield box(x, y, BLOCK, RANK_HEIGHT, color)
    yield text(x + 10, y + 19, name, fill="#ffffff", bold=True)
    yield text(x + 10, y + 36, f"{num_bytes / GB:.2f} GB", fill="#ffffff")


def _ribbons(
    sent: Mapping[int, Mapping[int, int]],
    taken: Mapping[int, Mapping[int, int]],
    places: Mapping[tuple[str, int], float],
    names: Sequence[str],
) -> Iterator[str]:
    """One for each pair; at both ends they share the block's height by bytes."""
    for source, routes in sorted(sent.items()):
        for target, num_bytes in sorted(routes.items()):
            share = _middle(routes, target), _middle(taken[target], source)
            width = max(RANK_HEIGHT * num_bytes / sum(taken[target].values()), 2)
            y0 = places["s", source] + share[0] * RANK_HEIGHT
            y1 = places["t", target] + share[1] * RANK_HEIGHT
            tip = f"rank {source} to {names[target]}: {num_bytes / GB:.2f} GB"
            yield ribbon(LEFT + BLOCK, y0, RIGHT, y1, width, COLORS[source % 4], tip)


def _middle(routes: Mapping[int, int], which: int) -> float:
    """Where this one stands among its neighbours, 0 to 1."""
    before = sum(num_bytes for other, num_bytes in routes.items() if other < which)
    return (before + routes[which] / 2) / sum(routes.values())


def _boxes(plan: ReshardPlan, top: float) -> Iterator[str]:
    """Each tensor as a rectangle, cut as the transfers to the first worker cut it."""
    width = 180
    for place, name in enumerate(TENSORS):
        shape = plan.tensors[name].shape
        rows, columns = (shape[0], 1) if len(shape) == 1 else shape
        tall, wide = (100.0, 100.0 * columns / rows) if rows >= columns else (100.0 * rows / columns, 100.0)
        wide, x = max(wide, 14.0), LEFT + place * (width + 24)
        yield box(x, top, wide, tall, SHADE)
        from_ranks = set()
        for bucket in plan.parts[0]:
            for transfer in bucket.transfers:
                if transfer.name == name:
                    offset, size = (*transfer.box.offset, 0)[:2], (*transfer.box.size, 1)[:2]
                    from_ranks.add(bucket.source)
                    yield box(
                        x + wide * offset[1] / columns, top + tall * offset[0] / rows,
                        wide * size[1] / columns, tall * size[0] / rows, COLORS[bucket.source % 4],
                        tip=f"rank {bucket.source}: {transfer.num_bytes / 1e6:.1f} MB", radius=0,
                    )  # fmt: skip
        ranks = ", ".join(map(str, sorted(from_ranks)))
        for at, words in enumerate((name.removesuffix(".weight").removeprefix("model."), "x".join(map(str, shape)))):
            yield text(x, top + 118 + 15 * at, words, size=10)
        yield text(x, top + 148, f"from rank {ranks}" if len(from_ranks) == 1 else f"from ranks {ranks}", size=10)
