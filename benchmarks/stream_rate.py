"""How many finished samples a second one controller process takes from its replicas into batches.

    python -m benchmarks.stream_rate                     # 8 replicas, 2,000 tokens a sample, 20,000 samples

Replicas are fakes that answer as fast as they are asked, with real arrays: what is measured is the request client, the
rollouter of every sample, the stream and the packing of batches. Memory is that of one step's samples, whatever the
number of steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, PromptView, SamplingParams, VersionRun
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
                    token_ids=np.zeros(self.tokens, np.int64),
                    log_probs=np.zeros(self.tokens, np.float32),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000, help="of a response")
    parser.add_argument("--samples", type=int, default=20_000, help="in all")
    parser.add_argument("--step", type=int, default=4_096, help="samples of one step")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    process = psutil.Process()
    stream = RolloutStream(
        [EagerReplica(args.tokens) for _ in range(args.replicas)],
        NoText(),
        StreamOptions(rollout=single_turn, max_model_tokens=args.tokens + 64),
    )
    sampling = SamplingParams(max_tokens=args.tokens)
    groups = args.step // GROUP
    done, start, before, memory = 0, time.perf_counter(), time.process_time(), []
    while done < args.samples:
        stream.start([task(at, sampling) for at in range(groups)])
        made = [stream.take(60) for _ in range(groups)]
        batch = make_batch(sorted(made, key=lambda group: group.task.ordinal), temperature=1.0)
        assert batch.num_tokens == args.step * (args.tokens + 16)
        done += args.step
        memory.append(process.memory_info().rss / 2**20)
    wall, cpu = time.perf_counter() - start, time.process_time() - before
    stream.close()
    figures = {
        "samples_per_s": done / wall,
        "cpu_us_per_sample": cpu / done * 1e6,
        "rss_mib_first_step": memory[0],
        "rss_mib_largest": max(memory),
    }
    for name, value in figures.items():
        print(f"{name:<20}{value:12,.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


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
