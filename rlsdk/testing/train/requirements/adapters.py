"""Requirements: with an adapter, only it is trained; the model without it is exact, and all weights are served with it.

The reference is plain transformers whose weights are computed as `W + scale * B A`: no adapter library is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsdk.interfaces import (
    AdapterSpec,
    Batch,
    Box,
    Capability,
    CheckpointError,
    ForwardBackwardResult,
    TrainEngine,
    WeightPart,
)
from rlsdk.kit.files.adapter_config import CONFIG, WEIGHTS
from rlsdk.testing.process.reference import load_plain_model, plain_outputs
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, export_alone, learn, load, look, play, refused, save, step
from rlsdk.testing.train.case_runner import share, whole
from rlsdk.testing.train.cases import OPTIM, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, furthest_output, furthest_weight, seen_at, whole_of
from rlsdk.testing.train.requirements.ranks import data_case

ADAPTER = AdapterSpec(rank=3, alpha=4.5, targets=("q_proj", "down_proj"))
ROWS = rows_of((9, 1, 17, 4), seed=3)
PROBE = (ROWS, ("log_probs",))
BATCHES = tuple(rows_of((8, 3, 12, 5, 7), seed=seed) for seed in (60, 61))


class AdapterRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("adapter.steps", needs=Capability.LORA, since=(2, 1), basic=True)
    def test_adapter_steps(self, lab: TrainLab, measured: Measured) -> None:
        """Started from an adapter in PEFT's format, log-probs, losses, gradient norms and the shards after two steps
        are those of a model with the weights `W + scale * B A`, of which only A and B are trained; all other weights
        stay as they were, bit for bit."""
        case = _case(lab)
        found = lab.run(play, case, _steps())
        lab.holds(measured, [found], plain_steps(case))
        frozen = {n: t for n, t in whole_of(found).items() if not _is_target(n)}
        plain = dict(load_plain_model(case.model).named_parameters())
        moved = [name for name, tensor in frozen.items() if not torch.equal(tensor, plain[name].detach())]
        measured.none("frozen weights that moved", moved)

    @requirement("adapter.off", needs=Capability.LORA, since=(2, 1))
    def test_adapter_off(self, lab: TrainLab, measured: Measured) -> None:
        """`forward_reference` is bit-equal to a model that never had an adapter: asked first of all, after a step, and
        between a gradient and its step, which it does not change."""
        base = lab.play([look(ROWS, "log_probs")], optim=None)
        script = [refer(ROWS), learn(BATCHES[0]), refer(ROWS), step, refer(ROWS), learn(BATCHES[1]), step]
        found, expected = lab.run(play, _case(lab), script), lab.run(play, _case(lab), _steps())
        for at, when in enumerate(("first", "before a step", "after it")):
            off = furthest_output([seen_at(found, at)], seen_at(base, 0), "log_probs")
            measured.equal(f"largest difference to the model without an adapter, {when}", off, 0.0)
        measured.equal("difference of norms", float(found.norms != expected.norms), 0.0)
        own = furthest_weight(whole_of(found), whole_of(expected))
        measured.equal("largest difference of weights", own, 0.0)

    @requirement("adapter.kept", needs=Capability.LORA, since=(2, 1))
    def test_adapter_kept(self, lab: TrainLab, measured: Measured) -> None:
        """After `keep_reference`, `forward_reference` stays the policy of that moment, bit for bit, also in an engine
        that loads a later checkpoint."""
        folder = lab.new_folder("kept")
        script = [learn(BATCHES[0]), step, look(ROWS, "log_probs"), keep, learn(BATCHES[1]), step, refer(ROWS),
                  look(ROWS, "log_probs"), save(folder)]  # fmt: skip
        found = lab.run(play, _case(lab), script)
        again = lab.run(play, _case(lab), [load(folder), refer(ROWS), look(ROWS, "log_probs")])
        then, kept, now = (seen_at(found, at) for at in range(3))
        measured.equal("difference to the kept policy", furthest_output([kept], then, "log_probs"), 0.0)
        measured.at_least("difference to the policy of now", furthest_output([kept], now, "log_probs"), 1e-4)
        for at, (name, wanted) in enumerate((("kept", then), ("own", now))):
            off = furthest_output([seen_at(again, at)], wanted, "log_probs")
            measured.equal(f"difference after loading, {name}", off, 0.0)

    @requirement("adapter.checkpoint", needs=Capability.LORA, since=(2, 1))
    def test_adapter_checkpoint(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint continues with equal numbers, and is much smaller than the model; a model with other frozen
        weights, another scale or no adapter refuses it (CheckpointError) and stays as it was."""
        folder, case = lab.new_folder("checkpoint"), _case(lab)
        whole = lab.run(play, case, [learn(BATCHES[0]), step, save(folder), learn(BATCHES[1]), step])
        again = lab.run(play, case, [load(folder), learn(BATCHES[1]), step])
        measured.equal("difference of weights", furthest_weight(whole_of(again), whole_of(whole)), 0.0)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        model = sum(file.stat().st_size for file in Path(case.model).glob("*.safetensors"))
        measured.at_most("size of the checkpoint, of the model's", size / model, 0.5)
        others = {"scale": replace(case, adapter=_started(lab, replace(ADAPTER, alpha=9.0)))}
        others["no adapter"] = replace(case, adapter=None)
        others["other weights"] = replace(case, model=_other_weights(lab))
        for name, wrong in others.items():
            act = refused(f"a checkpoint of an adapter, loaded with {name}", load(folder), CheckpointError)
            before, after = (lab.run(play, wrong, script) for script in ([], [act]))
            measured.none(f"faults, {name}", after.faults)
            measured.equal(
                f"moved by a refused checkpoint, {name}", furthest_weight(*map(whole_of, (after, before))), 0
            )

    @requirement("adapter.export", needs=Capability.LORA, since=(2, 1))
    def test_adapter_export(self, lab: TrainLab, measured: Measured) -> None:
        """`save_pretrained` writes an adapter in PEFT's format that a new engine starts from with the same weights;
        with `export: merged`, a model whose weights are the shards."""
        one, other, case = lab.new_folder("adapter"), lab.new_folder("merged"), _case(lab)
        assert case.adapter is not None
        found = lab.run(play, case, [*_steps(), export_alone(one)])
        begun = lab.run(play, replace(case, adapter=replace(case.adapter, path=str(one))), [])
        measured.equal(
            "difference of an engine that starts from it", furthest_weight(*map(whole_of, (begun, found))), 0
        )
        merging = replace(case, adapter=replace(case.adapter, export="merged"))
        lab.run(play, merging, [*_steps(), export_alone(other)])
        written = {n: p.detach() for n, p in load_plain_model(str(other)).named_parameters()}
        shards = {name: tensor for name, tensor in whole_of(found).items() if name in written}
        measured.equal("difference of the merged export", furthest_weight(shards, written), 0.0)

    @requirement("adapter.parts", needs=Capability.ADAPTER_SYNC, since=(2, 1))
    def test_adapter_parts(self, lab: TrainLab, measured: Measured) -> None:
        """After two steps, the part of the weights below the adapter is the model that it was loaded from, bit for bit,
        and the part of the adapter is A and B in float32, with which these weights are the shards."""
        case = _case(lab)
        found = lab.run(play, case, [*_steps(), look_at_parts])
        _check_parts(measured, case, [found], whole_of(found))

    @requirement("ranks.adapter_parts", needs=Capability.DATA_PARALLEL, since=(2, 1))
    def test_ranks_adapter_parts(self, lab: TrainLab, measured: Measured) -> None:
        """As `adapter.parts`, joined from the boxes of several ranks."""
        if Capability.ADAPTER_SYNC not in lab.spec.capabilities:
            return measured.record("adapters tried", 0)
        case = replace(data_case(lab, steps=(), probe=PROBE), adapter=_started(lab, ADAPTER), witness=False)
        ranks = lab.play_split(case, [*_steps(), look_at_parts])
        _check_parts(measured, case, ranks, whole(ranks))
        return None

    @requirement("ranks.adapter", needs=Capability.DATA_PARALLEL, since=(2, 1))
    def test_ranks_adapter(self, lab: TrainLab, measured: Measured) -> None:
        """As `adapter.steps`, with several ranks."""
        if Capability.LORA not in lab.spec.capabilities:
            return measured.record("adapters tried", 0)
        case = replace(data_case(lab, steps=(), probe=PROBE), adapter=_started(lab, ADAPTER), witness=False)
        ranks = lab.play_split(case, _steps())
        lab.holds(measured, ranks, plain_steps(case))
        return None


