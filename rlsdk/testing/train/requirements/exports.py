"""Requirements: `save_pretrained` writes a complete model folder like the one that was loaded, for every model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from rlsdk.interfaces import Capability, Head
from rlsdk.kit.model.hf import canonical_parameters
from rlsdk.testing.process.reference import LOCAL_MODEL
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import export, learn, look, reset, step
from rlsdk.testing.train.cases import OPTIM, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.plain_steps import plain_model_of, plain_numbers
from rlsdk.testing.train.requirements.settings import three_batches

UNCHANGED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
BESIDE = {
    "chat_template.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "generation_config.json": '{"temperature": 0.7, "top_k": 20}',
}
"""Files of a model, with default content if it has none."""
OWN = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "num_labels",
    "id2label",
    "label2id",
)
"""Fields that transformers, or the requested head, writes into a configuration itself."""
OWN_SETTINGS = {"training_stage": "second", "mixture": {"code": 0.5, "text": [1, 2]}}
"""Fields that the author of a model added to its configuration."""
OUTPUT = {Head.LM: "log_probs", Head.VALUE: "values", Head.SCORE: "scores"}


class ExportRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("export.files", needs=Capability.EXPORT, since=(2, 0), basic=True)
    def test_export_files(self, lab: TrainLab, measured: Measured) -> None:
        """An export includes the tokenizer, its chat template, generation defaults and the model's configuration, with
        fields that transformers does not know; its weights are safetensors, without pickles."""
        folder, source = lab.new_folder("export"), lab.new_folder("exported") / "model"
        shutil.copytree(lab.model, source)
        for name, content in BESIDE.items():
            if not (source / name).exists():
                (source / name).write_text(content, encoding="utf-8")
        settings = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**settings, **OWN_SETTINGS}, indent=2))
        lab.play([learn(three_batches()[0]), step, export(folder)], model=str(source))
        written = {path.name for path in folder.rglob("*") if path.is_file()}
        expected = [name for name in UNCHANGED if (source / name).exists()]
        measured.none("files that are missing", [name for name in [*expected, "config.json"] if name not in written])
        other = [name for name in expected if (folder / name).read_bytes() != (source / name).read_bytes()]
        measured.none("files that differ", other)
        strange = [name for name in written if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
        measured.none("files of pickles", strange)
        measured.none("settings that differ", settings_that_differ(source, folder))

    @requirement("export.tied", needs=Capability.EXPORT, since=(2, 0), basic=True)
    def test_export_tied(self, lab: TrainLab, measured: Measured) -> None:
        """A tied model's export is tied: transformers reads it without warnings, with one tensor for both uses; an
        index lists only files of the export, not those of the checkpoint."""
        if (model := lab.variant("tied")) is None:
            return measured.record("models tried", 0)
        self._readable(lab, measured, Head.LM, model=model)

    @requirement("export.value_head", needs=Capability.VALUE_HEAD, since=(2, 0))
    def test_export_value_head(self, lab: TrainLab, measured: Measured) -> None:
        """A value model's export has its trained head, and `config.json` names a class of transformers that reads it,
        also if the model was a language model before."""
        self._readable(lab, measured, Head.VALUE)
        self._readable(lab, measured, Head.VALUE, model=lab.model)

    @requirement("export.score_head", needs=Capability.SCORE_HEAD, since=(2, 0))
    def test_export_score_head(self, lab: TrainLab, measured: Measured) -> None:
        """A score model's export has its trained head, and `config.json` names a class of transformers that reads it,
        also if the model was a language model before."""
        self._readable(lab, measured, Head.SCORE)
        self._readable(lab, measured, Head.SCORE, model=lab.model)

    @requirement("export.bfloat16", needs=Capability.EXPORT, since=(2, 0))
    def test_export_bfloat16(self, lab: TrainLab, measured: Measured) -> None:
        """A model with dtype bfloat16 is exported in bfloat16, as the rounded trained weights."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        self._readable(lab, measured, Head.LM, dtype="bfloat16")

    @requirement("export.again", needs=Capability.EXPORT, since=(2, 0))
    def test_export_again(self, lab: TrainLab, measured: Measured) -> None:
        """An export does not affect the engine; a later export has the later weights; and an engine that starts from it
        gives the outputs of the engine that wrote it."""
        first, last, batches = lab.new_folder("export"), lab.new_folder("export"), three_batches()
        probe = (rows_of((9, 4, 17), seed=3), ("log_probs",))
        script = [act for batch in batches for act in (learn(batch), step)]
        expected = lab.play(script, probe=probe)
        exporting = [
            export(first),
            learn(batches[0]),
            export(first.with_name("export-midway")),
            *script[1:],
            export(last),
        ]
        found = lab.play(exporting, probe=probe)
        measured.equal("largest difference of weights", furthest_weight(whole_of(found), whole_of(expected)), 0.0)
        again = lab.play([], model=str(last), probe=probe)
        measured.equal(
            "largest difference of weights, begun anew", furthest_weight(whole_of(again), whole_of(expected)), 0
        )
        off = (again.outputs["log_probs"] - expected.outputs["log_probs"]).abs().max()
        measured.at_most("largest difference of log-probs, begun anew", float(off), lab.suite.tolerance)
        begun = lab.play([], model=str(first))
        measured.equal("largest difference of the first", furthest_weight(whole_of(begun), whole_of(lab.play([]))), 0.0)

    @requirement("export.reset", needs=Capability.EXPORT, since=(2, 0))
    def test_export_reset(self, lab: TrainLab, measured: Measured) -> None:
        """`reset_optimizer` restarts the step count: an export after it has the current weights, not those of an
        earlier export with the same count."""
        if not lab.can_reset:
            return measured.record("engines that begin their optimizer anew", 0)
        first, last = lab.new_folder("export"), lab.new_folder("export")
        found = lab.play([export(first), learn(three_batches()[0]), step, reset(OPTIM), export(last)])
        again = lab.play([], model=str(last))
        measured.equal("largest difference of weights", furthest_weight(whole_of(again), whole_of(found)), 0.0)
        return None

    def _readable(self, lab: TrainLab, measured: Measured, head: Head, **fields: Any) -> None:
        """Checks that transformers reads every tensor of an export after three steps, and that these are the trained
        ones."""
        if Capability.EXPORT not in lab.spec.capabilities:
            return measured.record("exports tried", 0)
        folder, name = lab.new_folder("export"), OUTPUT[head]
        batch = rows_of((9, 4, 17), seed=3)
        script = [act for batch in three_batches() for act in (learn(batch, Weighted((name,))), step)]
        found = lab.play([*script, look(batch, name), export(folder)], head=head, **fields)
        case = lab.case(model=str(folder), head=head)
        measured.none("tensors that transformers finds missing or strange", ill_fitting(folder, head))
        measured.none("files of its index that are not there", missing_files(folder))
        model = plain_model_of(case)
        exported = {n: p.detach() for n, p in canonical_parameters(model)[0].items()}
        rounded = rounded_to(fields.get("dtype", "float32"), found)
        measured.equal("largest difference of weights", furthest_weight(exported, rounded), 0.0)
        saved = json.loads((folder / "config.json").read_text())
        measured.equal(
            "dtype is another", (saved.get("dtype") or saved.get("torch_dtype")) != fields.get("dtype", "float32"), 0
        )
        if fields.get("dtype", "float32") == "float32":
            with torch.no_grad():
                worst = (plain_numbers(model, head, batch)[name] - found.seen[0][name]).abs().max()
            measured.at_most(f"largest difference of {name}", float(worst), lab.suite.tolerance)


