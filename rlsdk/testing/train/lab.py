"""Test harness for requirements of train engines: models, process groups, and comparison of results."""

from __future__ import annotations

import functools
import math
import operator
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsdk.interfaces import Capability, Head, TrainEngine
from rlsdk.testing.process.models import ROUTED_GLM, write_tiny_model
from rlsdk.testing.process.reference import LOCAL, LOCAL_MODEL
from rlsdk.testing.process.worlds import Job, Seat, World
from rlsdk.testing.suites.requirements import Measured
from rlsdk.testing.train.call_sequences import Act, exported_otherwise, play
from rlsdk.testing.train.case_runner import by_row, drive, whole
from rlsdk.testing.train.cases import Case, Driven
from rlsdk.testing.train.plain_steps import drive_plain

if TYPE_CHECKING:
    from rlsdk.testing.train.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kind of model besides the suite's own."""

    architectures: Sequence[str]
    """Architectures; the first that the backend runs is used."""
    tied: bool = False
    layers: int = 1
    shape: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    """How the checkpoint is stored: `stored` and `file_bytes` of `write_tiny_model`."""


SMALL = {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 4}
VARIANTS: Mapping[str, Variant] = {
    "tied": Variant(
        architectures=("qwen2", "llama", "qwen3"),
        tied=True,
        shape={**SMALL, "vocab_size": 131},
        files={"file_bytes": 60_000},
    ),
    "llama": Variant(
        architectures=("llama",),
        layers=3,
        shape={**SMALL, "vocab_size": 133, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-3},
        files={"stored": "bfloat16"},
    ),
    "qwen3": Variant(architectures=("qwen3",), shape={**SMALL, "num_key_value_heads": 4, "head_dim": 40}),
    "dropout": Variant(
        architectures=("qwen2", "llama", "qwen3"),
        shape={**SMALL, "attention_dropout": 0.5, "classifier_dropout": 0.5, "hidden_dropout": 0.5},
    ),
    "other": Variant(architectures=("qwen2", "llama", "qwen3"), layers=2, shape={"vocab_size": 136}),
    "capped": Variant(
        architectures=("gemma2",),
        # torch's plain attention does not cap scores, so this model does not either.
        shape={**SMALL, "final_logit_softcapping": 1.5, "attn_logit_softcapping": None, "query_pre_attn_scalar": 32},
    ),
    "llama3 positions": Variant(
        architectures=("llama", "qwen2", "qwen3"),
        shape={
            **SMALL,
            "rope_parameters": {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                **{"original_max_position_embeddings": 64, "rope_theta": 10_000.0},
            },
        },
    ),
    "yarn positions": Variant(
        architectures=("llama", "qwen2", "qwen3"),
        shape={
            **SMALL,
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                **{"rope_theta": 10_000.0},
            },
        },
    ),
    "experts": Variant(
        architectures=("qwen3_moe",),
        shape={
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "router_aux_loss_coef": 5.0},
            **SMALL,
        },
    ),
    "routed": Variant(architectures=("glm4_moe",), layers=2, shape={**SMALL, **ROUTED_GLM}),
    "windows": Variant(
        architectures=("qwen2",),
        shape={**SMALL, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    ),
    "wide": Variant(architectures=("qwen2", "llama", "qwen3"), shape={**SMALL, "vocab_size": 1031}),
    "long": Variant(architectures=("qwen2", "llama"), shape={**SMALL, "max_position_embeddings": 2048}),
}
"""Tied embeddings and a prime vocabulary size; a single key-value head, and heads whose sizes do not add up to the
hidden size; norms of queries and keys; dropout wherever a configuration allows it; another vocabulary; logits capped by
a tanh; scaled rotary positions; routers with biases; sliding windows; a vocabulary of more than a thousand tokens;
positions of long rows. The first checkpoint has several files, the second is in bfloat16."""
ATTENTIVE = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 4.0, "o_proj": 4.0}
"""Factor for a random model's weights, so that attention to distant tokens affects log-probs."""


