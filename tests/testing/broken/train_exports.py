"""Train engines that export wrong Hugging Face folders."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from broken.defect import defect
from rlsdk.interfaces import Head, RankContext, TrainSpec
from rlsdk.reference import torch_engine
from rlsdk.reference.torch_engine import TorchTrainEngine


@defect({"export": "largest difference of weights"})
class ExportOfTheFirst(TorchTrainEngine):
    """One tensor is exported with its initial values."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.first = self.parameters["model.norm.weight"].detach().clone()

    def save_pretrained(self, path: Path) -> None:
        parameter = self.parameters["model.norm.weight"]
        trained = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(self.first)
            super().save_pretrained(path)
            parameter.copy_(trained)


@defect({"export.files": "tokenizer"})
class NoTokenizer(TorchTrainEngine):
    """An export lacks the tokenizer."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        for file in path.glob("tokenizer*"):
            file.unlink()


@defect({"export.value_head": "score.weight"})
class HeadLeftOut(TorchTrainEngine):
    """An export lacks the head."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        if self.spec.model.head is not Head.LM:
            file = path / "model.safetensors"
            save_file({n: t for n, t in load_file(file).items() if "score" not in n}, file, {"format": "pt"})


@defect({"export.bfloat16": "weights"})
class WideExport(TorchTrainEngine):
    """A bfloat16 model is exported in float32."""

    def save_pretrained(self, path: Path) -> None:
        spec = self.spec
        self.spec = replace(spec, model=replace(spec.model, dtype="float32"))
        try:
            super().save_pretrained(path)
        finally:
            self.spec = spec


@defect({"export.again": "begun anew"})
class ExportsOnce(TorchTrainEngine):
    """A second export has the weights of the first."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        first: bytes = vars(self).setdefault("written", (path / "model.safetensors").read_bytes())
        (path / "model.safetensors").write_bytes(first)


@defect({"export.again": "File exists"})
class CannotSaveTwice(TorchTrainEngine):
    """A checkpoint cannot be written to an existing folder."""

    def save_pretrained(self, path: Path) -> None:
        os.mkdir(path)
        super().save_pretrained(path)


@defect({"random_calls.read_only": "differ, bfloat16"})
class ExportRoundsTheMasters(TorchTrainEngine):
    """In bfloat16, `save_pretrained` rounds the trained float32 weights."""

    def save_pretrained(self, path):
        dtype = getattr(torch, self.spec.model.dtype)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(parameter.to(dtype))
        super().save_pretrained(path)


@defect({"export.cannot_write": "was accepted"})
class ExportErrorsLost(TorchTrainEngine):
    """Exceptions of a thread that writes an export are ignored."""

    def save_pretrained(self, path):
        with suppress(OSError):
            super().save_pretrained(path)


@defect({"export.reset": "largest difference of weights"})
class ExportOfAStep(TorchTrainEngine):
    """The weights of an export are cached by the number of steps."""

    def save_pretrained(self, path):
        now = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        if getattr(self, "kept", (None, None))[0] != self.num_steps:
            self.kept = self.num_steps, now
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.kept[1][name])
            super().save_pretrained(path)
            for name, parameter in self.parameters.items():
                parameter.copy_(now[name])


@defect({"export.value_head": "missing or strange"})
class NamedAsItsSource(TorchTrainEngine):
    """The exported configuration names the class of the model's folder, also if the engine added a head."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        source, own = (json.loads((Path(p) / "config.json").read_text()) for p in (self.spec.model.path, path))
        (path / "config.json").write_text(json.dumps({**own, "architectures": source["architectures"]}))


@defect({"model.buffers": "buffers that are not exported"})
class BuffersLeftOut(TorchTrainEngine):
    """Persistent buffers are not exported."""

    def save_pretrained(self, path: Path) -> None:
        with patch.object(torch_engine, "persistent_buffers", lambda model: {}):
            super().save_pretrained(path)


@defect({"export.files": "settings that differ"})
class KnownSettingsOnly(TorchTrainEngine):
    """Fields of the configuration that its class does not know are left out."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        own = json.loads((path / "config.json").read_text())
        known = {*type(self.model.config)().to_dict(), "architectures", "dtype", "model_type", "num_labels"}
        (path / "config.json").write_text(json.dumps({n: value for n, value in own.items() if n in known}))
