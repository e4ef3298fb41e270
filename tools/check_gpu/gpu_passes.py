"""What passes through a model do on a device: `python gpu_passes.py DEVICE WHAT`, WHAT being a name in `CHECKS`."""

from __future__ import annotations

import functools
import gc
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.algorithms import PolicyObjective
from rlsdk.interfaces import Batch, ForwardBackwardResult, ModelSpec, OptimSpec, RankContext, TrainSpec
from rlsdk.kit.model.chunked_head import VocabularyHead, log_probs, outputs_of_logits
from rlsdk.kit.model.logit_chunks import chunk_tokens
from rlsdk.kit.model.packed import PackedRows, packed_attention
from rlsdk.kit.model.shapes import count_parameters, shape_fields
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.host_waits import HostWaits
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.train.cases import train_batch

MOST_WAITS = 2
"""Of the host for the device, in a micro-batch."""
HEAD_COPIES = 4
"""Float32 tensors of a chunk's logits that the head may hold (`outputs_of_logits`)."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}
"""Dense bfloat16 products per second, from the vendor's data sheets."""
BFLOAT16_ERROR = 0.02
"""Largest difference of attention in bfloat16 from float32, relative to the largest value."""


def host_waits(device: str, folder: Path) -> dict[str, object]:
    """Waits of the host in four micro-batches, forward and backward; on CUDA counted by torch."""
    engine, batch = TorchTrainEngine(), train_batch(12, longest=24, masked=True)
    spec = TrainSpec(model=ModelSpec(path=str(write_tiny_model(folder))), optim=OptimSpec(), micro_batch_rows=3)
    engine.initialize(RankContext(role="actor", device=device), spec)
    step = functools.partial(engine.forward_backward, batch, PolicyObjective())
    step()  # loads kernels
    found, where = _counted_by_torch(step) if device != "cpu" else _counted_by_operators(step)
    most = MOST_WAITS * found.num_micro_batches
    return {
        "waits": len(where),
        "micro_batches": found.num_micro_batches,
        "where": sorted(set(where)),
        "passed": len(where) <= most,
    }


def _counted_by_torch(step: Callable[[], ForwardBackwardResult]) -> tuple[ForwardBackwardResult, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            found = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found, [f"{w.filename}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]


def _counted_by_operators(step: Callable[[], ForwardBackwardResult]) -> tuple[ForwardBackwardResult, list[str]]:
    waits = HostWaits()
    with waits.counting():
        return step(), waits.found


def head_memory(device: str, folder: Path) -> dict[str, object]:
    """Peak memory and time of log-probs and entropy of 4,096 tokens over the vocabulary of Qwen2.5-0.5B, and their
    difference from float64 on some of them."""
    small = device == "cpu"
    tokens, hidden, vocabulary = (512, 64, 8192) if small else (4096, 896, 151_936)
    dtype = torch.float32 if small else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    chunk = min(chunk_tokens(vocabulary, device), tokens // 2)
    compute = functools.partial(log_probs, entropy=True)

    def run() -> tuple[Tensor, ...]:
        states.grad = weight.grad = None
        found = outputs_of_logits(VocabularyHead(weight=weight), compute, states, (targets,), chunk)
        torch.stack(found).sum().backward()  # type: ignore[no-untyped-call]
        return found

    values, peak, seconds = _measured(run, device)
    exact = torch.log_softmax(states[:64].detach().double() @ weight.detach().double().t(), -1)
    error = (exact.gather(1, targets[:64, None])[:, 0] - values[0][:64].detach().double()).abs().max()
    limit = HEAD_COPIES * 4 * chunk * vocabulary + 8 * weight.numel() + 4 * states.numel() + 64 * tokens
    return {
        "peak_bytes": peak,
        "bound_bytes": limit,
        "tokens_per_s": round(tokens / seconds),
        "log_prob_error": float(error),
        "passed": peak <= limit and float(error) < (1e-4 if small else 0.1),
    }


def _measured(run: Callable[[], Any], device: str) -> tuple[Any, int, float]:
    """(result, peak bytes above what was there, seconds) of a second run."""
    run()
    gc.collect()
    before = 0
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    found = run()
    if device == "cpu":
        return found, 0, time.perf_counter() - start
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated() - before, time.perf_counter() - start


def varlen_attention(device: str, folder: Path) -> dict[str, object]:
    """Packed rows in bfloat16, by the variable-length kernel on CUDA, against float32: outputs and gradients."""
    lengths = torch.tensor([1, 300, 77, 512, 45])
    total = int(lengths.sum())
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(1, count, total, 64, generator=generator) for count in (8, 2, 2)]
    slope = torch.randn(1, total, 8, 64, generator=generator)
    exact = _attention(heads, slope, lengths, torch.device("cpu"), torch.float32)
    near = _attention(heads, slope, lengths, torch.device(device), torch.bfloat16)
    pairs = zip(near, exact, strict=True)
    errors = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
    names = ("output", "query_gradient", "key_gradient", "value_gradient")
    return {**dict(zip(names, errors, strict=True)), "passed": max(errors) <= BFLOAT16_ERROR}


def _attention(
    heads: list[Tensor], slope: Tensor, lengths: Tensor, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients, float32 on the CPU."""
    batch = Batch(lengths=lengths)
    offsets = batch.offsets.int()
    rows = PackedRows(
        row=batch.row_of_token.to(device),
        position=batch.position_ids.to(device),
        offsets=offsets.to(device),
        token=None,
        home=None,
        max_length=batch.max_length,
    )
    query, key, value = leaves = [tensor.bfloat16().to(device, dtype).requires_grad_() for tensor in heads]
    out, _ = packed_attention(torch.nn.Module(), query, key, value, None, packed_rows=rows)
    gradients = torch.autograd.grad(out, leaves, slope.bfloat16().to(device, dtype))
    return [tensor.detach().float().cpu() for tensor in (out, *gradients)]


def speed(device: str, folder: Path) -> dict[str, object]:
    """Tokens per second of an update of a model of the shape of Qwen2.5-0.5B, in bfloat16, and the share of the
    device's peak that its products are."""
    fields = {**shape_fields("shape:qwen2.5-0.5b"), "torch_dtype": "bfloat16"}
    if device == "cpu":
        fields |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    engine = TorchTrainEngine()
    model = ModelSpec(path=str(folder), dtype="bfloat16")
    spec = TrainSpec(model=model, optim=OptimSpec(), micro_batch_tokens=8192, init_from_config=True)
    engine.initialize(RankContext(role="actor", device=device), spec)
    rows, length = (2, 64) if device == "cpu" else (32, 1024)
    ids = torch.randint(5, fields["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_rows(ids.tolist())
    ones = torch.ones(batch.num_tokens)
    batch = batch.with_tokens(response_mask=ones.bool(), loss_weight=ones / batch.num_tokens, advantages=ones)

    def step() -> float:
        engine.forward_backward(batch, PolicyObjective())
        return engine.optim_step().grad_norm

    norm, peak, seconds = _measured(step, device)
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    flops = 6 * (count_parameters(fields) or 0) * batch.num_tokens / seconds
    most = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    return {
        "tokens_per_s": round(batch.num_tokens / seconds),
        "peak_bytes": peak,
        "mfu": None if most is None else round(flops / most, 3),
        "passed": math.isfinite(norm),
    }


CHECKS = {"waits": host_waits, "head": head_memory, "attention": varlen_attention, "speed": speed}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(CHECKS[sys.argv[2]](sys.argv[1], Path(made))))
