"""Train engines that keep, hand out or give back something else: checkpoints, exports, memory, what is left open."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlsdk.interfaces import (
    Batch,
    CheckpointError,
    ForwardBackwardResult,
    Head,
    Objective,
    RankContext,
    TrainSpec,
    WeightLayout,
    WeightShard,
)
from rlsdk.kit.parts import TRAIN_PARTS
from rlsdk.reference.torch_engine import TorchTrainEngine

STATE = "state.safetensors"


def rewrite(path: Path, change: Any) -> None:
    """Puts other tensors into a checkpoint."""
    tensors = load_file(path / STATE)
    save_file({name: tensor.clone() for name, tensor in change(tensors).items()}, path / STATE)


class FirstKeepsMoments(TorchTrainEngine):
    """A checkpoint without moments leaves those of the engine that loads it."""

    def load_checkpoint(self, path: Path) -> None:
        assert self.optimizer is not None
        held = dict(self.optimizer.state)
        super().load_checkpoint(path)
        if not self.optimizer.state:
            self.optimizer.state.update(held)


class FirstCannotBeSaved(TorchTrainEngine):
    """A checkpoint before the first step is refused when it is loaded: it lacks moments."""

    def load_checkpoint(self, path: Path) -> None:
        if not any(name.startswith("exp_avg/") for name in load_file(path / STATE)):
            raise CheckpointError(f"{path} is not whole: it has no moments")
        super().load_checkpoint(path)


class PendingKept(TorchTrainEngine):
    """Gradients of a step that was not made are still there after a checkpoint was loaded."""

    def load_checkpoint(self, path: Path) -> None:
        held = [(p, p.grad) for p in self.parameters.values()]
        super().load_checkpoint(path)
        for parameter, gradient in held:
            parameter.grad = gradient


class LoadsDefaults(TorchTrainEngine):
    """An optimizer is built anew for a checkpoint, with torch's own betas."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


class LoadsWithoutDecay(TorchTrainEngine):
    """An optimizer is built anew for a checkpoint, without weight decay."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0


class StepsOfAdamForgotten(TorchTrainEngine):
    """Adam corrects its moments as if the first step behind a checkpoint were its first."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            state["step"].zero_()


class FitsLoosely(TorchTrainEngine):
    """Tensors of another shape or name are passed over, as by a load that is not strict."""

    def _check_fit(self, path: Path, tensors: Any) -> None:
        for name, parameter in self.parameters.items():
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                held = tensors.get(f"{kind}/{name}")
                if held is None or held.shape != parameter.shape:
                    tensors[f"{kind}/{name}"] = parameter.detach().clone() * (kind == "weight")
            tensors.setdefault(f"step/{name}", torch.zeros(()))


class CopiesThenChecks(TorchTrainEngine):
    """A checkpoint that does not fit is refused after what fits was copied."""

    def _check_fit(self, path: Path, tensors: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if (held := tensors.get(f"weight/{name}")) is not None and held.shape == parameter.shape:
                    parameter.copy_(held)
        super()._check_fit(path, tensors)


class RefusesAndForgets(TorchTrainEngine):
    """A checkpoint that is refused costs the moments."""

    def load_checkpoint(self, path: Path) -> None:
        try:
            super().load_checkpoint(path)
        except CheckpointError:
            if self.optimizer is not None:
                self.optimizer.state.clear()
            raise


class StepsGuessed(TorchTrainEngine):
    """A checkpoint whose small file is missing begins the schedule anew."""

    def load_checkpoint(self, path: Path) -> None:
        if not (path / "state.json").exists():
            (path / "state.json").write_text(json.dumps({"format": 1, "num_steps": 0}))
        super().load_checkpoint(path)


class FullPath(TorchTrainEngine):
    """A checkpoint names its files by their full path."""

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
    """A tensor stays mapped to the checkpoint that it was loaded from, and steps are written there."""

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
    """To save rounds the weights to what is written."""

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
    """A checkpoint does not bring the random state back."""

    def load_checkpoint(self, path: Path) -> None:
        state = torch.get_rng_state()
        super().load_checkpoint(path)
        torch.set_rng_state(state)


class NoTokenizer(TorchTrainEngine):
    """An export has no tokenizer."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        for file in path.glob("tokenizer*"):
            file.unlink()


class PlainConfig(TorchTrainEngine):
    """An export's configuration has some settings of its kind's defaults."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        for name in ("pad_token_id", "max_position_embeddings"):
            config.pop(name, None)
        (path / "config.json").write_text(json.dumps(config))


class HeadLeftOut(TorchTrainEngine):
    """An export is of the body: a head is left out."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        if self.spec.model.head is not Head.LM:
            file = path / "model.safetensors"
            save_file({n: t for n, t in load_file(file).items() if "score" not in n}, file, {"format": "pt"})


class WideExport(TorchTrainEngine):
    """A model of bfloat16 is exported in float32."""

    def save_pretrained(self, path: Path) -> None:
        spec = self.spec
        self.spec = replace(spec, model=replace(spec.model, dtype="float32"))
        try:
            super().save_pretrained(path)
        finally:
            self.spec = spec


class TiedUntiedInExport(TorchTrainEngine):
    """A tied model is exported as one that is not, with the output layer that it had at the start."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.first = {name: self.parameters[of].detach().clone() for name, of in self.tied.items()}

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        if self.first:
            file = path / "model.safetensors"
            save_file({**load_file(file), **self.first}, file, {"format": "pt"})
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


class ExportsOnce(TorchTrainEngine):
    """A second export has the weights of the first."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        first: bytes = vars(self).setdefault("written", (path / "model.safetensors").read_bytes())
        (path / "model.safetensors").write_bytes(first)


class MomentsStayAway(TorchTrainEngine):
    """Moments that were lent alone come back as zeros."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if "optimizer" in parts and "weights" not in parts and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()


class OffloadNeedsMoments(TorchTrainEngine):
    """Before the first step there is nothing to lend, which is an error."""

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        if "optimizer" in parts and self.optimizer is not None and not self.optimizer.state:
            raise KeyError("exp_avg")
        super().offload(parts)


class FrozenDoesNotReturn(TorchTrainEngine):
    """A frozen model's weights come back rounded."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if self.optimizer is None:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.bfloat16().float()


class LayoutCounts(TorchTrainEngine):
    """A layout lists the tensors that have been stepped first."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return found if not self.num_steps else replace(found, boxes=found.boxes[1:] + found.boxes[:1])

    def shards(self) -> Iterator[WeightShard]:
        found = list(super().shards())
        yield from found if not self.num_steps else found[1:] + found[:1]


class ShardsOfAnotherType(TorchTrainEngine):
    """A layout says bfloat16, and shards are float32."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return replace(found, tensors=tuple(replace(meta, dtype="bfloat16") for meta in found.tensors))


class LeavesFiles(TorchTrainEngine):
    """Every checkpoint leaves a file open."""

    left: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        self.left.append((path / "state.json").open())


class LeavesThreads(TorchTrainEngine):
    """Every engine leaves a thread that waits for work."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LoadedLearnsTwice(TorchTrainEngine):
    """Behind a load, every call adds its gradients twice."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        if getattr(self, "loaded", False):
            super().forward_backward(batch, objective)
        return result

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.loaded = True
