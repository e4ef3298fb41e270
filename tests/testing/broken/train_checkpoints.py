"""Train engines that save or load checkpoints wrongly."""

from __future__ import annotations

import glob
import json
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlsdk.interfaces import (
    Batch,
    CheckpointError,
    ForwardBackwardResult,
    Objective,
    RankContext,
    TrainSpec,
    WeightShard,
)
from rlsdk.kit.files.atomic_files import atomic_write_json, atomic_write_tensors
from rlsdk.reference.torch_engine import CHECKPOINT_FORMAT, MOMENTS, RANDOM, TorchTrainEngine

STATE = "state.safetensors"


class MomentsForgotten(TorchTrainEngine):
    """A checkpoint lacks moments."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        if self.optimizer is not None:
            self.optimizer.state.clear()


class ScheduleForgotten(TorchTrainEngine):
    """A checkpoint lacks the number of steps."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.num_steps = 0


class DamageLoaded(TorchTrainEngine):
    """An empty folder is accepted as a checkpoint without changes."""

    def load_checkpoint(self, path: Path) -> None:
        if any(path.iterdir()):
            super().load_checkpoint(path)


def rewrite(path: Path, change: Any) -> None:
    """Puts other tensors into a checkpoint."""
    tensors = load_file(path / STATE)
    save_file({name: tensor.clone() for name, tensor in change(tensors).items()}, path / STATE)


class FirstKeepsMoments(TorchTrainEngine):
    """A checkpoint without moments keeps those of the engine that loads it."""

    def load_checkpoint(self, path: Path) -> None:
        assert self.optimizer is not None
        held = dict(self.optimizer.state)
        super().load_checkpoint(path)
        if not self.optimizer.state:
            self.optimizer.state.update(held)


class FirstCannotBeSaved(TorchTrainEngine):
    """A checkpoint from before the first step cannot be loaded, because it lacks moments."""

    def load_checkpoint(self, path: Path) -> None:
        if not any(name.startswith("exp_avg/") for name in load_file(path / STATE)):
            raise CheckpointError(f"{path} is not whole: it has no moments")
        super().load_checkpoint(path)


class PendingKept(TorchTrainEngine):
    """Gradients of an unfinished step remain after a load."""

    def load_checkpoint(self, path: Path) -> None:
        held = [(p, p.grad) for p in self.parameters.values()]
        super().load_checkpoint(path)
        for parameter, gradient in held:
            parameter.grad = gradient


class LoadsDefaults(TorchTrainEngine):
    """A load creates a new optimizer with torch's default betas."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


class LoadsWithoutDecay(TorchTrainEngine):
    """A load creates a new optimizer without weight decay."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0


class StepsOfAdamForgotten(TorchTrainEngine):
    """After a load, Adam's bias correction starts again at step 1."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            state["step"].zero_()


class FitsLoosely(TorchTrainEngine):
    """Tensors of another shape or name are skipped, as in a load that is not strict."""

    def _check_fit(self, path: Path, tensors: Any) -> None:
        for name, parameter in self.parameters.items():
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                held = tensors.get(f"{kind}/{name}")
                if held is None or held.shape != parameter.shape:
                    tensors[f"{kind}/{name}"] = parameter.detach().clone() * (kind == "weight")
            tensors.setdefault(f"step/{name}", torch.zeros(()))


class CopiesThenChecks(TorchTrainEngine):
    """A checkpoint of another model is refused only after the fitting tensors were copied."""

    def _check_fit(self, path: Path, tensors: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if (held := tensors.get(f"weight/{name}")) is not None and held.shape == parameter.shape:
                    parameter.copy_(held)
        super()._check_fit(path, tensors)


class RefusesAndForgets(TorchTrainEngine):
    """A refused checkpoint destroys the moments."""

    def load_checkpoint(self, path: Path) -> None:
        try:
            super().load_checkpoint(path)
        except CheckpointError:
            if self.optimizer is not None:
                self.optimizer.state.clear()
            raise


class StepsGuessed(TorchTrainEngine):
    """If the small file of a checkpoint is missing, the schedule starts again."""

    def load_checkpoint(self, path: Path) -> None:
        if not (path / "state.json").exists():
            (path / "state.json").write_text(json.dumps({"format": 1, "num_steps": 0}))
        super().load_checkpoint(path)


class FullPath(TorchTrainEngine):
    """A checkpoint contains the absolute paths of its files."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**state, "file": str(path.resolve() / STATE)}))

    def load_checkpoint(self, path: Path) -> None:
        file = path / "state.json"
        if file.exists() and file.stat().st_size:
            try:
                named = json.loads(file.read_text()).get("file", "")
            except ValueError:
                named = ""
            if named and not Path(named).exists():
                raise CheckpointError(f"{named} is not there")
        super().load_checkpoint(path)


