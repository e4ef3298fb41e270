"""Train engines that save or load checkpoints wrongly."""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from broken.defect import defect
from rlsdk.interfaces import (
    CheckpointError,
)
from rlsdk.kit.files.atomic_files import atomic_write_json, atomic_write_tensors
from rlsdk.reference.torch_engine import CHECKPOINT_FORMAT, MOMENTS, RANDOM, TorchTrainEngine

STATE = "state.safetensors"


@defect({"checkpoint.resume": "largest difference of weights"})
class MomentsForgotten(TorchTrainEngine):
    """A checkpoint lacks moments."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        if self.optimizer is not None:
            self.optimizer.state.clear()


@defect({"checkpoint.schedule": "largest difference of rates"})
class ScheduleForgotten(TorchTrainEngine):
    """A checkpoint lacks the number of steps."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.num_steps = 0


@defect({"checkpoint.damaged": "nothing in it"})
class DamageLoaded(TorchTrainEngine):
    """An empty folder is accepted as a checkpoint without changes."""

    def load_checkpoint(self, path: Path) -> None:
        if any(path.iterdir()):
            super().load_checkpoint(path)


def rewrite(path: Path, change: Any) -> None:
    """Puts other tensors into a checkpoint."""
    tensors = load_file(path / STATE)
    save_file({name: tensor.clone() for name, tensor in change(tensors).items()}, path / STATE)


@defect({"checkpoint.first": "no moments"})
class FirstCannotBeSaved(TorchTrainEngine):
    """A checkpoint from before the first step cannot be loaded, because it lacks moments."""

    def load_checkpoint(self, path: Path) -> None:
        if not any(name.startswith("exp_avg/") for name in load_file(path / STATE)):
            raise CheckpointError(f"{path} is not whole: it has no moments")
        super().load_checkpoint(path)


@defect({"checkpoint.into_trained": "older after"})
class PendingKept(TorchTrainEngine):
    """Gradients of an unfinished step remain after a load."""

    def load_checkpoint(self, path: Path) -> None:
        held = [(p, p.grad) for p in self.parameters.values()]
        super().load_checkpoint(path)
        for parameter, gradient in held:
            parameter.grad = gradient


@defect({"checkpoint.settings": "short memory"})
class LoadsDefaults(TorchTrainEngine):
    """A load creates a new optimizer with torch's default betas."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


@defect({"checkpoint.settings": "weights"})
class StepsOfAdamForgotten(TorchTrainEngine):
    """After a load, Adam's bias correction starts again at step 1."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            state["step"].zero_()


@defect({"checkpoint.other_model": "weights"})
class CopiesThenChecks(TorchTrainEngine):
    """A checkpoint of another model is refused only after the fitting tensors were copied."""

    def _check_fit(self, path: Path, tensors: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if (held := tensors.get(f"weight/{name}")) is not None and held.shape == parameter.shape:
                    parameter.copy_(held)
        super()._check_fit(path, tensors)


@defect({"checkpoint.missing_file": "state.json missing"})
class StepsGuessed(TorchTrainEngine):
    """If the small file of a checkpoint is missing, the schedule starts again."""

    def load_checkpoint(self, path: Path) -> None:
        if not (path / "state.json").exists():
            (path / "state.json").write_text(json.dumps({"format": 1, "num_steps": 0}))
        super().load_checkpoint(path)


@defect({"read_only.save": "largest difference"})
class SaveRounds(TorchTrainEngine):
    """Saving rounds the weights to the written values."""

    def save_checkpoint(self, path: Path) -> None:
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(parameter.half().float())
        super().save_checkpoint(path)


@defect({"checkpoint.heads": "weights"})
class HeadWithoutMoments(TorchTrainEngine):
    """A head's moments are not saved."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        rewrite(path, lambda held: {n: t for n, t in held.items() if n.startswith("weight/") or "score" not in n})


@defect({"checkpoint.random_state": "numbers drawn"})
class RandomStateForgotten(TorchTrainEngine):
    """A checkpoint does not restore the random state."""

    def load_checkpoint(self, path: Path) -> None:
        state = torch.get_rng_state()
        super().load_checkpoint(path)
        torch.set_rng_state(state)


@defect({"random_calls": "random calls 2"})
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


@defect({"checkpoint.folder": "`save_checkpoint` returned"})
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


@defect({"checkpoint.only_reads": "files"})
class MarksTheFolder(TorchTrainEngine):
    """Loading a checkpoint writes a marker into its folder."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        (path / "loaded").touch()


@defect({"checkpoint.idle": "of the rate, behind one and an idle step"})
class ScheduleFromAdam(TorchTrainEngine):
    """After a load, the schedule continues from AdamW's step count, which omits steps without a gradient."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        if steps := [int(state["step"]) for _, state in self._moments()]:
            self.num_steps = max(steps)


@defect({"checkpoint.bfloat16": "weights"})
class CopyStaysOld(TorchTrainEngine):
    """In bfloat16, passes after a load use the old weights until the next step."""

    def load_checkpoint(self, path: Path) -> None:
        held = {name: p.detach().clone() for name, p in self.computed.items()}
        super().load_checkpoint(path)
        if self.parameters is not self.computed:
            for name, parameter in self.computed.items():
                parameter.data.copy_(held[name])


@defect({"checkpoint.resume": "difference of weights"})
class MomentsInHalf(TorchTrainEngine):
    """A checkpoint stores moments in bfloat16."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        tensors = load_file(path / "state.safetensors")
        halved = {n: t.bfloat16().float() if n.startswith("exp_avg") else t for n, t in tensors.items()}
        save_file({n: t.clone() for n, t in halved.items()}, path / "state.safetensors")


@defect({"checkpoint.on_disk": "returned"})
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


@defect({"checkpoint.cannot_write": "was accepted"})
class CheckpointErrorsLost(TorchTrainEngine):
    """A checkpoint that cannot be written is only logged, and training continues."""

    def save_checkpoint(self, path):
        with suppress(OSError):
            super().save_checkpoint(path)


@defect({"checkpoint.many_steps": "largest difference of weights"})
class StepsOfEightBits(TorchTrainEngine):
    """A checkpoint stores step counts in bfloat16."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        for state in self.optimizer.state.values():
            state["step"].copy_(state["step"].bfloat16())


@defect({"checkpoint.first": "has no safetensors"})
class BracketsArePatterns(TorchTrainEngine):
    """A checkpoint's files are found by a pattern, in which its folder's name is not escaped."""

    def load_checkpoint(self, path: Path) -> None:
        if not glob.glob(f"{path}/*.safetensors"):
            raise CheckpointError(f"{path} has no safetensors")
        super().load_checkpoint(path)
