"""Sequences of calls to a train engine, for requirements on the order of calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsdk.interfaces import Batch, Box, RlsdkError, TrainEngine
from rlsdk.testing.process.modes import torch_modes
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.train.case_runner import record_final_state, share, unchanged, wrong_outputs, wrong_types
from rlsdk.testing.train.cases import Case, Driven, Weighted
from rlsdk.testing.train.comparison import compared

SYNC_WAITS_S = 10.0
"""Seconds that a half-finished sync waits for a checkpoint, which takes far less time."""

Act = Callable[[TrainEngine, Driven], None]
"""One call, picklable; it records the call's results."""


def play(seat: Seat, case: Case, script: Sequence[Act]) -> Driven:
    """Runs a script on an engine of the case, then records what `case_runner.drive` records after its steps. A call
    that leaves a mode of torch changed for the rest of the process is a fault."""
    started, different = seat.start(case.spec), list[str]()
    try:
        engine = compared(started, case, different)
        with torch.enable_grad():  # restored afterwards, even if an engine leaves it changed
            found = Driven(collects=engine.parallel.is_collector)
            for act in script:
                before = torch_modes()
                act(engine, found)
                found.faults += [f"{name} is left {value} by {_name(act)}" for name, value in torch_modes() - before]
            record_final_state(engine, case, found)
        found.apart += different
        return found
    finally:
        started.close()


def _name(act: Act) -> str:
    function = getattr(act, "func", act)
    method = getattr(act, "args", ())[:1] if function is _call else ()
    return str(*method) if method else function.__name__.lstrip("_")


def learn(batch: Batch, objective: Any = None, *, lonely: bool = False) -> Act:
    """`forward_backward` on this rank's rows."""
    return partial(_learn, batch, objective or Weighted(), lonely)


def learn_nothing(batch: Batch, objective: Any = None) -> Act:
    """`forward_backward` without rows: its loss must be 0. It is not one of the results."""
    return partial(_learn_nothing, batch.select([]), objective or Weighted())


def look(batch: Batch, *names: str) -> Act:
    """`forward`; the outputs are appended to `Driven.seen`."""
    return partial(_look, batch, names)


def export_alone(folder: Path | str) -> Act:
    """`save_pretrained`; nobody reads what it wrote."""
    return partial(_call, "save_pretrained", (Path(folder),))


def look_twice(batch: Batch, *names: str) -> Act:
    """`forward` of the same rows twice, and of other tokens that the caller writes into the same memory. The caller
    writes into the first outputs, too."""
    return partial(_look_twice, batch, names)


def save(folder: Path | str) -> Act:
    return partial(_call, "save_checkpoint", (Path(folder),))


def save_in_a_sync(folder: Path | str) -> Act:
    """`save_checkpoint` while another thread is half-way through `shards`."""
    return partial(_save_in_a_sync, Path(folder))


def load(folder: Path | str) -> Act:
    return partial(_call, "load_checkpoint", (Path(folder),))


def export(folder: Path | str) -> Act:
    """`save_pretrained`; what one rank alone wrote must be the weights that it holds."""
    return partial(_export, Path(folder))


def rewrite(folder: Path | str) -> Act:
    """Writes other weights into the model's folder, as the export of a later policy does."""
    return partial(_rewrite, Path(folder))


def aside(*acts: Act) -> Act:
    """Calls whose results do not count, only the faults that they find."""
    return partial(_aside, acts)


def offload(*parts: str) -> Act:
    return partial(_call, "offload", (parts,))


def onload(*parts: str) -> Act:
    return partial(_call, "onload", (parts,))


def reset(optim: object) -> Act:
    return partial(_call, "reset_optimizer", (optim,))


def refused(what: str, act: Act, error: type[Exception] = RlsdkError) -> Act:
    """The act must raise this error; otherwise it is a fault."""
    return partial(_refused, what, act, error)


def step(engine: TrainEngine, found: Driven) -> None:
    """`optim_step`."""
    result = engine.optim_step()
    found.faults += wrong_types(result)
    found.norms.append(result.grad_norm)
    found.lrs.append(result.lr)
    found.skipped.append(result.skipped)


def skip(engine: TrainEngine, found: Driven) -> None:
    """`optim_step` with a gradient that is not finite; it does not count as a step."""
    result = engine.optim_step()
    found.faults += wrong_types(result)
    found.rates_of_skips.append(result.lr)
    if not result.skipped:
        found.faults.append("a step with a gradient that is not finite was not skipped")
    elif math.isfinite(result.grad_norm):
        found.faults.append(f"the norm of a skipped step is {result.grad_norm}, which is finite")


