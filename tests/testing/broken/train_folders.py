"""Train engines that take a model's folder, or what they are built from, for what they are used to."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from broken.defect import defect
from rlsdk.interfaces import RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine


def _stored(spec: TrainSpec) -> dict[str, str]:
    """Tensor -> file, of a checkpoint of several files."""
    index = Path(spec.model.path) / "model.safetensors.index.json"
    return json.loads(index.read_text())["weight_map"] if index.exists() else {}


@defect({"model.code": "code of the model was run"})
class RunsCode(TorchTrainEngine):
    """Code in a model's folder runs, even if it is not allowed."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, replace(spec, model=replace(spec.model, trust_remote_code=True)))


@defect({"model.families": "largest difference"})
class DtypeOfFiles(TorchTrainEngine):
    """A model is trained in the dtype of its files."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        stored = json.loads((Path(spec.model.path) / "config.json").read_text()).get("dtype", spec.model.dtype)
        dtype = stored if spec.model.dtype == "float32" else spec.model.dtype
        super().initialize(ctx, replace(spec, model=replace(spec.model, dtype=dtype)))


@defect({"export.tied": "files of its index"})
class IndexOfTheSource(TorchTrainEngine):
    """An export copies all files next to the weights, including an index of other files."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        for file in Path(self.spec.model.path).glob("*.index.json"):
            shutil.copy(file, path)


@defect({"export.files": "chat_template.jinja"})
class TemplateLost(TorchTrainEngine):
    """An export has the tokenizer's vocabulary, but not its chat template."""

    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        (path / "chat_template.jinja").unlink(missing_ok=True)


@defect({"refusals.settings": "an argument that"})
class TakesAnyArgument(TorchTrainEngine):
    """Unknown raw arguments are silently accepted."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, replace(spec, engine_kwargs={}))


@defect({"refusals.settings": "a dtype that there is not"})
class AnyDtype(TorchTrainEngine):
    """An unknown dtype is replaced with float32."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        dtype = spec.model.dtype if hasattr(torch, spec.model.dtype) else "float32"
        super().initialize(ctx, replace(spec, model=replace(spec.model, dtype=dtype)))


@defect({"refusals.settings": "micro_batch_tokens 0"})
class NoTokenLimit(TorchTrainEngine):
    """A `micro_batch_tokens` of 0 means no limit."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        tokens = 10**9 if spec.micro_batch_tokens == 0 else spec.micro_batch_tokens
        super().initialize(ctx, replace(spec, micro_batch_tokens=tokens))
