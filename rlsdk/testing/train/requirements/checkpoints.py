"""Requirements: training continues exactly from a checkpoint, whatever the state of the engine that loads it."""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlsdk.interfaces import Capability, CheckpointError, Head
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import (
    Act,
    export_alone,
    learn,
    load,
    look,
    offload,
    onload,
    play,
    read,
    refused,
    reset,
    save,
    step,
)
from rlsdk.testing.train.cases import EVERYTHING, OPTIM, SETTINGS, Case, Driven, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab, claimed_heads, furthest_weight, whole_of
from rlsdk.testing.train.plain_engine import PlainTrainEngine
from rlsdk.testing.train.random_life import plainly
from rlsdk.testing.train.requirements.settings import script_of, three_batches

PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""First bytes of pickles and of torch's archives."""
MANY_STEPS = 259
"""An odd number of steps that 8 bits cannot count."""
LONG_MEMORY = replace(OPTIM, betas=(0.9, 0.999), lr=1e-5)
"""Betas whose bias corrections still differ between two steps after that many steps; steps so small that gradients
hardly change."""
STEP_ROUNDING = 5e-4
"""Largest relative difference of the length of such a step by rounding; a count that is one step off makes 1.8e-3."""
OTHERWISE = replace(OPTIM, lr=3 * EVERYTHING.lr, betas=(0.5, 0.6), weight_decay=0.0, max_grad_norm=None)
"""Settings that differ from `EVERYTHING` in all that an optimizer may save."""
LATE_S = 0.5
"""Seconds after `save_checkpoint` in which a thread of the engine might still write."""


class CheckpointRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("checkpoint.settings", since=(2, 0))
    def test_checkpoint_settings(self, lab: TrainLab, measured: Measured) -> None:
        """With other betas, eps, decay, clipping and schedule a checkpoint of any step continues exactly; in an engine
        with other settings than those of the engine that saved, it continues with its own."""
        for name, at in (("short memory", 2), ("strong decay", 1), ("all at once", 1), ("all at once", 2)):
            self._goes_on(lab, measured, at, f"{name}, saved after step {at}", optim=SETTINGS[name])
        folder, batches = lab.new_folder("settings"), three_batches()
        before, after = [*script_of(batches[:2]), save(folder)], [load(folder), *script_of(batches[2:])]
        saving, loading = (lab.case(optim=optim) for optim in (OTHERWISE, EVERYTHING))
        lab.run(play, saving, before)
        plainly(saving, before)
        lab.lives(measured, [lab.run(play, loading, after)], plainly(loading, after), "saved with other settings")

    @requirement("checkpoint.many_steps", since=(2, 0))
    def test_checkpoint_many_steps(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint of many steps continues exactly, and the next step is as large as plain torch's: the step count
        is counted and saved completely, however large."""
        folder, batch = lab.new_folder("many"), rows_of((3,), seed=9)
        many = [act for _ in range(MANY_STEPS) for act in (learn(batch), step)]
        went_on = lab.play([*many, save(folder), learn(batch), step], optim=LONG_MEMORY)
        before, resumed = (
            lab.play(script, optim=LONG_MEMORY) for script in ([load(folder)], [load(folder), *many[:2]])
        )
        off = furthest_weight(whole_of(resumed), whole_of(went_on))
        measured.equal("largest difference of weights", off, 0.0)
        plain = PlainTrainEngine(lab.case(optim=LONG_MEMORY))
        for _ in range(MANY_STEPS):
            plain.forward_backward(batch, Weighted())
            plain.optim_step()
        start = {name: parameter.detach().clone() for name, parameter in plain.parameters.items()}
        plain.forward_backward(batch, Weighted())
        plain.optim_step()
        ratio = _distance(whole_of(resumed), whole_of(before)) / _distance(plain.parameters, start)
        measured.at_most("relative difference of the last step", abs(ratio - 1), STEP_ROUNDING)

    @requirement("checkpoint.first", since=(2, 0))
    def test_checkpoint_first(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint of step 0 loads into a new engine and into a trained one: moments and schedule start again."""
        folder, batches = lab.new_folder("first"), three_batches()
        expected = lab.play([save(folder), *script_of(batches)], optim=EVERYTHING)
        trained = [*script_of(three_batches(seed=110)), learn(batches[2]), load(folder), *script_of(batches)]
        self._equal(lab, measured, lab.play([load(folder), *script_of(batches)], optim=EVERYTHING), expected, "new")
        self._equal(lab, measured, lab.play(trained, optim=EVERYTHING), expected, "trained")

    @requirement("checkpoint.into_trained", since=(2, 0))
    def test_checkpoint_into_trained(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint that is loaded into a trained engine, with gradients of an unfinished step, replaces all of its
        state; an older checkpoint loads as well as a newer one; and what is saved then is what was loaded."""
        old, new, batches = lab.new_folder("old"), lab.new_folder("new"), three_batches()
        saving = [learn(batches[0]), step, save(old), learn(batches[1]), step, save(new), learn(batches[2]), step]
        expected = lab.play(saving, optim=EVERYTHING)
        other = [*script_of(three_batches(seed=120)), learn(batches[0])]
        back = [*other, load(new), learn(batches[1]), load(old), *script_of(batches[1:])]
        self._equal(lab, measured, lab.play(back, optim=EVERYTHING), expected, "the older after the newer")
        again = [*other, load(old), learn(batches[2]), step, load(new), *script_of(batches[2:])]
        self._equal(lab, measured, lab.play(again, optim=EVERYTHING), expected, "the newer after the older")
        # As many steps as the checkpoint that it saved last, but not the same ones.
        saved, copied = lab.new_folder("as many"), lab.new_folder("copied")
        lab.play([learn(batches[2]), step, save(saved), load(old), save(copied)], optim=EVERYTHING)
        shutil.rmtree(saved)
        found = lab.play([load(copied), *script_of(batches[1:])], optim=EVERYTHING)
        self._equal(lab, measured, found, expected, "of another run, saved again")

    @requirement("checkpoint.heads", needs=Capability.VALUE_HEAD, since=(2, 0))
    def test_checkpoint_heads(self, lab: TrainLab, measured: Measured) -> None:
        """A value model's checkpoint contains its head and the head's moments."""
        self._goes_on(lab, measured, 2, "value head", head=Head.VALUE, objective=Weighted(("values",)))

    @requirement("checkpoint.tied", since=(2, 0))
    def test_checkpoint_tied(self, lab: TrainLab, measured: Measured) -> None:
        """A model with tied embeddings continues exactly."""
        if (model := lab.variant("tied")) is None:
            return measured.record("models tried", 0)
        self._goes_on(lab, measured, 2, "tied", model=model)

    @requirement("checkpoint.bfloat16", since=(2, 0))
    def test_checkpoint_bfloat16(self, lab: TrainLab, measured: Measured) -> None:
        """With training in bfloat16, a checkpoint has the float32 master weights, not their rounded copy."""
        if "bfloat16" not in lab.spec.dtypes:
            return measured.record("dtypes tried", 0)
        self._goes_on(lab, measured, 2, "bfloat16", dtype="bfloat16", optim=replace(OPTIM, lr=1e-4, eps=1e-8))

    @requirement("checkpoint.other_model", since=(2, 0))
    def test_checkpoint_other_model(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint of a model with other shapes, another head or tied embeddings is a CheckpointError; the engine
        continues unaffected."""
        batches = three_batches()
        expected = lab.play(script_of(batches), optim=EVERYTHING)
        fields: dict[str, dict[str, Any]] = {n: {"model": lab.variant(n)} for n in ("other", "tied") if lab.variant(n)}
        if Capability.VALUE_HEAD in lab.spec.capabilities:
            fields["value head"] = {"head": Head.VALUE, "objective": Weighted(("values",))}
        measured.record("models tried", len(fields))
        for name, given in fields.items():
            folder = lab.new_folder("strange")
            objective = given.pop("objective", None)
            lab.play([learn(batches[0], objective), step, save(folder)], **given)
            asked = refused(f"a checkpoint of another model, {name}", load(folder), CheckpointError)
            script = [*script_of(batches[:1]), asked, *script_of(batches[1:2]), asked, *script_of(batches[2:])]
            found = lab.play(script, optim=EVERYTHING)
            measured.none("faults", found.faults)
            self._equal(lab, measured, found, expected, name)

    @requirement("checkpoint.missing_file", since=(2, 0))
    def test_checkpoint_missing_file(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint that lacks a file, has an empty file, or a safetensors file that lacks a tensor, is a
        CheckpointError; the engine continues unaffected."""
        folder, batches = lab.new_folder("whole"), three_batches()
        expected = lab.play(script_of(batches), optim=EVERYTHING)
        lab.play([*script_of(batches[:1]), save(folder)], optim=EVERYTHING)
        asked = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            for name, damage in (("missing", Path.unlink), ("empty", lambda path: path.write_bytes(b""))):
                copy = lab.new_folder("hurt") / "checkpoint"
                shutil.copytree(folder, copy)
                damage(copy / file.relative_to(folder))
                asked.append(refused(f"{file.name} {name}", load(copy), CheckpointError))
        for file in sorted(folder.rglob("*.safetensors")):
            for name in some_names(file):
                copy = lab.new_folder("hurt") / "checkpoint"
                shutil.copytree(folder, copy)
                drop_tensor(copy / file.relative_to(folder), name)
                asked.append(refused(f"{file.name} without {name}", load(copy), CheckpointError))
        found = lab.play([*script_of(batches[:2]), *asked, *script_of(batches[2:])], optim=EVERYTHING)
        measured.none("faults", found.faults)
        self._equal(lab, measured, found, expected, "after refusals")

    @requirement("checkpoint.folder", since=(2, 0))
    def test_checkpoint_folder(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint is on disk when `save_checkpoint` returns, may be moved, contains no pickle, and does not change
        while an engine that loaded it trains; saving does not affect the engine."""
        late = lab.run(written_late, lab.case(steps=[[three_batches()[0]]]), str(lab.new_folder("late")))
        measured.none("files that were written after `save_checkpoint` returned", late)
        folder, batches = lab.new_folder("before"), three_batches()
        expected = lab.play(script_of(batches))
        unused = save(lab.new_folder("unused"))
        saving = lab.play([unused, *script_of(batches[:2]), save(folder), *script_of(batches[2:])])
        self._equal(lab, measured, saving, expected, "saved on the way")
        moved = folder.rename(folder.with_name("moved"))
        files = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
        measured.none("pickles", [path.name for path, held in files.items() if held.startswith(PICKLE)])
        again = lab.play([load(moved), *script_of(batches[2:])])
        self._equal(lab, measured, again, expected, "moved")
        changed = [path.name for path, held in files.items() if path.read_bytes() != held]
        measured.none("files that changed meanwhile", changed)

    @requirement("checkpoint.random_state", since=(2, 0))
    def test_checkpoint_random_state(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint restores the state of torch's random generators."""
        folder = str(lab.new_folder("random"))
        first, second = lab.run(drawn_after_load, lab.case(), folder)
        measured.equal("largest difference of numbers drawn", float((first - second).abs().max()), 0.0)

    @requirement("random_state", since=(2, 0), basic=True)
    def test_random_state(self, lab: TrainLab, measured: Measured) -> None:
        """An engine neither depends on nor advances the process's random generators: torch's, numpy's and Python's; in
        no call, and whatever it was built from (random weights, a new head, a frozen model, recomputation)."""
        kinds: dict[str, dict[str, Any]] = {"random weights": {"random": True, "checkpointing": True}}
        kinds |= {f"a new head of {name}": {"head": head, "model": lab.model} for head, name in claimed_heads(lab)[:1]}
        for name, fields in {**kinds, "frozen": {"optim": None}}.items():
            moved, _ = lab.run(in_random_state, lab.case(**fields), _calls(lab, fields), 3)
            measured.none(f"generators that were moved on, {name}", moved)
        case, script = lab.case(rows=2), _calls(lab, {})
        found = [lab.run(in_random_state, case, script, seed) for seed in (1, 2)]
        for moved, _ in found:
            measured.none("generators that were moved on", moved)
        lab.holds(measured, [found[0][1]], found[1][1])
        measured.equal("weights", furthest_weight(whole_of(found[0][1]), whole_of(found[1][1])), 0.0)

    def _goes_on(self, lab: TrainLab, measured: Measured, at: int, where: str, **fields: Any) -> None:
        """Checks that three steps, interrupted by a save and a load, equal those of an uninterrupted engine."""
        folder, batches = lab.new_folder("going"), three_batches()
        objective = fields.pop("objective", None)
        script: list[Act] = [act for batch in batches for act in (learn(batch, objective), step)]
        on = lab.play([*script[: 2 * at], save(folder), *script[2 * at :]], **fields)
        self._equal(lab, measured, lab.play([load(folder), *script[2 * at :]], **fields), on, where)

    def _equal(self, lab: TrainLab, measured: Measured, mine: Driven, theirs: Driven, where: str) -> None:
        """Checks that weights, norms and rates of the last steps are equal, bit for bit."""
        worst = furthest_weight(whole_of(mine), whole_of(theirs))
        measured.equal(f"largest difference of weights, {where}", worst, 0.0)
        for name in ("norms", "lrs"):
            pairs = zip(reversed(getattr(mine, name)), reversed(getattr(theirs, name)), strict=False)
            last = list(pairs)[: min(len(mine.norms), 1)]
            measured.equal(
                f"difference of the last of {name}, {where}", max((abs(a - b) for a, b in last), default=0), 0
            )


def _distance(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """2-norm of the difference of all weights."""
    return math.sqrt(
        sum(float((mine[name].detach().double() - theirs[name].double()).square().sum()) for name in theirs)
    )


def some_names(file: Path) -> list[str]:
    """Names of tensors in a safetensors file: the first, the last, and some between them, of any kind."""
    with safe_open(file, framework="pt") as opened:
        names = sorted(opened.keys())
    return list(dict.fromkeys(names[at * (len(names) - 1) // 4] for at in range(5))) if names else []


def drop_tensor(file: Path, name: str) -> None:
    """Rewrites a safetensors file without one of its tensors."""
    with safe_open(file, framework="pt") as opened:
        kept = {other: opened.get_tensor(other) for other in opened.keys() if other != name}  # noqa: SIM118 - no dict
        metadata = opened.metadata()
    file.unlink()  # may be a link to the complete file
    save_file(kept, file, metadata=metadata)


def written_late(seat: Seat, case: Case, folder: str) -> list[str]:
    """Files of a checkpoint that appeared or changed after `save_checkpoint` returned."""

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

    engine = seat.start(case.spec)
    try:
        engine.forward_backward(case.steps[0][0], case.objective)
        engine.optim_step()
        engine.save_checkpoint(Path(folder))
        before = files()
        time.sleep(LATE_S)
        after = files()
    finally:
        engine.close()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def drawn_after_load(seat: Seat, case: Case, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers after a save, and after loading it."""
    state = torch.get_rng_state()
    engine = seat.start(case.spec)
    try:
        torch.manual_seed(77)
        engine.save_checkpoint(Path(folder))
        first = torch.rand(8)
        torch.rand(100)
        engine.load_checkpoint(Path(folder))
        return first, torch.rand(8)
    finally:
        engine.close()
        torch.set_rng_state(state)


def _calls(lab: TrainLab, fields: Mapping[str, Any]) -> list[Act]:
    """Calls of all methods except `load_checkpoint`, for a case with these fields."""
    names = {Head.VALUE: "values", Head.SCORE: "scores"}
    name, claimed = names.get(fields.get("head", Head.LM), "log_probs"), lab.spec.capabilities
    script: list[Act] = [look(rows_of((5, 9), seed=1), name), read]
    if fields.get("optim", OPTIM) is not None:
        script += [act for batch in three_batches() for act in (learn(batch, Weighted((name,))), step)]
        script.append(save(lab.new_folder("state")))
        script += [reset(EVERYTHING)] if lab.can_reset else []
    script += [export_alone(lab.new_folder("state"))] if Capability.EXPORT in claimed else []
    return [*script, offload(*TRAIN_PARTS), onload(*TRAIN_PARTS)] if Capability.OFFLOAD in claimed else script


def in_random_state(seat: Seat, case: Case, script: Sequence[Act], seed: int) -> tuple[list[str], Driven]:
    """Plays a script after seeding the generators with `seed`."""
    import numpy

    def states() -> dict[str, Any]:
        known: Any = numpy.random.get_state()
        return {
            "torch": torch.get_rng_state().tolist(),
            "random": random.getstate(),
            "numpy": (known[1].tolist(), known[2]),
        }

    before = states()
    held = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        before = states()
        found = play(seat, case, script)
        after = states()
        return [name for name, state in before.items() if state != after[name]], found
    finally:
        torch.set_rng_state(held[0])
        random.setstate(held[1])
        numpy.random.set_state(held[2])