def read(engine: TrainEngine, found: Driven) -> None:
    """`layout` and `shards`, beside one iteration that stopped early and one at the same time; the layout must not have
    changed."""
    layout, early = engine.layout(), engine.shards()
    next(early, None)
    if [(a.name, b.name) for a, b in zip(engine.shards(), engine.shards(), strict=False)] != [
        (name, name) for name, _ in layout.boxes
    ]:
        found.faults.append("two iterations of shards at once do not each yield them all")
    held = []
    for shard in engine.shards():
        held.append((shard.name, shard.box))
        if not torch.is_grad_enabled():
            found.faults.append("between two shards its caller records no gradients")
    if held != [tuple(box) for box in layout.boxes]:
        found.faults.append("shards are not those of the layout, in its order")
    if found.layout is not None and layout != found.layout:
        found.faults.append("the layout changed")
    found.layout = layout


def see_layout(engine: TrainEngine, found: Driven) -> None:
    """`layout` alone, which needs nothing on the device; it must not have changed."""
    layout = engine.layout()
    if found.layout is not None and layout != found.layout:
        found.faults.append("the layout changed")
    found.layout = layout


def _aside(acts: Sequence[Act], engine: TrainEngine, found: Driven) -> None:
    scratch = Driven(collects=found.collects, layout=found.layout)
    for act in acts:
        act(engine, scratch)
    found.faults += scratch.faults


def _learn(batch: Batch, objective: Any, lonely: bool, engine: TrainEngine, found: Driven) -> None:
    mine = share(engine, batch, lonely=lonely)
    with unchanged(mine, found):
        result = engine.forward_backward(mine, objective)
    found.results.append(result)
    found.faults += wrong_types(result)


def _learn_nothing(batch: Batch, objective: Any, engine: TrainEngine, found: Driven) -> None:
    result = engine.forward_backward(batch, objective)
    found.faults += wrong_types(result)
    found.faults += [f"the loss of no rows is {result.loss}"] if result.loss != 0.0 else []


def _look(batch: Batch, names: Sequence[str], engine: TrainEngine, found: Driven) -> None:
    mine = share(engine, batch)
    with unchanged(mine, found):
        outputs = engine.forward(mine, asked := list(names))
    found.faults += [] if asked == list(names) else ["the caller's list of outputs was changed"]
    found.seen.append(outputs)
    found.seen_rows.append((mine["row_id"].tolist(), mine.lengths.tolist()))
    found.faults += wrong_outputs(engine, mine, names, outputs)


def _look_twice(batch: Batch, names: Sequence[str], engine: TrainEngine, found: Driven) -> None:
    ids = batch["input_ids"].clone()
    mine = batch.with_tokens(input_ids=ids)
    _look(mine, names, engine, found)
    first = found.seen[-1]
    found.seen[-1] = {name: values.clone() for name, values in first.items()}
    for values in first.values():
        values.fill_(math.nan)
    _look(mine, names, engine, found)
    ids.copy_(ids.flip(0))
    _look(mine, names, engine, found)


def _call(method: str, arguments: Sequence[Any], engine: TrainEngine, found: Driven) -> None:
    getattr(engine, method)(*arguments)


def _export(folder: Path, engine: TrainEngine, found: Driven) -> None:
    engine.save_pretrained(folder)
    place = engine.parallel
    if max(place.dp_size, place.tp_size, place.pp_size, place.cp_size) > 1:
        # Other ranks may still be writing: `train_lab` compares once all have returned.
        held = [(shard.name, shard.box, shard.tensor.detach().cpu().clone()) for shard in engine.shards()]
        found.exported.append((str(folder), held))
        return
    found.faults += exported_otherwise(folder, [(shard.name, shard.box, shard.tensor) for shard in engine.shards()])


def exported_otherwise(folder: Path, held: Sequence[tuple[str, Box, Tensor]]) -> list[str]:
    """Boxes whose values in an export are not those that were held."""
    written = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    faults = []
    for name, box, tensor in held:
        whole = written.get(name)
        mine = None if whole is None else whole[box.slices(Box.whole(tuple(whole.shape)))]
        if mine is None or not torch.equal(mine, tensor.detach().to("cpu", mine.dtype)):
            faults.append(f"{name} {box} was exported with other values, or not at all")
    return faults


def _rewrite(folder: Path, engine: TrainEngine, found: Driven) -> None:
    for file in folder.glob("*.safetensors"):
        doubled = {name: 2 * tensor for name, tensor in load_file(file).items()}
        save_file(doubled, file.with_suffix(".new"), metadata={"format": "pt"})
        file.with_suffix(".new").replace(file)


def _save_in_a_sync(folder: Path, engine: TrainEngine, found: Driven) -> None:
    half, saved = threading.Event(), threading.Event()
    waited = []

    def sync() -> None:
        for at, _ in enumerate(engine.shards()):
            if at == 0:
                half.set()
                waited.append(saved.wait(SYNC_WAITS_S))

    thread = threading.Thread(target=sync)
    thread.start()
    half.wait(SYNC_WAITS_S)
    try:
        engine.save_checkpoint(folder)
    finally:
        saved.set()
        thread.join()
    if waited != [True]:
        found.faults.append("a checkpoint was written only when the sync that was half way had gone on")


def _refused(what: str, act: Act, error: type[Exception], engine: TrainEngine, found: Driven) -> None:
    try:
        act(engine, found)
    except error:
        return
    found.faults.append(f"{what} was accepted")
