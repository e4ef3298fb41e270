"""What this plugin changes inside SGLang's scheduler processes, one for each part of the model.

Everything here depends on SGLang's version. Tested: 0.5.23.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil

RUNNERS: list[Any] = []
"""SGLang's model runner of this process."""


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Replaces SGLang's own function in a new process: the same, with the changes that the contract requires."""
    from sglang.srt.managers import scheduler
    from tqdm import tqdm  # type: ignore[import-untyped]

    # Otherwise tqdm creates a named semaphore for bars in several processes, which would outlive a killed process.
    tqdm.set_lock(threading.RLock())
    install()
    scheduler.run_scheduler_process(*args, **kwargs)
    # Its own last words were said. Bindings of triton's would add pages on leaks that end with the process anyway.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def install() -> None:
    """Patches SGLang in this process: sampling, seeds, ends of responses, and effects of a failure on other
    processes."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from rlsdk_sglang.sampler import ContractSampler

    _listen_where_told()
    _skip_experts_elsewhere()
    _attend_to_latents_as_stored()
    register_sampler_backend("pytorch", ContractSampler)
    # Only the request decides where a response ends.
    ModelConfig._get_hf_eos_token_id = lambda self: set()

    from_batch = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: type, batch: Any, vocab_size: int) -> Any:
        """Passes seeds to the sampler, which SGLang itself does only in its deterministic mode."""
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

    # A failing scheduler would kill the process that started it, the trainer's worker, which notices its end anyway.
    setattr(psutil.Process, "send_signal", _spared(psutil.Process.send_signal))  # noqa: B010 - mypy knows no other way


def _listen_where_told() -> None:
    """torch's key-value store listens on all interfaces, whatever its address: here, on the address that it is given:
    loopback, or the first node's of a replica on several."""
    # Its package has a function of the same name in its place.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make = rendezvous.TCPStore

    def on_one_interface(host_name: str, port: int, *args: Any, is_master: bool = False, **settings: Any) -> Any:
        if is_master:
            family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
            settings["master_listen_fd"] = socket.create_server((host_name, port), family=family).detach()
        return make(host_name, port, *args, is_master=is_master, **settings)

    rendezvous.TCPStore = on_one_interface


def _skip_experts_elsewhere() -> None:
    """Where experts are dealt out over schedulers, SGLang marks those of others with -1, which its path for CPUs
    (0.5.23) takes for an index and fails on: here, an expert of this scheduler's own in its place, weighed with 0."""
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native

    def of_own_experts(layer: Any, x: Any, topk: Any, config: Any) -> Any:
        elsewhere = topk.topk_ids < 0
        if not elsewhere.any():
            return forward(layer, x, topk, config)
        ids, weights = topk.topk_ids.masked_fill(elsewhere, 0), topk.topk_weights.masked_fill(elsewhere, 0.0)
        # One choice at a time: it counts an expert that a token names twice once.
        choices = zip(ids.split(1, dim=1), weights.split(1, dim=1), strict=True)
        return sum(forward(layer, x, topk._replace(topk_ids=one, topk_weights=w), config) for one, w in choices)

    fused_moe_native.moe_forward_native = of_own_experts


def _attend_to_latents_as_stored() -> None:
    """Latent attention always computes with the latent keys and values in the cache.

    For a prompt without cached tokens, SGLang (0.5.23) expands them and does not store the result. Its torch path for
    CPUs still reads the cache, and takes the latent values in it for expanded ones: such prompts get wrong log-probs,
    or fail on shapes.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)


def _spared(send_signal: Callable[[psutil.Process, int], None]) -> Callable[[psutil.Process, int], None]:
    def spare(self: psutil.Process, sig: int) -> None:
        if sig != signal.SIGQUIT:
            send_signal(self, sig)

    return spare