class Pickles(TorchTrainEngine):
    """The optimizer's settings are in a pickle."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        (path / "optimizer.bin").write_bytes(pickle.dumps(self.optim))

    def load_checkpoint(self, path: Path) -> None:
        try:
            (path / "optimizer.bin").read_bytes()[1]
        except (OSError, IndexError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        super().load_checkpoint(path)


class TrainsTheFile(TorchTrainEngine):
    """A tensor stays mapped to the checkpoint file, and steps are written to this file."""

    name = "model.norm.weight"

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        (path / "norm.raw").write_bytes(self.parameters[self.name].detach().numpy().tobytes())

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        held = self.parameters[self.name]
        file = path / "norm.raw"
        if not file.exists() or file.stat().st_size != held.numel() * 4:
            raise CheckpointError(f"{file} is not whole")
        held.data = torch.from_file(str(file), shared=True, size=held.numel())


class SaveRounds(TorchTrainEngine):
    """Saving rounds the weights to the written values."""

    def save_checkpoint(self, path: Path) -> None:
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(parameter.half().float())
        super().save_checkpoint(path)


class HalfCheckpoint(TorchTrainEngine):
    """In bfloat16, a checkpoint has the rounded weights."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        if self.spec.model.dtype == "bfloat16":
            rewrite(
                path, lambda held: {n: t.bfloat16().float() if n.startswith("weight/") else t for n, t in held.items()}
            )


class HeadWithoutMoments(TorchTrainEngine):
    """A head's moments are not saved."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        rewrite(path, lambda held: {n: t for n, t in held.items() if n.startswith("weight/") or "score" not in n})


class RandomStateForgotten(TorchTrainEngine):
    """A checkpoint does not restore the random state."""

    def load_checkpoint(self, path: Path) -> None:
        state = torch.get_rng_state()
        super().load_checkpoint(path)
        torch.set_rng_state(state)


class LoadedLearnsTwice(TorchTrainEngine):
    """After a load, every call adds its gradients twice."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if getattr(self, "loaded", False):
            super().forward_backward(batch, objective)
        return result

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.loaded = True


class ResetBehindALoad(TorchTrainEngine):
    """After a load, `reset_optimizer` continues the checkpoint's schedule."""

    has_loaded = False

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        self.has_loaded = True

    def reset_optimizer(self, optim):
        steps = self.num_steps
        super().reset_optimizer(optim)
        if self.has_loaded:
            self.num_steps = steps


class HeadOfBefore(TorchTrainEngine):
    """From the second load on, a value head is not loaded."""

    num_loads = 0

    def load_checkpoint(self, path):
        self.num_loads += 1
        kept = {name: p.detach().clone() for name, p in self.parameters.items() if "score" in name}
        super().load_checkpoint(path)
        if self.num_loads > 1:
            for name, values in kept.items():
                self.parameters[name].data.copy_(values)


class LackingMomentsAreZero(TorchTrainEngine):
    """Moments that a checkpoint lacks become zero."""

    def _check_fit(self, path, tensors):
        if any(name.startswith("exp_avg") for name in tensors):
            for name, parameter in self.parameters.items():
                for moment in ("exp_avg", "exp_avg_sq"):
                    tensors.setdefault(f"{moment}/{name}", torch.zeros_like(parameter))
        super()._check_fit(path, tensors)


class SavedInAThread(TorchTrainEngine):
    """A thread moves the checkpoint into place after `save_checkpoint` has returned."""

    def save_checkpoint(self, path):
        aside = Path(tempfile.mkdtemp())
        super().save_checkpoint(aside)

        def move():
            time.sleep(0.05)
            shutil.copytree(aside, path, dirs_exist_ok=True)
            shutil.rmtree(aside)

        threading.Thread(target=move).start()


