"""How many finished samples a second one controller process takes from its replicas into batches.

    python -m benchmarks.stream_rate                     # 8 replicas, 2,000 tokens a sample, 20,000 samples

Replicas are fakes that answer as fast as they are asked, with real arrays: what is measured is the request client, the
rollouter of every sample, grading by a function that does nothing in a process of its own, the journal with its sync
at the end of each step, the stream and the packing of batches. Memory is that of one step's samples, whatever the
number of steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from rlsdk.interfaces import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PromptView,
    RewardSample,
    SamplingParams,
    VersionRun,
)
from rlsdk.rewards import RewardDef, RewardRunner
from rlsdk.rollouts import (
    Collected,
    GroupId,
    GroupTask,
    PackedOutputs,
    RolloutStream,
    StreamOptions,
    make_batch,
    single_turn,
)
from rlsdk.rollouts.groups.rollouter import Tokens
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.segments import segments
from rlsdk.trainer.inputs.grading import RewardGrader

GROUP = 8
"""Samples of a prompt."""
ANSWER = 64
"""Samples that a replica hands over at once."""


@dataclass(eq=False)
class EagerReplica:
    """Has every sample ready as soon as it is asked for."""

    tokens: int
    name: str = "eager"
    max_running: int = 512
    waiting: deque[tuple[GenerationRequest, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.token_ids = rng.integers(0, 150_000, self.tokens)
        self.log_probs = -rng.exponential(size=self.tokens).astype(np.float32)

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.waiting.extend((r, r.first_sample + at) for r in requests for at in range(r.n))

    async def collect(self, wait_s: float) -> Collected:
        await asyncio.sleep(0)
        outputs: list[GenerationOutput] = []
        while self.waiting and len(outputs) < ANSWER:
            request, index = self.waiting.popleft()
            outputs.append(
                GenerationOutput(
                    request_id=request.request_id,
                    sample_index=index,
                    token_ids=self.token_ids,
                    log_probs=self.log_probs,
                    finish_reason=FinishReason.LENGTH,
                    versions=(VersionRun(0, self.tokens),),
                )
            )
        return Collected(outputs=PackedOutputs.pack(outputs), num_decoded=None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.waiting.clear()

    keeps_unfinished = True

    async def pause(self) -> None:
        raise NotImplementedError("weights never change here")

    async def resume(self, keep_cache: bool) -> None:
        raise NotImplementedError("weights never change here")


class NoText:
    """Decoding is the tokenizer's business."""

    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, token_ids: Tokens) -> str:
        return ""

    def decode_all(self, token_ids: Sequence[Tokens]) -> list[str]:
        return [""] * len(token_ids)


def nothing(sample: RewardSample) -> float:
    return 0.0


@contextmanager
def grading(is_on: bool) -> Iterator[RewardGrader | None]:
    """Grades by `nothing`, in a process of its own; None: not at all."""
    if not is_on:
        yield None
        return
    with RewardRunner([RewardDef(name="nothing", target="benchmarks.stream_rate:nothing")]) as runner:
        runner.wait_ready()
        yield RewardGrader(runner, print)


@dataclass
class Journaled:
    """The journal of the measured steps, of which one is kept."""

    journal: Journal
    folder: Path
    written: int = 0

    def begin(self, step: int, groups: int) -> None:
        self.journal.open(step)
        self.journal.forget(step)
        self.journal.write("start", step=step + 1, groups=list(range(groups)))

    def end(self, step: int, groups: int) -> None:
        self.journal.write("update", step=step + 1, groups=list(range(groups)), rejected=[], figures={})
        self.journal.sync()
        self.written += segments(self.folder)[-1].path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000, help="of a response")
    parser.add_argument("--samples", type=int, default=20_000, help="in all")
    parser.add_argument("--step", type=int, default=4_096, help="samples of one step")
    parser.add_argument("--bare", action="store_true", help="without journal and grading")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with grading(not args.bare) as grader, tempfile.TemporaryDirectory() as folder:
        figures = measure(args, grader, Path(folder))
    for name, value in figures.items():
        print(f"{name:<24}{value:12,.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def measure(args: argparse.Namespace, grader: RewardGrader | None, folder: Path) -> dict[str, float]:
    process = psutil.Process()
    stream = RolloutStream(
        [EagerReplica(args.tokens) for _ in range(args.replicas)],
        NoText(),
        StreamOptions(rollout=single_turn, max_model_tokens=args.tokens + 64),
        grader=grader,
    )
    journaled = None if args.bare else Journaled(Journal(folder, made_by={}, keep="resume"), folder)
    sampling = SamplingParams(max_tokens=args.tokens)
    groups = args.step // GROUP
    done, start, before, memory, held = 0, time.perf_counter(), time.process_time(), [], []
    while done < args.samples:
        step, empty = done // args.step, process.memory_info().rss
        if journaled is not None:
            journaled.begin(step, groups)
        record = None if journaled is None else journaled.journal
        stream.start([task(at, sampling) for at in range(groups)], record=record)
        made = [stream.take(60) for _ in range(groups)]
        held.append((process.memory_info().rss - empty) / args.step)
        batch = make_batch(sorted(made, key=lambda group: group.task.ordinal), temperature=1.0)
        assert batch.num_tokens == args.step * (args.tokens + 16)
        if journaled is not None:
            journaled.end(step, groups)
        done += args.step
        memory.append(process.memory_info().rss / 2**20)
        del made, batch
    wall, cpu = time.perf_counter() - start, time.process_time() - before
    stream.close()
    if journaled is not None:
        journaled.journal.close()
    return {
        "samples_per_s": done / wall,
        "cpu_us_per_sample": cpu / done * 1e6,
        "journal_bytes_per_token": journaled.written / done / args.tokens if journaled is not None else 0.0,
        "held_bytes_per_sample": held[0],
        "rss_mib_first_step": memory[0],
        "rss_mib_largest": max(memory),
    }


def task(at: int, sampling: SamplingParams) -> GroupTask:
    return GroupTask(
        id=GroupId(source="train", epoch=0, index=at),
        ordinal=at,
        prompt=PromptView(prompt_ids=(1,) * 16, text="", answer=None, row={}),
        num_samples=GROUP,
        sampling=sampling,
        seed=(0, at),
    )


if __name__ == "__main__":
    main()
