"""What the gateway adds to a turn: `python -m benchmarks.gateway [--sessions 4096] [--rate 400] [--seconds 30]`.

All sessions are open, each with a connection of its own. Turns begin at random times at a fixed rate, whether earlier
ones are answered or not, from a process on another core; each is a whole history with a tool. The sampler answers at
once, so the time of a turn is what passes outside of `generate`. The second of two rounds counts, so that what is left
in memory afterwards is what sessions left, and not the allocator's first blocks. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsdk.agents.chats.chat_format import ChatFormat
from rlsdk.agents.gateway.server import Gateway
from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.agents.sessions.session import Place, Session
from rlsdk.interfaces import FinishReason, Span, Turn, VersionRun

TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SAID = '<tool_call>\n{"name": "look", "arguments": {"at": "the third page of the report"}}\n</tool_call><|im_end|>'
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks at a page.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}}}}  # fmt: skip


class AtOnce:
    """A sampler that takes no time."""

    max_model_tokens, max_tokens, supports_stop = 1_000_000, 256, True

    def __init__(self, tokens: Sequence[int]) -> None:
        ids = np.asarray(tokens, np.int64)
        self._span = Span(token_ids=ids, log_probs=np.zeros(len(ids), np.float32), versions=(VersionRun(1, len(ids)),))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return []

    async def sample(self, ids: Sequence[int], *, max_tokens: int, stop: tuple[str, ...], place: Place) -> Turn:
        return Turn(span=self._span, finish_reason=FinishReason.STOP)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = TEMPLATE
    return made


def resident_mib() -> float:
    """MiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def serve(args: argparse.Namespace, core: int | None) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    form = ChatFormat(tokenizer)
    sampler = AtOnce(tokenizer(SAID, add_special_tokens=False)["input_ids"])
    gateway = Gateway(max_sessions=args.sessions)
    gc.collect()
    gc.freeze()  # as a run does before its loop
    await _round(gateway, form, sampler, args, core)
    measured = await _round(gateway, form, sampler, args, core)
    gateway.close()
    return measured


async def _round(
    gateway: Gateway, form: ChatFormat, sampler: AtOnce, args: argparse.Namespace, core: int | None
) -> dict[str, Any]:
    """Opens the sessions, lets the load run, closes them."""
    before = resident_mib()
    opened = [await gateway.open(Session(form, sampler, EpisodeLimits(max_turns=10_000))) for _ in range(args.sessions)]
    load = [sys.executable, "-m", "benchmarks.gateway", "--load", gateway.url, "--rate", str(args.rate),
            "--seconds", str(args.seconds)]  # fmt: skip
    spent = time.process_time()
    process = await asyncio.create_subprocess_exec(
        *load, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        preexec_fn=None if core is None else (lambda: os.sched_setaffinity(0, {core})),
    )  # fmt: skip
    out, _ = await process.communicate(json.dumps([one.token for one in opened]).encode())
    spent = time.process_time() - spent
    full = resident_mib()
    turns = sum(len(one.session.tree.nodes) for one in opened)
    for one in opened:
        await gateway.close_session(one)
    opened.clear()
    gc.collect()
    return {**json.loads(out), "turns": turns, "cpu_ms_per_turn": 1e3 * spent / max(turns, 1),
            "rows_mib": full - before, "mib_left": resident_mib() - before}  # fmt: skip


async def load(url: str, tokens: list[str], rate: float, seconds: float) -> dict[str, Any]:
    """Turns at random times; milliseconds from when each was due."""
    gc.disable()  # the load's own collections are no time of the gateway
    host, port = url.removeprefix("http://").split(":")
    lines = [await asyncio.open_connection(host, int(port)) for _ in tokens]
    histories: list[list[Any]] = [[{"role": "user", "content": "Read the report."}] for _ in tokens]
    busy, took, skipped = set[int](), list[float](), 0
    draw, clock = random.Random(0), asyncio.get_running_loop().time

    async def turn(at: int, due: float) -> None:
        reader, writer = lines[at]
        body = json.dumps({"model": "m", "messages": histories[at], "tools": [TOOL]}).encode()
        head = f"POST /sessions/{tokens[at]}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        said = await reader.readuntil(b"\r\n\r\n")
        length = int(said.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        took.append(1e3 * (clock() - due))
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "The page is blank. " * 4}
        histories[at] += [message, result]
        busy.discard(at)

    start = due = clock()
    running = set()
    while due < start + seconds:
        due += draw.expovariate(rate)
        await asyncio.sleep(due - clock())
        at = draw.randrange(len(tokens))
        if at in busy:
            skipped += 1
            continue
        busy.add(at)
        task = asyncio.create_task(turn(at, due))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    p50, p99, most = np.percentile(took, [50, 99, 100])
    return {"turns_per_s": len(took) / seconds, "p50_ms": p50, "p99_ms": p99, "max_ms": most, "skipped": skipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=400.0, help="turns a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(asyncio.run(load(args.load, json.load(sys.stdin), args.rate, args.seconds))))
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    found = asyncio.run(serve(args, cores[1] if len(cores) > 1 else None))
    found = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