def rounded_to(dtype: str, found: Driven) -> dict[str, torch.Tensor]:
    """The weights of an engine, rounded as in a file of this dtype."""
    return {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in whole_of(found).items()}


def ill_fitting(folder: Path, head: Head) -> list[str]:
    """Names that are missing, unknown or of another shape for transformers: for the class that fits the head, and for
    the one that `config.json` names."""
    import transformers

    fitting = transformers.AutoModelForCausalLM if head is Head.LM else transformers.AutoModelForTokenClassification
    faults = _ill_fitting(fitting, folder)
    for name in json.loads((folder / "config.json").read_text()).get("architectures") or ["of no name"]:
        kind: Any = getattr(transformers, name, None)
        faults += _ill_fitting(kind, folder) if kind else [f"config.json names {name!r}, which transformers lacks"]
    return faults


def _ill_fitting(kind: Any, folder: Path) -> list[str]:
    _, info = kind.from_pretrained(folder, output_loading_info=True, **LOCAL_MODEL)
    wrong = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return [f"{what} {key} of {kind.__name__}" for what in wrong for key in info[what]]


def missing_files(folder: Path) -> list[str]:
    """Files that an index of the weights lists but that do not exist."""
    named = {
        file for index in folder.glob("*.index.json") for file in json.loads(index.read_text())["weight_map"].values()
    }
    return sorted(file for file in named if not (folder / file).exists())


def settings_that_differ(source: Path, folder: Path) -> list[str]:
    """Fields that differ between two configurations."""
    mine, theirs = (json.loads((path / "config.json").read_text()) for path in (folder, source))
    return [
        name for name in sorted(mine.keys() | theirs.keys()) if name not in OWN and mine.get(name) != theirs.get(name)
    ]
