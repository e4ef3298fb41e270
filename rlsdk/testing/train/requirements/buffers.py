"""Requirements: persistent buffers, such as the biases of routers, are served and exported with the weights; they are
not trained, and keep their own dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsdk.interfaces import Capability, ConfigError, Head
from rlsdk.kit.model.hf import dtype_names, persistent_buffers
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, export_alone, learn, play, step
from rlsdk.testing.train.cases import OPTIM, Case, Driven, rows_of
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.plain_steps import plain_model_of
from rlsdk.testing.train.requirements.exports import ill_fitting
from rlsdk.testing.train.requirements.ranks import data_case

LENGTHS = (9, 1, 17, 4)


class BufferRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("model.buffers", since=(2, 0))
    def test_model_buffers(self, lab: TrainLab, measured: Measured) -> None:
        """With a model whose routers have biases (persistent buffers), in float32 and bfloat16, trained and frozen:
        `layout`, `shards` and exports have them in their own dtype, with the checkpoint's values. A model may be
        refused with a ConfigError."""
        _keeps_buffers(lab, measured, lab.case(), lambda case, script: [lab.run(play, case, script)])

    @requirement("ranks.buffers", needs=Capability.DATA_PARALLEL, since=(2, 0))
    def test_ranks_buffers(self, lab: TrainLab, measured: Measured) -> None:
        """As on one rank, `layout`, `shards` and exports of several ranks have a model's persistent buffers."""
        _keeps_buffers(lab, measured, data_case(lab, steps=()), lab.play_split)


def _keeps_buffers(
    lab: TrainLab, measured: Measured, case: Case, run: Callable[[Case, Sequence[Act]], list[Driven]]
) -> None:
    """Checks the buffers of every kind of engine, in what it holds and in what it exports after a step."""
    if (model := lab.variant("routed")) is None:
        return measured.record("models tried", 0)
    expected = {
        name: tensor.clone() for name, tensor in persistent_buffers(plain_model_of(replace(case, model=model))).items()
    }
    for dtype in sorted({"float32", "bfloat16"} & lab.spec.dtypes):
        for optim in (OPTIM, None):
            name, folder = f"{dtype}{'' if optim else ', frozen'}", lab.new_folder("buffers")
            script: list[Act] = [learn(rows_of(LENGTHS, seed=140)), step] if optim else []
            if Capability.EXPORT in lab.spec.capabilities:
                script.append(export_alone(folder))
            try:
                ranks = run(replace(case, model=model, dtype=dtype, optim=optim, rows=2), script)
            except ConfigError:
                measured.record(f"models tried, {name}", 0)
                continue
            held = [{n: tensor for n, _, tensor in rank.shards} for rank in ranks]
            measured.none(f"buffers that no rank holds, {name}", [n for n in expected if not any(n in h for h in held)])
            kinds = {meta.name: meta.dtype for rank in ranks if rank.layout for meta in rank.layout.tensors}
            for rank in held:
                _are_equal(measured, {n: t for n, t in rank.items() if n in expected}, expected, kinds, f"held, {name}")
            if Capability.EXPORT in lab.spec.capabilities:
                written = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
                measured.none(f"buffers that are not exported, {name}", sorted(expected.keys() - written.keys()))
                _are_equal(measured, {n: written[n] for n in expected}, expected, {}, f"exported, {name}")
                measured.none(
                    f"tensors that transformers finds missing or strange, {name}", ill_fitting(folder, Head.LM)
                )
    return None


def _are_equal(
    measured: Measured, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], kinds: Mapping[str, str], name: str
) -> None:
    """Checks values and dtypes of buffers."""
    right = dtype_names(expected)
    wrong = [n for n, dtype in dtype_names(found).items() if {dtype, kinds.get(n, dtype)} != {right[n]}]
    measured.none(f"buffers of another dtype, {name}", wrong)
    measured.none(
        f"buffers with other values, {name}", [n for n, t in found.items() if not torch.equal(t, expected[n])]
    )
