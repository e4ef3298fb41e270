"""Requirements: models other than the default one: tied, other families, dropout, bfloat16, recomputation."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from rlsdk.interfaces import Capability, ConfigError, Head
from rlsdk.kit.model.hf import canonical_parameters
from rlsdk.testing.process.models import add_code, code_ran
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, export, learn, look, step
from rlsdk.testing.train.case_runner import drive, whole
from rlsdk.testing.train.cases import OPTIM, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, claimed_heads, furthest_weight, whole_of
from rlsdk.testing.train.plain_steps import drive_plain, plain_model_of

LENGTHS = (7, 1, 19, 2, 12, 5)
TENSOR_TOLERANCE = 5e-4
"""Largest relative difference of one tensor's gradient: float32 gives 1e-5, rounding to bfloat16 2e-3."""
TINY_STEPS = replace(OPTIM, lr=1e-4, eps=1e-8, weight_decay=0.0)
"""Learning rate: a step is about a quarter of the bfloat16 spacing at the size of these weights."""
NUM_TINY_STEPS = 24
PARTS: Mapping[str, Callable[[str], bool]] = {
    "matrices": lambda name: "norm" not in name and not name.endswith(".bias"),
    "norms": lambda name: "norm" in name,
    "the last layer": lambda name: name.startswith(("lm_head.", "score.")),
}
"""Parts of a model, by names of tensors."""
LINEAR = replace(OPTIM, lr=1e3, eps=1e3, betas=(0.0, 0.0), weight_decay=0.0)
"""Adam with an eps far above every gradient: a step is proportional to the gradient."""

LONG_ROW = 1200
"""Number of tokens after which a rotary frequency that is rounded to bfloat16 is off by one radian."""
NUM_EQUAL = 96
"""Number of rows whose gradients are summed: a sum in bfloat16 is then off by some percent."""


def probe_of(head: Head = Head.LM) -> Any:
    return rows_of(LENGTHS, seed=3), {Head.LM: ("log_probs",), Head.VALUE: ("values",), Head.SCORE: ("scores",)}[head]


def steps_of(number: int = 2, *, masked: bool = False, temperature: float = 1.0) -> list[list[Any]]:
    """Steps with one call each, over rows of unequal length."""
    return [[rows_of(LENGTHS, seed=70 + at, masked=masked, temperature=temperature)] for at in range(number)]


class ModelRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("model.bfloat16_forward", since=(2, 0))
    def test_bfloat16_forward(self, lab: TrainLab, measured: Measured) -> None:
        """In bfloat16, a trained engine computes with the weights that it would export, including norms, biases, a head
        and tied embeddings: a new engine from its export gives the same outputs."""
        if "bfloat16" not in lab.spec.dtypes or Capability.EXPORT not in lab.spec.capabilities:
            return measured.record("dtypes tried", 0)
        batch, optim = rows_of((30, 12, 1, 5), seed=120), replace(OPTIM, lr=0.05, weight_decay=0.0)
        for kind, (name, fields) in kinds_of(lab).items():
            folder, asked = lab.new_folder("rounded"), look(batch, name)
            learning = [learn(rows_of((9, 4, 17), seed=121 + at), Weighted((name,))) for at in range(3)]
            script: list[Act] = [act for one in learning for act in (one, step)]
            trained = lab.play([*script, asked, export(folder)], dtype="bfloat16", optim=optim, **fields)
            anew = lab.play([asked], dtype="bfloat16", **{**fields, "model": str(folder)})
            off = float((trained.seen[0][name] - anew.seen[0][name]).abs().max())
            measured.at_most(f"largest difference of {name}{kind}", off, lab.suite.tolerance)
        return None

    @requirement("model.tied", since=(2, 0), basic=True)
    def test_model_tied(self, lab: TrainLab, measured: Measured) -> None:
        """A model with tied embeddings has this tensor once, with the gradient of both uses, and `layout` has its other
        name."""
        found = self._like_plain(lab, measured, "tied")
        if found is not None and found.layout is not None:
            measured.equal("other names", len(found.layout.tied), 1)
            measured.none(
                "of tensors that are not in the layout",
                sorted(set(found.layout.tied.values()) - {meta.name for meta in found.layout.tensors}),
            )

    @requirement("model.families", since=(2, 0), basic=True)
    def test_model_families(self, lab: TrainLab, measured: Measured) -> None:
        """For other architectures, shapes of heads and sizes of vocabulary, outputs and two steps are those of plain
        torch."""
        for name in ("llama", "qwen3"):
            self._like_plain(lab, measured, name)

    @requirement("model.dropout", since=(2, 0))
    def test_model_dropout(self, lab: TrainLab, measured: Measured) -> None:
        """Dropout in a model's configuration is disabled in every pass: log-probs of a batch do not differ between
        calls, and gradients are those without dropout."""
        for checkpointing in (False, True):
            self._like_plain(lab, measured, "dropout", checkpointing=checkpointing)

    @requirement("model.dropout_head", needs=Capability.VALUE_HEAD, since=(2, 0))
    def test_model_dropout_head(self, lab: TrainLab, measured: Measured) -> None:
        """Dropout before a head is disabled."""
        objective = Weighted(("values",))
        self._like_plain(lab, measured, "dropout", head=Head.VALUE, objective=objective, checkpointing=True)

    @requirement("model.recomputed", since=(2, 0))
    def test_model_recomputed(self, lab: TrainLab, measured: Measured) -> None:
        """`activation_checkpointing` does not change outputs and gradients: with mask, temperature and entropy, with a
        head, and in bfloat16."""
        claimed, both = lab.spec.capabilities, ("log_probs", "entropy")
        steps = steps_of(masked=True, temperature=0.6)
        cases = {"masked": lab.case(steps=steps, checkpointing=True, probe=probe_of(), rows=2)}
        if Capability.ENTROPY in claimed:
            cases["entropy"] = lab.case(steps=steps, checkpointing=True, objective=Weighted(both))
        if Capability.VALUE_HEAD in claimed:
            fields: dict[str, Any] = {"head": Head.VALUE, "objective": Weighted(("values",))}
            cases["values"] = lab.case(steps=steps_of(1), checkpointing=True, **fields)
        for name, case in cases.items():
            lab.holds_to_plain(measured, [lab.run(drive, case)], case, name)
        if "bfloat16" in lab.spec.dtypes:
            fields = {"steps": steps[:1], "dtype": "bfloat16", "optim": LINEAR}
            start = whole([lab.play([], dtype="bfloat16")])
            plain, again = (moved(lab.drive(**fields, checkpointing=asked), start) for asked in (False, True))
            off = float((again - plain).norm() / plain.norm())
            measured.at_most("difference of the gradient, relative, bfloat16", off, 0.02)

    @requirement("model.initial", since=(2, 0))
    def test_model_initial(self, lab: TrainLab, measured: Measured) -> None:
        """An engine starts from the weights of the checkpoint, bit for bit; with `init_from_config` from random weights
        that depend only on `RankContext.seed`."""
        torch.manual_seed(1)
        found = lab.play([])
        measured.equal(
            "largest difference from the checkpoint", furthest_weight(whole_of(found), plain_weights(lab)), 0
        )
        drawn = [lab.play([], random=True)]
        torch.manual_seed(2)
        drawn.append(lab.play([], random=True))
        same = furthest_weight(whole_of(drawn[0]), whole_of(drawn[1]))
        measured.equal("largest difference of two random starts of one seed", same, 0)
        measured.at_least(
            "largest difference from the checkpoint", furthest_weight(whole_of(drawn[0]), plain_weights(lab)), 0.01
        )

    @requirement("model.bfloat16", since=(2, 0), basic=True)
    def test_model_bfloat16(self, lab: TrainLab, measured: Measured) -> None:
        """In bfloat16, outputs are close to those of float32, softmax and entropy are computed in float32, and outputs
        of heads are float32."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        batch, names = rows_of((40, 3, 25, 60), seed=4), ("log_probs",)
        found = lab.play([look(batch, *names)], dtype="bfloat16").seen[0]["log_probs"]
        exact = lab.play([look(batch, *names)]).seen[0]["log_probs"]
        said = batch.position_ids > 0
        measured.at_most("mean difference from float32", float((found - exact)[said].abs().mean()), 0.05)
        rounded = found[said].bfloat16().float() == found[said]
        measured.at_most("share of log-probs that are bfloat16 numbers", float(rounded.float().mean()), 0.3)
        for head, name in claimed_heads(lab):
            headed = lab.play([look(batch, name)], dtype="bfloat16", head=head)
            measured.none(f"faults, {name}", headed.faults)

    @requirement("model.bfloat16_positions", since=(2, 0))
    def test_model_bfloat16_positions(self, lab: TrainLab, measured: Measured) -> None:
        """In bfloat16, late tokens of a long row are as close to float32 as early ones: positions and rotary
        frequencies are not rounded with the weights, even in a frozen model."""
        if "bfloat16" not in lab.spec.dtypes or (model := lab.attentive_model) is None:
            return measured.record("models tried", 0)
        looking = look(rows_of((LONG_ROW,), seed=8), "log_probs")
        exact = lab.play([looking], model=model).seen[0]["log_probs"]
        for name, optim in (("trained", OPTIM), ("frozen", None)):
            rounded = lab.play([looking], model=model, dtype="bfloat16", optim=optim).seen[0]["log_probs"]
            off = (rounded - exact).abs()
            share = float(off[LONG_ROW // 2 :].mean() / off[1 : LONG_ROW // 8].mean())
            measured.at_most(f"difference of late tokens, as a multiple of that of early ones, {name}", share, 2.5)
        return None

    @requirement("model.code", since=(2, 0))
    def test_model_code(self, lab: TrainLab, measured: Measured) -> None:
        """Code in a model's folder is not run, because it was not allowed. The model is read as usual, or refused with
        a ConfigError."""
        if (plain := lab.variant("llama") or lab.variant("tied")) is None:
            return measured.record("models tried", 0)
        folder = lab.new_folder("coded") / "model"
        shutil.copytree(plain, folder)
        add_code(folder)
        asked = look(rows_of((7, 3), seed=4), "log_probs")
        with suppress(ConfigError):
            lab.play([asked, export(folder.with_name("export"))] if exports(lab) else [asked], model=str(folder))
        measured.equal("code of the model was run", code_ran(folder).exists(), 0)
        return None

    @requirement("model.small_steps", since=(2, 0))
    def test_model_small_steps(self, lab: TrainLab, measured: Measured) -> None:
        """With training in bfloat16, steps too small for bfloat16 accumulate: master weights are float32, including
        those of a head and of norms."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        batch = rows_of(LENGTHS, seed=5)
        heads = [(head, name) for head, name in claimed_heads(lab) if head is Head.VALUE]
        for head, name in [(Head.LM, "log_probs"), *heads]:
            script = [act for _ in range(NUM_TINY_STEPS) for act in (learn(batch, Weighted((name,))), step)]
            movement: dict[str, dict[str, torch.Tensor]] = {}
            moved: dict[str, torch.Tensor] = {}
            for dtype in ("bfloat16", "float32"):
                fields: dict[str, Any] = {"dtype": dtype, "optim": TINY_STEPS, "head": head}
                before, after = whole([lab.play([], **fields)]), whole([lab.play(script, **fields)])
                movement[dtype] = {n: (after[n] - before[n]).flatten() for n in sorted(after)}
                moved = moved or after
            # All steps together are below the bfloat16 spacing at 1, the value of norms: an engine whose shards are
            # bfloat16 copies of its float32 weights does not show how norms move.
            rounded = all(torch.equal(t, t.bfloat16().float()) for n, t in moved.items() if PARTS["matrices"](n))
            for part, is_meant in PARTS.items():
                names = [n for n in movement["float32"] if is_meant(n)]
                if not names or (rounded and part == "norms"):
                    continue
                mine, right = (torch.cat([movement[dtype][n] for n in names]) for dtype in ("bfloat16", "float32"))
                # Signs of gradients near 0 differ between the dtypes, and Adam makes full steps of them.
                along = float(mine @ right / right.norm() ** 2)
                measured.at_least(f"movement of {part}, as a share of that in float32, {name}", along, 0.6)
                measured.at_most(f"movement of {part}, as a share of that in float32, {name}", along, 1.4)

    @requirement("model.accumulated", since=(2, 0))
    def test_model_accumulated(self, lab: TrainLab, measured: Measured) -> None:
        """With training in bfloat16, gradients of many micro-batches are summed in float32."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        one = rows_of((6,), seed=6)
        many = one.select([0] * NUM_EQUAL)
        many = replace(many, rows={**many.rows, "row_id": torch.arange(NUM_EQUAL)})
        # Equal rows: the sum is the gradient of one, multiplied by their number.
        once = one.with_tokens(loss_weight=one["loss_weight"] * NUM_EQUAL)
        fields: dict[str, Any] = {"dtype": "bfloat16", "optim": LINEAR, "rows": 1}
        start = whole([lab.play([], **fields)])
        right = moved(lab.play([learn(once), step], **fields), start)
        for name, calls in (("micro-batches", [learn(many)]), ("calls", [learn(one)] * NUM_EQUAL)):
            worst = float((moved(lab.play([*calls, step], **fields), start) - right).norm() / right.norm())
            measured.at_most(f"difference of {NUM_EQUAL} equal {name} from one so many times, relative", worst, 0.02)

    @requirement("gradient.tensors", since=(2, 0))
    def test_gradient_tensors(self, lab: TrainLab, measured: Measured) -> None:
        """The gradient of every tensor is that of plain autograd, relative to its own size."""
        case = lab.case(steps=[[rows_of(LENGTHS, seed=6), rows_of((3, 40), seed=7)]], optim=LINEAR, rows=2)
        measured.at_most(
            "gradient of a tensor, relative", worst_tensor(lab, case, [lab.run(drive, case)]), TENSOR_TOLERANCE
        )

    def _like_plain(self, lab: TrainLab, measured: Measured, variant: str, **fields: Any) -> Driven | None:
        head = fields.get("head", Head.LM)
        model = lab.variant(variant, head=head)
        if model is None:
            measured.record(f"models tried, {variant}", 0)
            return None
        case = lab.case(model=model, steps=steps_of(), probe=probe_of(head), **fields)
        found: Driven = lab.run(drive, case)
        where = f"{variant}, recomputed" if case.checkpointing else variant
        lab.holds_to_plain(measured, [found], case, where)
        return found


def exports(lab: TrainLab) -> bool:
    """Whether the backend claims exports."""
    return Capability.EXPORT in lab.spec.capabilities


def kinds_of(lab: TrainLab) -> dict[str, tuple[str, dict[str, Any]]]:
    """Kinds of models, by a description for reports, with an output of each and fields of a case: the suite's model,
    one with tied embeddings, and those with claimed heads."""
    found: dict[str, tuple[str, dict[str, Any]]] = {"": ("log_probs", {})}
    if (tied := lab.variant("tied")) is not None:
        found[", tied"] = "log_probs", {"model": tied}
    return found | {f", head {head.value}": (name, {"head": head}) for head, name in claimed_heads(lab)}


def moved(found: Driven, start: dict[str, torch.Tensor]) -> torch.Tensor:
    """Change of all weights, as one vector."""
    after = whole([found])
    return torch.cat([(after[name] - start[name]).flatten() for name in sorted(start)])


def worst_tensor(lab: TrainLab, case: Case, ranks: list[Driven]) -> float:
    """Largest relative difference of a tensor's change from plain torch's, for a case with one `LINEAR` step."""
    start, expected, found = plain_weights(lab), whole_of(drive_plain(case)), whole(ranks)
    if found.keys() != expected.keys():
        return math.inf
    sizes = {name: (expected[name] - start[name]).norm() for name in start}
    # The gradient of key biases is only rounding: they do not affect a softmax.
    floor = 1e-4 * max(sizes.values())
    return max(float((found[n] - expected[n]).norm() / max(size, floor)) for n, size in sizes.items())


def plain_weights(lab: TrainLab) -> dict[str, torch.Tensor]:
    """Weights of the suite's model, as in its files."""
    return {name: p.detach() for name, p in canonical_parameters(plain_model_of(lab.case()))[0].items()}