class MarksTheFolder(TorchTrainEngine):
    """Loading a checkpoint writes a marker into its folder."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        (path / "loaded").touch()


class ScheduleFromAdam(TorchTrainEngine):
    """After a load, the schedule continues from AdamW's step count, which omits steps without a gradient."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        if steps := [int(state["step"]) for _, state in self._moments()]:
            self.num_steps = max(steps)


class CopyStaysOld(TorchTrainEngine):
    """In bfloat16, passes after a load use the old weights until the next step."""

    def load_checkpoint(self, path: Path) -> None:
        held = {name: p.detach().clone() for name, p in self.computed.items()}
        super().load_checkpoint(path)
        if self.parameters is not self.computed:
            for name, parameter in self.computed.items():
                parameter.data.copy_(held[name])


class SavesLater(TorchTrainEngine):
    """A checkpoint is on disk only some time after `save_checkpoint` has returned."""

    def save_checkpoint(self, path: Path) -> None:
        def write() -> None:
            time.sleep(0.3)
            TorchTrainEngine.save_checkpoint(self, path)

        self.writer = threading.Thread(target=write)
        self.writer.start()

    def close(self) -> None:
        if "writer" in vars(self):
            self.writer.join()
        super().close()


class MomentsInHalf(TorchTrainEngine):
    """A checkpoint stores moments in bfloat16."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        tensors = load_file(path / "state.safetensors")
        halved = {n: t.bfloat16().float() if n.startswith("exp_avg") else t for n, t in tensors.items()}
        save_file({n: t.clone() for n, t in halved.items()}, path / "state.safetensors")


class CopyIsStaleAfterLoad(TorchTrainEngine):
    """In bfloat16, `load_checkpoint` does not renew the rounded copy."""

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
    """Part of the checkpoint is written outside its folder."""

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
    """`save_checkpoint` returns before a thread has finished writing."""

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


class CheckpointErrorsLost(TorchTrainEngine):
    """A checkpoint that cannot be written is only logged, and training continues."""

    def save_checkpoint(self, path):
        with suppress(OSError):
            super().save_checkpoint(path)


class StepsOfEightBits(TorchTrainEngine):
    """A checkpoint stores step counts in bfloat16."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        for state in self.optimizer.state.values():
            state["step"].copy_(state["step"].bfloat16())


class LockedBySync(TorchTrainEngine):
    """`shards` holds a lock from its first item to its last, and a checkpoint waits for this lock."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.lock = threading.Lock()
        super().initialize(ctx, spec)

    def shards(self) -> Iterator[WeightShard]:
        with self.lock:
            yield from super().shards()

    def save_checkpoint(self, path: Path) -> None:
        with self.lock:
            super().save_checkpoint(path)


class BracketsArePatterns(TorchTrainEngine):
    """A checkpoint's files are found by a pattern, in which its folder's name is not escaped."""

    def load_checkpoint(self, path: Path) -> None:
        if not glob.glob(f"{path}/*.safetensors"):
            raise CheckpointError(f"{path} has no safetensors")
        super().load_checkpoint(path)


class SettingsOfTheSaver(TorchTrainEngine):
    """A checkpoint brings its optimizer's betas, eps and weight decay along."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        assert self.optimizer is not None
        groups = [{k: group[k] for k in ("betas", "eps", "weight_decay")} for group in self.optimizer.param_groups]
        atomic_write_json(path / "settings.json", groups)

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        saved = json.loads((path / "settings.json").read_text()) if (path / "settings.json").exists() else []
        for group, settings in zip(self.optimizer.param_groups, saved, strict=False):
            group.update(settings)


class LinkedToTheLast(TorchTrainEngine):
    """A checkpoint with the step count of the one that was saved before is made of links to its files."""

    saved: tuple[int, Path] | None = None

    def save_checkpoint(self, path: Path) -> None:
        if self.saved is not None and self.saved[0] == self.num_steps and self.saved[1].exists():
            for file in self.saved[1].iterdir():
                os.link(file, path / file.name)
            return
        super().save_checkpoint(path)
        self.saved = self.num_steps, path
