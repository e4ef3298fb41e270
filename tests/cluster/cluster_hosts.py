"""Hosts that the tests of the cluster put into workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rlsdk.cluster import Join, Split, dispatch
from rlsdk.interfaces import Batch, BatchError, Parallel, Peer, RankContext
from rlsdk.kit.ranks.progress import advance


class EchoHost:
    """Says where it is and what it was given. `tp_size` model-parallel ranks share each data-parallel rank."""

    def __init__(self, ctx: RankContext, tp_size: int = 1) -> None:
        self.ctx = ctx
        self.parallel = Parallel(
            dp_rank=ctx.rank // tp_size,
            dp_size=ctx.world_size // tp_size,
            tp_rank=ctx.rank % tp_size,
            tp_size=tp_size,
        )
        self.threads = {threading.get_ident()}
        self.order: list[int] = []
        self.release = threading.Event()

    @dispatch(split=Split.ALL, join=Join.LIST)
    def ranks(self, offset: int = 0, *, factor: int = 1) -> int:
        return factor * (self.ctx.rank + offset)

    @dispatch(split=Split.RANK_ZERO, join=Join.FIRST)
    def zero(self) -> int:
        return self.ctx.rank

    @dispatch(split=Split.ANY, join=Join.FIRST)
    def anyone(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.ctx.rank

    @dispatch(split=Split.ALL, join=Join.FIRST_DONE)
    def race(self, seconds: Sequence[float]) -> int:
        time.sleep(seconds[self.ctx.rank])
        return self.ctx.rank

    @dispatch(split=Split.ALL, join=Join.FIRST)
    def first(self) -> int:
        return self.ctx.rank

    @dispatch(split=Split.DATA, join=Join.NONE)
    def nothing(self, batch: Batch) -> int:
        return batch.num_rows

    @dispatch(split=Split.DATA, join=Join.ROWS)
    def double(self, batch: Batch) -> Batch:
        by = batch["row_id"] * 0 + self.ctx.rank
        return batch.keep(()).with_tokens(doubled=batch["input_ids"] * 2).with_rows(by=by)

    @dispatch(split=Split.DATA, join=Join.LIST)
    def append_data(self, batch: Batch, number: int) -> list[int]:
        return self.append(number)

    @dispatch(split=Split.DATA, join=Join.ROWS)
    def drop_a_row(self, batch: Batch) -> Batch:
        return batch.keep(()).select(slice(1, batch.num_rows))

    @dispatch(split=Split.DATA, join=Join.LIST)
    def two_batches(self, first: Batch, second: Batch, note: str) -> tuple[list[int], list[int], str]:
        return first["row_id"].tolist(), second["row_id"].tolist(), note

    @dispatch(split=Split.DATA, join=Join.LIST)
    def shares_memory(self, batch: Batch) -> bool:
        """Whether the batch still lies in the object store's shared memory."""
        return in_shared_memory(batch["input_ids"].data_ptr())

    def whole(self, batch: Batch) -> list[int]:
        return batch["row_id"].tolist()

    async def sleepy(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        self.threads.add(threading.get_ident())
        return self.ctx.rank

    def note_thread(self) -> int:
        self.threads.add(threading.get_ident())
        return len(self.threads)

    def append(self, number: int) -> list[int]:
        self.order.append(number)
        return self.order

    def wait_for_release(self) -> bool:
        return self.release.wait(60)

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def let_go(self) -> bool:
        self.release.set()
        return threading.get_ident() in self.threads

    def ask_peer(self, peer: Peer, timeout_s: float) -> tuple[int, bool]:
        """Calls a concurrent method of another rank; also says whether it lives in this process."""
        answer: int = peer.call("where", timeout_s=timeout_s)
        return answer, peer.local() is not None

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def where(self) -> int:
        return os.getpid()

    @dispatch(split=Split.ALL, join=Join.LIST, concurrent=True)
    def slow_where(self) -> int:
        time.sleep(2)
        return os.getpid()

    def pid(self) -> int:
        return os.getpid()

    def interpreter(self) -> str:
        return sys.prefix

    def scratch(self) -> str | None:
        return self.ctx.scratch_dir

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def bundles(self) -> int:
        """Of the placement group that an engine in this worker would find."""
        import ray

        return len(ray.util.get_current_placement_group().bundle_specs)

    def close(self) -> None:
        self.release.set()


class FragileHost(EchoHost):
    """Fails in every way that a host can."""

    def raise_ours(self) -> None:
        raise BatchError(f"rank {self.ctx.rank} does not like this batch")

    def raise_theirs(self) -> None:
        raise ZeroDivisionError("a stranger's error")

    def raise_on(self, rank: int) -> int:
        """One rank raises, the others hang as in a collective."""
        if self.ctx.rank == rank:
            raise BatchError("only me")
        time.sleep(60)
        return self.ctx.rank

    def die(self, rank: int) -> None:
        if self.ctx.rank == rank:
            print("these are my last words")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    @dispatch(split=Split.DATA, join=Join.LIST)
    def data_raise_on(self, batch: Batch, rank: int) -> int:
        return self.raise_on(rank)

    @dispatch(split=Split.DATA, join=Join.LIST)
    def data_die(self, batch: Batch, rank: int) -> None:
        self.die(rank)

    @dispatch(split=Split.DATA, join=Join.LIST)
    def data_hang_on(self, batch: Batch, rank: int, seconds: float) -> int:
        return self.hang_on(rank, seconds)

    @dispatch(split=Split.RANK_ZERO, join=Join.FIRST)
    def rank_zero_hangs(self) -> None:
        time.sleep(60)

    def spawn(self) -> int:
        """Starts what an engine might: a process that does not know of its parent."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def work_in_pieces(self, pieces: int, seconds: float) -> int:
        """Gives a sign of progress before each piece."""
        for _ in range(pieces):
            advance()
            time.sleep(seconds)
        return self.ctx.rank

    def hang_on(self, rank: int, seconds: float) -> int:
        if self.ctx.rank == rank:
            time.sleep(seconds)
        return self.ctx.rank


class Buddy:
    """What a companion holds."""

    def __init__(self, word: str) -> None:
        if word == "refused":
            raise BatchError("this buddy does not come")
        self.word = word

    def about(self) -> tuple[str, int, str | None]:
        return self.word, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")

    def fail(self) -> None:
        raise BatchError("a buddy's error")

    def die(self) -> None:
        os._exit(3)


class CompanyHost(EchoHost):
    """Starts companions, as an engine does whose replica spans nodes."""

    def start(self, bundle: int, word: str) -> tuple[str, int, str | None]:
        from rlsdk.kit.ranks.companions import get_companions

        self.buddy, made = get_companions().start(bundle, "cluster_hosts:Buddy", word)
        made.result(60)
        return self.ask("about")

    def ask(self, method: str) -> Any:
        return self.buddy.call(method).result(60)

    def address(self) -> str:
        from rlsdk.kit.ranks.companions import get_companions

        return get_companions().address


class Imports:
    """Says where its process imports from."""

    def places(self) -> list[str]:
        return list(sys.path)


class ImportHost(EchoHost):
    def imports(self) -> dict[str, list[str]]:
        """Import folders of this worker, of a companion, and of interpreters that this worker starts."""
        from rlsdk.kit.ranks.companions import get_companions

        companion, made = get_companions().start(0, "cluster_hosts:Imports")
        made.result(60)
        asked = {"-c": ["-c", "import sys; print(*sys.path, sep=chr(10))"], "-m": ["-m", "site"]}
        said = {flag: subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
                for flag, words in asked.items()}  # fmt: skip
        started = {flag: [line.strip(" ',") for line in text.splitlines()] for flag, text in said.items()}
        return {"worker": list(sys.path), "companion": companion.call("places").result(60), **started}


class UnbuildableHost:
    def __init__(self, ctx: RankContext) -> None:
        raise ValueError(f"rank {ctx.rank} cannot be built")


class GlooHost:
    """Joins torch's process group and adds numbers up."""

    def __init__(self, ctx: RankContext) -> None:
        from rlsdk.kit.ranks.rendezvous import init_process_group

        self.ctx = ctx
        init_process_group(ctx, "gloo")

    def total(self, number: float) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([number * (self.ctx.rank + 1)])
        dist.all_reduce(value)
        return float(value)

    def close(self) -> None:
        from rlsdk.kit.ranks.rendezvous import destroy_process_group

        destroy_process_group(self.ctx)


def in_shared_memory(address: int) -> bool:
    """Whether an address of this process belongs to a mapping of shared memory."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, rest = line.partition(" ")
            low, high = (int(bound, 16) for bound in span.split("-"))
            if low <= address < high:
                return "/dev/shm" in rest or "plasma" in rest
    return False
