"""Time and memory to plan a sync from n sharded ranks to n equal replicas: `python -m benchmarks.equal_replicas`.

The tensors of a dense model of 0.5 billion parameters (24 layers), of which each rank holds a part of dimension 0; one
replica with all of them beside each rank, on nodes of 8. Every replica takes from every rank, so a plan that listed all
pieces would grow with the square of n. Each n runs in a process of its own. No device and no weight is needed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Iterator

from rlsdk.interfaces import Box, TensorMeta, WeightLayout
from rlsdk.sharding import TRANSPORTS, plan_reshard

LAYERS, WIDTH, INNER, KEYS, VOCABULARY = 24, 896, 4864, 128, 151_936
NODE = 8
BUCKET_BYTES = 64 << 20


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed", (VOCABULARY, WIDTH)
    for at in range(LAYERS):
        for name, rows in (("q", WIDTH), ("k", KEYS), ("v", KEYS)):
            yield f"{at}.{name}.weight", (rows, WIDTH)
            yield f"{at}.{name}.bias", (rows,)
        yield f"{at}.o", (WIDTH, WIDTH)
        yield from ((f"{at}.{name}", (INNER, WIDTH)) for name in ("gate", "up"))
        yield f"{at}.down", (WIDTH, INNER)
        yield from ((f"{at}.{name}", (WIDTH,)) for name in ("norm", "second_norm"))
    yield "norm", (WIDTH,)


def layout(rank: int, ranks: int, *, whole: bool, apart: bool) -> WeightLayout:
    """Of one rank, or of the replica on its device: in the rank's process, or on nodes of their own."""
    boxes = []
    for name, shape in shapes():
        rows = -(-shape[0] // ranks)
        low = min(rows * rank, shape[0])
        part = Box((low, *(0 for _ in shape[1:])), (min(rows, shape[0] - low), *shape[1:]))
        boxes.append((name, Box.whole(shape) if whole else part))
    side = "apart-" if apart and whole else ""
    return WeightLayout(
        rank=rank,
        node=f"{side}{rank // NODE}",
        device=f"cuda:{rank % NODE}",
        process=f"{side}{rank}",
        tensors=tuple(TensorMeta(name=name, shape=shape, dtype="bfloat16") for name, shape in shapes()),
        boxes=tuple(boxes),
    )


def measure(ranks: int, apart: bool, answers: multiprocessing.Queue[tuple[float, float, int]]) -> None:
    """Answers with seconds, MiB by which the process grew, and bytes that move."""
    source, target = ([layout(at, ranks, whole=whole, apart=apart) for at in range(ranks)] for whole in (False, True))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    plan = plan_reshard(source, target, bucket_bytes=BUCKET_BYTES, transports=TRANSPORTS)
    seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert plan.moved_bytes == plan.lower_bound_bytes
    answers.put((seconds, (after - before) / 1024, plan.moved_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=(8, 64, 512))
    parser.add_argument("--apart", action="store_true", help="replicas on nodes of their own")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for ranks in args.ranks:
        answers = spawn.Queue()
        process = spawn.Process(target=measure, args=(ranks, args.apart, answers))
        process.start()
        seconds, grown, moved = answers.get()
        process.join()
        print(
            f"{ranks} ranks, {ranks} replicas: {seconds:.1f} CPU s, {grown:,.0f} MiB, {moved / 1e12:.2f} TB", flush=True
        )


if __name__ == "__main__":
    main()