def _steps() -> list[Act]:
    return [act for batch in BATCHES for act in (learn(batch), step)]


def refer(batch: Batch) -> Act:
    """`forward_reference`; its log-probs are appended to `Driven.seen`."""
    return partial(_refer, batch)


def _refer(batch: Batch, engine: TrainEngine, found: Driven) -> None:
    mine = share(engine, batch)
    found.seen.append(engine.forward_reference(mine, ("log_probs",)))
    found.seen_rows.append((mine["row_id"].tolist(), mine.lengths.tolist()))


def keep(engine: TrainEngine, found: Driven) -> None:
    """`keep_reference`."""
    engine.keep_reference()


def look_at_parts(engine: TrainEngine, found: Driven) -> None:
    """`part_layout` and `part_shards` of both parts."""
    for part in WeightPart:
        layout, shards = engine.part_layout(part), list(engine.part_shards(part))
        if [(shard.name, shard.box) for shard in shards] != list(layout.boxes):
            found.faults.append(f"shards of the part {part.value!r} are not in the order of its layout")
        found.parts[part] = layout, [(shard.name, shard.box, shard.tensor.detach().clone()) for shard in shards]


def _check_parts(measured: Measured, case: Case, ranks: Sequence[Driven], served: Mapping[str, Tensor]) -> None:
    """Checks what `look_at_parts` found on all ranks against the shards."""
    assert case.adapter is not None
    measured.none("faults", [fault for rank in ranks for fault in rank.faults])
    base, low = (
        whole([replace(rank, layout=rank.parts[part][0], shards=rank.parts[part][1]) for rank in ranks])
        for part in (WeightPart.BASE, WeightPart.ADAPTER)
    )
    plain = {name: p.detach() for name, p in load_plain_model(case.model).named_parameters()}
    measured.equal(
        "moved below the adapter", furthest_weight({n: base.get(n, t * 0) for n, t in plain.items()}, plain), 0
    )
    kinds = {meta.dtype for rank in ranks for meta in rank.parts[WeightPart.ADAPTER][0].tensors}
    measured.none("dtypes of the adapter", sorted(kinds - {"float32"}))
    targets = {name.removesuffix(".weight") for name in plain if _is_target(name)}
    wanted = {f"{name}.lora_{kind}.weight" for name in targets for kind in "AB"}
    measured.none("tensors of the adapter that differ by name", sorted(low.keys() ^ wanted))
    made = dict(plain)
    for name in targets:
        a, b = (low[f"{name}.lora_{kind}.weight"] for kind in "AB")
        made[f"{name}.weight"] = plain[f"{name}.weight"] + case.adapter.scale * b @ a
    measured.at_most("difference of the shards", furthest_weight({n: served[n] for n in made}, made), case.tolerance)


