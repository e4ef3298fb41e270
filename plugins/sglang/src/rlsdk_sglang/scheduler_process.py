"""Changes of this plugin inside SGLang's scheduler processes, each of which holds one part of the model.

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
    """Replaces SGLang's main function of a new process: the same, with the changes that the contract requires."""
    from sglang.srt.managers import scheduler
    from tqdm import tqdm  # type: ignore[import-untyped]

    # Otherwise tqdm creates a named semaphore to share bars between processes; it would outlive a killed process.
    tqdm.set_lock(threading.RLock())
    install()
    scheduler.run_scheduler_process(*args, **kwargs)
    # The scheduler has written its last messages. Triton's bindings would add pages about leaks, which are harmless
    # because the process ends.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def install() -> None:
    """Patches SGLang in this process: sampling, seeds, end of responses, and the effect of failures on other
    processes."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.managers import scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from rlsdk_sglang.sampler import ContractSampler

    _listen_on_given_address()
    _skip_experts_of_other_ranks()
    _attend_to_cached_latents()
    # Nobody reads the schedulers' reports of their load, for which each step walks over all waiting samples.
    scheduler.create_load_snapshot_writer = lambda *args, **kwargs: None
    register_sampler_backend("pytorch", ContractSampler)
    # Only the request determines where a response ends.
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

    def record_runner(self: Any, *args: Any, **kwargs: Any) -> None:
        RUNNERS.append(self)
        initialize(self, *args, **kwargs)

    ModelRunner.__init__ = record_runner

    # A failing scheduler would kill its parent, the trainer's worker, which notices the scheduler's end anyway.
    setattr(psutil.Process, "send_signal", _without_sigquit(psutil.Process.send_signal))  # noqa: B010 - mypy knows no other way


def _listen_on_given_address() -> None:
    """Makes torch's key-value store listen only on its given address (loopback, or the first node's if a replica has
    several nodes) instead of on all interfaces."""
    # `import` would find a function: torch.distributed exports one with the module's name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make = rendezvous.TCPStore

    def on_one_interface(host_name: str, port: int, *args: Any, is_master: bool = False, **settings: Any) -> Any:
        if is_master:
            family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
            settings["master_listen_fd"] = socket.create_server((host_name, port), family=family).detach()
        return make(host_name, port, *args, is_master=is_master, **settings)

    rendezvous.TCPStore = on_one_interface


def _skip_experts_of_other_ranks() -> None:
    """Makes SGLang's CPU path (0.5.23) work with experts that are distributed over schedulers: SGLang marks the experts
    of other schedulers with -1, and that path uses -1 as an index and fails. Here an expert of this scheduler takes
    their place, with weight 0."""
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native

    def of_own_experts(layer: Any, x: Any, topk: Any, config: Any) -> Any:
        elsewhere = topk.topk_ids < 0
        if not elsewhere.any():
            return forward(layer, x, topk, config)
        ids, weights = topk.topk_ids.masked_fill(elsewhere, 0), topk.topk_weights.masked_fill(elsewhere, 0.0)
        # One choice per call: the path counts an expert only once even if a token chooses it twice.
        choices = zip(ids.split(1, dim=1), weights.split(1, dim=1), strict=True)
        return sum(forward(layer, x, topk._replace(topk_ids=one, topk_weights=w), config) for one, w in choices)

    fused_moe_native.moe_forward_native = of_own_experts


def _attend_to_cached_latents() -> None:
    """Latent attention always computes with the latent keys and values in the cache.

    For a prompt without cached tokens, SGLang (0.5.23) expands the latents and does not store the result. Its torch
    path for CPUs still reads the cache and treats the latent values there as expanded: such prompts get wrong log-probs
    or fail on shapes.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)


def _without_sigquit(send_signal: Callable[[psutil.Process, int], None]) -> Callable[[psutil.Process, int], None]:
    def send(self: psutil.Process, sig: int) -> None:
        if sig != signal.SIGQUIT:
            send_signal(self, sig)

    return send