class TrainLab:
    """One backend under test."""

    def __init__(self, suite: type[TrainSettings], folder: Path) -> None:
        self.suite, self.folder = suite, folder
        self.spec = suite.spec()
        self.options = suite.built_options()
        self.seat = Seat(
            backend=suite.backend,
            modules=tuple(module.__name__ for module in suite.modules),
            device=suite.device,
        )
        self.alone = World(1, self.seat, apart=suite.apart)
        self.several = World(suite.world, self.seat)
        self._faults: list[list[str]] = []
        """Faults of all cases that ran in the current requirement."""

    @functools.cached_property
    def model(self) -> str:
        if self.suite.model is not None:
            return self.suite.model
        return str(write_tiny_model(self.folder / "lm", seed=1))

    @functools.cached_property
    def headed_model(self) -> str:
        """A model with a saved head of one output."""
        return write_headed_model(self.model, self.folder / "headed")

    @functools.cached_property
    def attentive_model(self) -> str | None:
        """A model for long rows whose log-probs depend on attention; None: the backend cannot run its architecture."""
        if (plain := self.variant("long")) is None:
            return None
        folder = self.folder / "attentive"
        shutil.copytree(plain, folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith(".weight"):
                tensor *= ATTENTIVE.get(name.split(".")[-2], 1.0)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    @functools.cached_property
    def expert_model(self) -> str:
        """A model with four experts per layer and two experts per token."""
        if self.suite.expert_model is not None:
            return self.suite.expert_model
        experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return str(write_tiny_model(self.folder / "experts", architecture="qwen3_moe", seed=2, **experts))

    @functools.cached_property
    def can_reset(self) -> bool:
        """Whether engines implement `reset_optimizer`."""
        engine = self.suite.registry().load_engine(self.spec)
        return engine.reset_optimizer is not TrainEngine.reset_optimizer

    def variant(self, name: str, *, head: Head = Head.LM) -> str | None:
        """A model of another kind (`VARIANTS`), with a head of one output if requested; None: the backend runs none of
        its architectures."""
        made = VARIANTS[name]
        known = self.spec.architectures
        kinds = [kind for kind in made.architectures if known is None or kind in known]
        if not kinds:
            return None
        folder = self.folder / f"variant-{name}"
        if not folder.exists():
            fields = {**made.shape, **made.files}
            write_tiny_model(folder, architecture=kinds[0], tied=made.tied, seed=20, layers=made.layers, **fields)
        if head is Head.LM:
            return str(folder)
        headed = self.folder / f"variant-{name}-headed"
        return str(headed) if headed.exists() else write_headed_model(str(folder), headed)

    def case(self, **fields: Any) -> Case:
        """A case of this backend, with its options."""
        given = {"model": self.model, "options": self.options, "engine_kwargs": self.suite.engine_kwargs}
        given["tolerance"] = max(self.suite.tolerance, self.suite.step_tolerance)
        if fields.get("head", Head.LM) is not Head.LM and "model" not in fields:
            given["model"] = self.headed_model
        return Case(**{**given, **fields})

    def drive(self, **fields: Any) -> Driven:
        """Runs a case on one rank."""
        found: Driven = self.run(drive, self.case(**fields))
        return found

    def run(self, job: Job, *arguments: Any) -> Any:
        """Runs a job on one rank."""
        return self._heard(self.alone.run(job, *arguments))[0]

    def play(self, script: Sequence[Act], **fields: Any) -> Driven:
        """Runs a script on an engine with one rank."""
        found: Driven = self.run(play, self.case(**fields), script)
        return found

    def play_split(self, case: Case, script: Sequence[Act]) -> list[Driven]:
        """Runs a script on every rank of the world with several ranks."""
        return self._heard(self.several.run(play, case, script))

    def drive_split(self, case: Case) -> list[Driven]:
        """Runs a case on every rank of the world with several ranks."""
        return self._heard(self.several.run(drive, case))

    def verify(self, measured: Measured) -> None:
        """Checks the invariants of every result on the results of the requirement that has ended."""
        faults, self._faults = [fault for some in self._faults for fault in some], []
        if faults:
            measured.none("answers that are not as they should be", faults)

    def forget(self) -> None:
        """Drops the records of a requirement that failed."""
        self._faults = []

    def _heard(self, results: list[Any]) -> list[Any]:
        """Keeps the faults that scripts found until the requirement has ended."""
        for result in results:
            parts = result if isinstance(result, tuple) else (result,)
            for part in parts:
                if isinstance(part, Driven):
                    wrong = [fault for to, held in part.exported for fault in exported_otherwise(Path(to), held)]
                    self._faults.append([*part.faults, *part.apart, *wrong])
        return results

    def new_folder(self, name: str) -> Path:
        """An empty folder, whose name has characters that mean something to shells, patterns and addresses."""
        path = self.folder / f"{name} [{sum(1 for _ in self.folder.iterdir())}] 5%20#?é"
        path.mkdir()
        return path

    def close(self) -> None:
        """Does nothing: jobs close their engines, and the processes of worlds serve the next suite too."""

    def holds(
        self,
        measured: Measured,
        ranks: Sequence[Driven],
        expected: Driven,
        where: str = "",
        *,
        weights: bool = True,
    ) -> None:
        """Checks that losses, metrics, norms, outputs and (by default) weights are as expected, that all have the form
        that the interface requires, and that batches did not change."""
        behind = f", {where}" if where else ""
        measured.none(f"faults{behind}", [fault for rank in ranks for fault in rank.faults])
        off: dict[str, list[float]] = {"loss": [], "sums": [], "maxima": []}
        for rank in ranks:
            for mine, theirs in zip(rank.results, expected.results, strict=True):
                # A sum of hundreds of values has limited precision, and processors round differently.
                off["loss"].append(abs(mine.loss - theirs.loss) / max(1.0, abs(theirs.loss)))
                off["sums"].append(_furthest(mine.sums, theirs.sums))
                off["maxima"].append(_furthest(mine.maxima, theirs.maxima))
        for name, values in off.items():
            measured.at_most(f"largest difference of {name}{behind}", largest(values), self.suite.step_tolerance)
        norms = [abs(a - b) / (b or 1.0) for rank in ranks for a, b in zip(rank.norms, expected.norms, strict=True)]
        measured.at_most(f"gradient norm, relative{behind}", largest(norms), self.suite.step_tolerance)
        if weights:
            worst_weight = furthest_weight(whole(ranks), whole_of(expected))
            measured.at_most(f"largest difference of weights{behind}", worst_weight, self.suite.step_tolerance)
        for name in expected.outputs:
            measured.at_most(
                f"largest difference of {name}{behind}", furthest_output(ranks, expected, name), self.suite.tolerance
            )

    def lives(self, measured: Measured, ranks: Sequence[Driven], expected: Driven, where: str = "") -> None:
        """As `holds`, for scripts: rates, skipped steps and the outputs between steps are also as expected."""
        self.holds(measured, ranks, expected, where)
        behind = f", {where}" if where else ""
        for rank in ranks:
            measured.equal(f"steps skipped otherwise{behind}", sum(map(operator.ne, rank.skipped, expected.skipped)), 0)
            mine, right = ((*run.lrs, *run.rates_of_skips) for run in (rank, expected))
            off = [abs(a - b) / (b or 1.0) for a, b in zip(mine, right, strict=True)]
            measured.at_most(f"learning rate, relative{behind}", largest(off), 1e-6)
        worst: dict[str, float] = {}
        for at in range(len(expected.seen)):
            plain, seen = seen_at(expected, at), [seen_at(rank, at) for rank in ranks]
            for name in plain.outputs:
                worst[name] = max(worst.get(name, 0.0), furthest_output(seen, plain, name))
        for name, value in worst.items():
            measured.at_most(f"largest difference of {name} between steps{behind}", value, self.suite.tolerance)

    def holds_to_plain(
        self, measured: Measured, ranks: Sequence[Driven], case: Case, where: str = "", *, weights: bool = True
    ) -> Driven:
        """As `holds`, compared with plain torch; returns its run."""
        expected = drive_plain(replace(case, load=None, save=None, export=None))
        self.holds(measured, ranks, expected, where, weights=weights)
        return expected


def whole_of(driven: Driven) -> dict[str, Tensor]:
    """Tensors of a run that has every tensor whole."""
    return {name: tensor.float() for name, _, tensor in driven.shards} if driven.layout is None else whole([driven])


def furthest_weight(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of any element; infinite if names, shapes or coverage differ."""
    if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in theirs.items()}:
        return math.inf
    worst = max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)
    return worst if math.isfinite(worst) else math.inf


def furthest_output(ranks: Sequence[Driven], expected: Driven, name: str) -> float:
    """Largest difference of an output, row by row; infinite if rows are missing or have another length."""
    mine, theirs = by_row(ranks, name), by_row([expected], name)
    if mine.keys() != theirs.keys() or any(mine[row].shape != theirs[row].shape for row in theirs):
        return math.inf
    worst = max(float((mine[row] - theirs[row]).abs().max()) for row in theirs)
    return worst if math.isfinite(worst) else math.inf


def seen_at(rank: Driven, at: int) -> Driven:
    """The results of a rank, with the outputs of the script's call `at` of `forward`."""
    return replace(rank, outputs=rank.seen[at], row_ids=rank.seen_rows[at][0], lengths=rank.seen_rows[at][1])


def _furthest(mine: Any, theirs: Any) -> float:
    if mine.keys() != theirs.keys():
        return math.inf
    return largest([abs(mine[name] - theirs[name]) for name in theirs])


def largest(differences: Sequence[float]) -> float:
    """The largest difference; infinite if one is NaN, which `max` may pass over; 0 without any."""
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def claimed_heads(lab: TrainLab) -> list[tuple[Head, str]]:
    """Claimed heads with one output, and the name of this output."""
    known = ((Capability.VALUE_HEAD, Head.VALUE, "values"), (Capability.SCORE_HEAD, Head.SCORE, "scores"))
    return [(head, name) for capability, head, name in known if capability in lab.spec.capabilities]


def write_headed_model(source: str, folder: Path) -> str:
    """Writes the same model with a saved random head of one output."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(source, **LOCAL)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForTokenClassification.from_pretrained(
            source, config=config, dtype=torch.float32, **LOCAL_MODEL
        )
        for parameter in model.score.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return str(folder)