def _case(lab: TrainLab) -> Case:
    return lab.case(adapter=_started(lab, ADAPTER), witness=False, probe=PROBE)


def _is_target(name: str) -> bool:
    return name.endswith(tuple(f".{target}.weight" for target in ADAPTER.targets))


def _started(lab: TrainLab, spec: AdapterSpec) -> AdapterSpec:
    """The adapter with a folder in PEFT's format to start from, whose A and B are random."""
    folder = lab.folder / f"adapter-{spec.alpha:g}"
    if not folder.exists():
        folder.mkdir()
        generator, tensors = torch.Generator().manual_seed(8), dict[str, Tensor]()
        for name, weight in load_plain_model(lab.model).named_parameters():
            if _is_target(name):
                stem, (out, inner) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
                tensors[f"{stem}.lora_A.weight"] = torch.randn(spec.rank, inner, generator=generator) * 0.1
                tensors[f"{stem}.lora_B.weight"] = torch.randn(out, spec.rank, generator=generator) * 0.1
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = {"peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.alpha, "bias": "none", "rank_pattern": {},
                  "alpha_pattern": {}, "target_modules": list(spec.targets), "task_type": "CAUSAL_LM"}  # fmt: skip
        (folder / CONFIG).write_text(json.dumps(config))
    return replace(spec, path=str(folder))


def _other_weights(lab: TrainLab) -> str:
    """The model with another last norm."""
    folder = lab.folder / "other weights"
    if not folder.exists():
        shutil.copytree(lab.model, folder)
        file = folder / "model.safetensors"
        tensors = {name: t * 1.01 if name == "model.norm.weight" else t for name, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def plain_steps(case: Case) -> Driven:
    """The steps of `_steps` by plain transformers, of which only A and B are trained."""
    assert case.adapter is not None
    model = load_plain_model(case.model).requires_grad_(False)
    weights, scale = dict(model.named_parameters()), case.adapter.scale
    low = {name: tensor.requires_grad_() for name, tensor in load_file(Path(case.adapter.path or "") / WEIGHTS).items()}
    optimizer = torch.optim.AdamW(
        low.values(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay, foreach=False
    )

    def served() -> dict[str, Tensor]:
        made = dict(weights)
        for name in filter(_is_target, weights):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            made[name] = weights[name] + scale * low[f"{stem}.lora_B.weight"] @ low[f"{stem}.lora_A.weight"]
        return made

    def outputs(batch: Batch) -> Mapping[str, Tensor]:
        made = served()
        found = plain_outputs(lambda ids: torch.func.functional_call(model, made, (ids,)), batch)
        return {"log_probs": found["log_probs"]}

    found = Driven()
    for batch in BATCHES:
        result = Weighted()(outputs(batch), batch)
        result.loss.backward()  # type: ignore[no-untyped-call]
        sums = {name: float(value) for name, value in result.sums.items()}
        maxima = {name: float(value) for name, value in result.maxima.items()}
        found.results.append(ForwardBackwardResult(loss=float(result.loss.detach()), sums=sums, maxima=maxima))
        found.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in low.values() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.outputs = {"log_probs": outputs(ROWS)["log_probs"]}
        found.shards = [(name, Box.whole(tuple(t.shape)), t.detach().clone()) for name, t in served().items()]
    found.row_ids, found.lengths = ROWS["row_id"].tolist(), ROWS.lengths.tolist()
    return found
