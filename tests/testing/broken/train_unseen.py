"""Train engines of the third trial, written by somebody who had not seen a requirement."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from rlsdk.interfaces import OptimStepResult
from rlsdk.kit.atomic import atomic_write_json, atomic_write_tensors
from rlsdk.kit.optim import learning_rate, set_learning_rate
from rlsdk.reference.torch_engine import CHECKPOINT_FORMAT, MOMENTS, RANDOM, TorchTrainEngine


class Stepped(TorchTrainEngine):
    """Not broken: `optim_step` with its parts as methods."""

    def optim_step(self):
        optimizer, spec = self._trained()
        lr = self.rate(spec)
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        limit = math.inf if spec.max_grad_norm is None else spec.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit)) if parameters else 0.0
        steps = self.steps(norm, spec)
        if steps:
            set_learning_rate(optimizer, lr)
            optimizer.step()
            self._round_weights()
            self.num_steps += 1
        optimizer.zero_grad()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not steps)

    def rate(self, spec):
        return learning_rate(self.num_steps, spec)

    def steps(self, norm, spec):
        return math.isfinite(norm)


class EarlierCallsStay(TorchTrainEngine):
    """When an objective raises, gradients of earlier calls stay."""

    def forward_backward(self, batch, objective):
        before = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        try:
            return super().forward_backward(batch, objective)
        except BaseException:
            for name, gradient in before.items():
                self.parameters[name].grad = gradient
            raise


class InfinityPasses(Stepped):
    """A gradient norm of infinity is stepped."""

    def steps(self, norm, spec):
        return not math.isnan(norm)


class NoLimitNoCheck(Stepped):
    """With max_grad_norm None gradients that are not finite are stepped."""

    def steps(self, norm, spec):
        return spec.max_grad_norm is None or math.isfinite(norm)


class CosineComesBack(Stepped):
    """The cosine rises again behind total_steps."""

    def rate(self, spec):
        if spec.schedule != "cosine" or self.num_steps < spec.warmup_steps or spec.total_steps is None:
            return super().rate(spec)
        done = (self.num_steps - spec.warmup_steps) / max(spec.total_steps - spec.warmup_steps, 1)
        left = (1 + math.cos(math.pi * done)) / 2
        return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left)


class ResetKeepsBetas(TorchTrainEngine):
    """Reset_optimizer keeps the first spec's betas and eps."""

    def reset_optimizer(self, optim):
        if self.optim is not None:
            optim = replace(optim, betas=self.optim.betas, eps=self.optim.eps)
        super().reset_optimizer(optim)


class CopyIsStaleAfterLoad(TorchTrainEngine):
    """Bfloat16: load_checkpoint does not renew the rounded copy."""

    loading = False

    def load_checkpoint(self, path):
        self.loading = True
        try:
            super().load_checkpoint(path)
        finally:
            self.loading = False

    def _round_weights(self):
        if not self.loading:
            super()._round_weights()


class BesideTheFolder(TorchTrainEngine):
    """Part of the checkpoint is written beside its folder."""

    @staticmethod
    def _sidecar(path):
        return Path(path).parent / f"{Path(path).name}.json"

    def save_checkpoint(self, path):
        super().save_checkpoint(path)
        os.replace(Path(path) / "state.json", self._sidecar(path))

    def load_checkpoint(self, path):
        with tempfile.TemporaryDirectory() as name:
            for file, to in (
                (Path(path) / "state.safetensors", "state.safetensors"),
                (self._sidecar(path), "state.json"),
            ):
                if file.exists():
                    os.symlink(file.resolve(), Path(name) / to)
            super().load_checkpoint(Path(name))


class SavesBehindYourBack(TorchTrainEngine):
    """Save_checkpoint returns before a thread has written."""

    writer = None

    def save_checkpoint(self, path):
        self._join()
        tensors = {f"weight/{name}": p.detach().clone() for name, p in self.parameters.items()}
        for name, state in self._moments():
            tensors |= {f"{moment}/{name}": state[moment].clone() for moment in MOMENTS}
        tensors[RANDOM[0]] = torch.get_rng_state()
        steps = self.num_steps

        def write():
            time.sleep(0.2)  # a large model's disk
            atomic_write_tensors(path / "state.safetensors", tensors)
            atomic_write_json(path / "state.json", {"format": CHECKPOINT_FORMAT, "num_steps": steps})

        self.writer = threading.Thread(target=write)
        self.writer.start()

    def load_checkpoint(self, path):
        self._join()
        super().load_checkpoint(path)

    def close(self):
        self._join()
        super().close()

    def _join(self):
        if self.writer is not None:
            self.writer.join()


class LayoutSaysWhatComputes(TorchTrainEngine):
    """Bfloat16: layout says bfloat16, shards are float32."""

    def layout(self):
        found = super().layout()
        return replace(found, tensors=tuple(replace(meta, dtype=self.spec.model.dtype) for meta in found.tensors))


class ExportRoundsTheMasters(TorchTrainEngine):
    """Bfloat16: save_pretrained rounds the trained float32 weights."""

    def save_pretrained(self, path):
        dtype = getattr(torch, self.spec.model.dtype)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(parameter.to(dtype))
        super().save_pretrained(path)


class AllTheCores(TorchTrainEngine):
    """Takes all cores, whatever num_threads says."""

    def initialize(self, ctx, spec):
        torch.set_num_threads(max(os.cpu_count() or 1, ctx.num_threads + 1))
        super().initialize(ctx, spec)
