"""What this plugin does inside SGLang's scheduler processes, one for each part of the model.

Everything here depends on SGLang's version. Tested: 0.5.23.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
from torch import Tensor, nn

from rlsdk.interfaces import fingerprint
from rlsdk.kit.intake import Fingerprints, write_shard
from rlsdk.kit.parked import Parked
from rlsdk.kit.staging import attached
from rlsdk.kit.tracing import Piece, trace_loaders
from rlsdk_sglang.messages import Command

LOADER = "rlsdk_sglang.inside.obey"
"""Name under which SGLang calls `obey`: what it offers as a custom weight loader."""
RUNNERS: list[Any] = []
"""SGLang's model runner of this process."""


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """In place of SGLang's own function, in a new process: the same, with what the contract asks for."""
    from sglang.srt.managers import scheduler
    from tqdm import tqdm  # type: ignore[import-untyped]

    # Else tqdm takes a semaphore with a name, for bars in several processes: it would outlive one that is killed.
    tqdm.set_lock(threading.RLock())
    install()
    scheduler.run_scheduler_process(*args, **kwargs)
    # Its own last words were said. Bindings of triton's would add pages on leaks that end with the process anyway.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def install() -> None:
    """Changes this process: draws, seeds, ends of responses, and what a failure does to others."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from rlsdk_sglang.sampler import ContractSampler

    _listen_where_told()
    register_sampler_backend("pytorch", ContractSampler)
    # Nothing but the request says where a response ends.
    ModelConfig._get_hf_eos_token_id = lambda self: set()

    from_batch = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: type, batch: Any, vocab_size: int) -> Any:
        """SGLang itself passes seeds on in its deterministic mode only."""
        info = from_batch(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)

    initialize = ModelRunner.__init__

    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        RUNNERS.append(self)
        initialize(self, *args, **kwargs)

    ModelRunner.__init__ = remembered

    # A scheduler that fails would end the process that started it, the trainer's worker. That one sees it end.
    setattr(psutil.Process, "send_signal", _spared(psutil.Process.send_signal))  # noqa: B010 - mypy knows no other way


def _listen_where_told() -> None:
    """torch's key-value store listens on all interfaces, whatever its address: here, on the address that it is given,
    which is loopback."""
    # Its package has a function of the same name in its place.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make = rendezvous.TCPStore

    def on_one_interface(host_name: str, port: int, *args: Any, is_master: bool = False, **settings: Any) -> Any:
        if is_master:
            family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
            settings["master_listen_fd"] = socket.create_server((host_name, port), family=family).detach()
        return make(host_name, port, *args, is_master=is_master, **settings)

    rendezvous.TCPStore = on_one_interface


def _spared(send_signal: Callable[[psutil.Process, int], None]) -> Callable[[psutil.Process, int], None]:
    def spare(self: psutil.Process, sig: int) -> None:
        if sig != signal.SIGQUIT:
            send_signal(self, sig)

    return spare


def obey(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carries a command out. SGLang lets an error in here end the process: it is answered instead."""
    for _, tensor in named_tensors:
        command = Command.decoded(tensor.cpu().numpy().tobytes())
        value, error = None, None
        try:
            value = getattr(Hand(model), command.name)(**command.arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        # Whoever asked from another machine, or is gone by now, gets no answer, and says so.
        with suppress(OSError):
            command.answer(value, error)


class Hand:
    """What can be commanded."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare(self, shapes: dict[str, list[int]]) -> list[str]:
        """Learns where each canonical tensor lies; returns what speaks against replacing and proving them."""
        pieces = trace_loaders(self.model.load_weights, shapes)
        PIECES.clear()
        PIECES.update(pieces)
        # On a CPU SGLang collects garbage whenever it flushes a cache, several times for each update. What is here by
        # now stays, and need not be looked through again.
        gc.collect()
        gc.freeze()
        return faults(self.model, pieces)

    def write(self, block: list[int], entries: list[Any]) -> None:
        """Takes weights out of memory that the engine's process filled; passes by what this process does not hold."""
        process, descriptor, num_bytes = block
        with attached((process, descriptor, num_bytes), entries) as shards:
            for shard in shards:
                write_shard(PIECES[shard.name], shard)

    def fingerprints(self) -> Fingerprints:
        """Of each box that this process serves, over the memory that serves it."""
        return {
            name: [(piece.box.offset, piece.box.size, fingerprint(piece.memory, piece.box)) for piece in parts]
            for name, parts in PIECES.items()
        }

    def park(self, parts: list[str]) -> int:
        """Gives memory back; for CPUs. Returns the bytes."""
        tensors = {part: self.tensors(part) for part in parts}
        num_bytes = sum(_bytes_of(found) for found in tensors.values())
        for part, found in tensors.items():
            PARKED[part].empty(found)
        return num_bytes - sum(_bytes_of(found) for found in tensors.values())

    def restore(self, parts: list[str]) -> None:
        for part in parts:
            PARKED[part].restore()

    def tensors(self, part: str) -> list[Tensor]:
        if part == "weights":
            return [piece.memory for parts in PIECES.values() for piece in parts]
        pool = RUNNERS[0].token_to_kv_pool
        return [*pool.k_buffer, *pool.v_buffer]


PIECES: dict[str, list[Piece]] = {}
"""Of the model of this process."""
PARKED = {"weights": Parked(), "kv_cache": Parked()}


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def faults(model: nn.Module, pieces: dict[str, list[Piece]]) -> list[str]:
    """Why the pieces are not all of what is served: canonical tensors that went nowhere, parameters that the engine
    repacked or that no canonical tensor reaches."""
    found = [f"canonical tensor {name!r} could not be followed into the engine" for name, p in pieces.items() if not p]
    reached = {piece.memory.untyped_storage().data_ptr() for parts in pieces.values() for piece in parts}
    live = set()
    for name, parameter in model.named_parameters():
        live.add(parameter.untyped_storage().data_ptr())
        if parameter.numel() and parameter.untyped_storage().data_ptr() not in reached:
            found.append(f"parameter {name!r} of the engine is reached by no canonical tensor, or was repacked")
    for name, parts in pieces.items():
        if any(piece.memory.untyped_storage().data_ptr() not in live for piece in parts):
            found.append(f"the engine repacked canonical tensor {name!r} after loading it")
    for name, module in model.named_modules():
        if getattr(module, "use_intel_amx_backend", False):
            found.append(f"layer {name!r} computes from a packed copy of its weights")
    return found
