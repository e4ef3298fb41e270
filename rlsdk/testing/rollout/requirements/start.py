"""Requirements: what a start refuses, and what a started engine says of its weights and memory."""

from __future__ import annotations

from typing import Any

from rlsdk.interfaces import (
    ConfigError,
    Head,
    ModelSpec,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    Workload,
)
from rlsdk.testing.process.models import without_tensor
from rlsdk.testing.process.modes import kept_modes
from rlsdk.testing.process.resources import held, left_behind
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.suites.forecasts import differences, senseless
from rlsdk.testing.suites.requirements import Measured, requirement


class StartRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("initialize.refusals", since=(2, 0), basic=True)
    def test_initialize_refusals(self, lab: RolloutLab, measured: Measured) -> None:
        """A missing model, one whose files lack a tensor, a head other than a language model's, an unknown dtype, sizes
        below 1, an `ep_size` above the number of devices, unknown raw arguments, and several workers for an engine with
        one process are a ConfigError, change no mode of torch and leave nothing behind. An engine that was refused, or
        never initialized, can be closed, even twice."""
        absent, dtype = str(lab.folder.parent / "there-is-no-such-model"), max(lab.spec.dtypes, key="bfloat16".__eq__)
        wrong: dict[str, dict[str, Any]] = {
            "a model that is not there": {"model": ModelSpec(path=absent, dtype=dtype)},
            "max_running 0": {"max_running": 0},
            "max_model_tokens 1": {"max_model_tokens": 1},
            "tp_size 0": {"tp_size": 0},
            "pp_size 0": {"pp_size": 0},
            "dp_size 0": {"dp_size": 0},
            "ep_size 0": {"ep_size": 0},
            "ep_size 3 of one device": {"ep_size": 3},
            "an argument that there is not": {"engine_kwargs": {"there_is_no_such_argument": 1}},
            "a value head": {"model": ModelSpec(path=str(lab.folder), head=Head.VALUE)},
        }
        if lab.spec.takes_weights:
            wrong["a dtype that there is not"] = {"model": ModelSpec(path=str(lab.folder), dtype="float31")}
            lacking = without_tensor(lab.folder, lab.scratch.parent / "lacking-model")
            wrong["files that lack a tensor"] = {"model": ModelSpec(path=str(lacking), dtype=dtype)}
        if lab.spec.max_ranks == 1:
            wrong |= {f"{name} 2 of one process": {name: 2} for name in ("tp_size", "pp_size", "dp_size")}
        accepted, before = [], held(lab.scratch)
        for name, fields in wrong.items():
            engine = lab.suite.registry().load_engine(lab.spec)()
            given: dict[str, Any] = {
                "model": ModelSpec(path=str(lab.folder)),
                "options": lab.options,
                "engine_kwargs": dict(lab.suite.engine_kwargs),
                **fields,
            }
            ctx = RankContext(role="rollout", device=lab.suite.device, scratch_dir=str(lab.scratch), timeout_s=60.0)
            try:
                with kept_modes(f"initialize, refused for {name},", but="threads"):
                    engine.initialize(ctx, RolloutSpec(**given))
                accepted.append(name)
            except ConfigError:
                pass
            except Exception as error:
                accepted.append(f"{name}: {type(error).__name__}: {error}"[:300])
            finally:
                engine.close()
                engine.close()
        untouched = lab.suite.registry().load_engine(lab.spec)()
        untouched.close()
        untouched.close()
        measured.none("no ConfigError", accepted)
        measured.none("left behind by engines that were refused", left_behind(before, lab.scratch))

    @requirement("layout.place", since=(2, 0))
    def test_layout_place(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Layouts name the destination of their weights: this node, a process on it, distinct ranks, and a worker for
        all of them or none; the served dtype; and boxes only of tensors that they list."""
        layouts = changing.layout()
        measured.none("layouts of another node", [layout.node for layout in layouts if layout.node != "localhost"])
        strange = [layout.process for layout in layouts if not _is_process(layout.process)]
        measured.none("processes that are not node:pid", strange)
        devices = {"cpu", lab.suite.device} if lab.suite.device == "cpu" else {"cpu"}
        away = [
            layout.device
            for layout in layouts
            if layout.device not in devices and not layout.device.startswith("cuda:")
        ]
        measured.none("devices that there are not", away)
        measured.equal("ranks with the number of another", len({layout.rank for layout in layouts}), len(layouts))
        dtypes = {meta.dtype for layout in layouts for meta in layout.tensors}
        measured.none("dtypes other than float32", sorted(dtypes - {"float32"}))
        unknown = [name for layout in layouts for name, _ in layout.boxes
                   if name not in {meta.name for meta in layout.tensors}]  # fmt: skip
        measured.none("boxes of tensors that the layout does not name", unknown)
        tied = [name for layout in layouts for name, held in layout.tied.items()
                if held not in lab.base or name in lab.base]  # fmt: skip
        measured.none("tied names that are not", tied)
        workers = [layout.worker for layout in layouts]
        unlike = workers if None in workers and set(workers) != {None} else []
        measured.none("workers of some layouts and not of others", unlike)
        measured.equal("workers of one name", len(workers) - len(set(workers)) if None not in workers else 0, 0)
        measured.none("workers on another node", [layout.worker for layout in layouts if layout.is_apart])

    @requirement("forecast", since=(2, 0), basic=True)
    def test_forecast(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """The backend's forecast of a replica has the engine's layouts; amounts of memory are None or not negative. (A
        backend without forecasts returns None.)"""
        forecast = lab.suite.registry().load_forecast(lab.spec)
        if forecast is None:
            return measured.record("forecasts", 0)
        ctx = RankContext(role="rollout", device=lab.suite.device, scratch_dir=str(lab.scratch))
        found = forecast([ctx], lab.rollout_spec(), Workload(row_tokens=128, update_rows=0, running_rows=8))
        measured.none("fields that make no sense", senseless(found, 1))
        layouts = changing.layout()
        measured.equal("layouts", len(found.layouts[0]), len(layouts))
        for at, (said, layout) in enumerate(zip(found.layouts[0], layouts, strict=True)):
            measured.none(f"differences from layout {at}", differences(said, layout))
        return None


def _is_process(text: str) -> bool:
    node, _, pid = text.rpartition(":")
    return bool(node) and pid.isdigit()
