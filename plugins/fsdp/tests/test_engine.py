"""The same numbers as one process of plain torch, for every split, cut and form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import Case, drive, run_world, spec_of

from rlsdk.interfaces import Box, ConfigError, RankContext
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.models import write_tiny_model

EXACT = 1e-5
"""float32, relative to the largest number compared, but to 1 at least."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, str]:
    return {
        "plain": str(write_tiny_model(folder / "plain", seed=1)),
        "tied": str(write_tiny_model(folder / "tied", tied=True, seed=2, architecture="llama")),
        "qwen3": str(write_tiny_model(folder / "qwen3", seed=3, architecture="qwen3", vocab_size=131)),
    }


@pytest.fixture(scope="session")
def cases(models: dict[str, str], folder: Path) -> dict[int, list[Case]]:
    plain = models["plain"]
    for name in ("saved", "export"):
        (folder / name).mkdir()
    two = [
        Case("all rows", plain, save=str(folder / "saved"), export=str(folder / "export")),
        Case("micro 1", plain, rows=1),
        Case("micro 3", plain, rows=3),
        Case("tied", models["tied"]),
        Case("odd vocabulary", models["qwen3"]),
        Case("accumulate", plain, calls=2),
        Case("recompute", plain, checkpointing=True),
        Case("lonely", plain, lonely=True, rows=2),
        Case("cpu offload", plain, offload=True),
        Case("bfloat16", plain, dtype="bfloat16"),
        Case("random", plain, random=True),
        Case("value", plain, head="value", rows=3),
        Case("score", plain, head="score", rows=3),
        Case("uneven copies", plain, replicate=3),
    ]
    four = [
        Case("all rows", plain),
        Case("hybrid", plain, replicate=2, rows=3),
        Case("resumed", plain, load=str(folder / "saved")),
    ]
    return {2: two, 4: four, 1: [Case("all rows", plain), Case("resumed", plain, load=str(folder / "saved"))]}


@pytest.fixture(scope="session")
def results(cases: dict[int, list[Case]], folder: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    return {
        (world, name): ranks for world in (2, 4, 1) for name, ranks in run_world(world, cases[world], folder).items()
    }


def reference(case: Case) -> dict[str, Any]:
    """What one process of the built-in engine makes of the same rows."""
    engine = TorchTrainEngine()
    engine.initialize(RankContext(role="actor"), spec_of(case))
    return drive(engine, replace(case, save=None, export=None), 0, 1)


def whole(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every tensor, put together from the ranks' shards; each element must come from somebody."""
    shapes = {meta.name: meta.shape for meta in ranks[0]["layout"].tensors}
    out = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for rank in ranks:
        for name, box, tensor in rank["shards"]:
            out[name][box.slices(Box.whole(shapes[name]))] = tensor
    assert not any(tensor.isnan().any() for tensor in out.values())
    return out


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1.0)


PARITY = [
    *((2, name) for name in ("all rows", "micro 1", "micro 3", "tied", "odd vocabulary", "accumulate", "recompute")),
    *((2, name) for name in ("lonely", "cpu offload", "random", "value", "score")),
    (4, "all rows"),
    (4, "hybrid"),
    (1, "all rows"),
]


@pytest.mark.parametrize(("world", "name"), PARITY)
def test_losses_gradient_norms_and_parameters_equal_one_process(
    world: int, name: str, cases: dict[int, list[Case]], results: dict[tuple[int, str], list[dict[str, Any]]]
) -> None:
    case = next(case for case in cases[world] if case.name == name)
    ranks = results[world, name]
    assert "error" not in ranks[0], ranks[0].get("trace")
    expected = reference(case)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for mine, theirs in zip(rank["sums"], expected["sums"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    parameters = whole(ranks)
    for key, _, tensor in expected["shards"]:
        assert_close(parameters[key], tensor, EXACT)
    starts = expected["lengths"].cumsum(0) - expected["lengths"]
    place = {int(row): at for at, row in enumerate(expected["row_ids"])}
    for rank in ranks:
        at = 0
        for row, length in zip(rank["row_ids"].tolist(), rank["lengths"].tolist(), strict=True):
            start = int(starts[place[row]])
            if case.head != "score":
                assert_close(rank["outputs"][at : at + length], expected["outputs"][start : start + length], 4e-6)
            at += length
        if case.head == "score":
            rows = [place[row] for row in rank["row_ids"].tolist()]
            assert_close(rank["outputs"], expected["outputs"][rows], 4e-6)


def test_bfloat16_stays_near_float32(results: dict[tuple[int, str], list[dict[str, Any]]]) -> None:
    low, high = results[2, "bfloat16"][0], results[2, "all rows"][0]
    assert "error" not in low, low.get("trace")
    assert low["norms"] == pytest.approx(high["norms"], rel=0.05)
    assert_close(low["outputs"], high["outputs"], 0.05)
    assert low["outputs"].dtype is torch.float32
    assert not torch.equal(low["outputs"], high["outputs"])


def test_a_checkpoint_of_two_ranks_goes_on_at_one_and_at_four(
    results: dict[tuple[int, str], list[dict[str, Any]]], models: dict[str, str], folder: Path
) -> None:
    """Saved after the first step: the first step of a resumed engine is trained on the first batch again, so it is held
    against an engine that never stopped and saw the same three batches."""
    engine = TorchTrainEngine()
    case = Case("uninterrupted", models["plain"])
    engine.initialize(RankContext(role="actor"), spec_of(case))
    first = drive_once(engine)
    again = drive(engine, case, 0, 1)
    assert first > 0
    for world in (1, 4):
        ranks = results[world, "resumed"]
        assert "error" not in ranks[0], ranks[0].get("trace")
        assert ranks[0]["norms"] == pytest.approx(again["norms"], rel=1e-4)
        parameters = whole(ranks)
        for key, _, tensor in again["shards"]:
            assert_close(parameters[key], tensor, EXACT)


def drive_once(engine: TorchTrainEngine) -> float:
    from worlds import OBJECTIVES

    from rlsdk.testing.models import random_batch

    engine.forward_backward(random_batch(11, seed=10), OBJECTIVES["log_probs"])
    return engine.optim_step().grad_norm


def test_nothing_on_disk_is_a_pickle(results: dict[tuple[int, str], list[dict[str, Any]]], folder: Path) -> None:
    assert results
    names = sorted(path.suffix for path in (folder / "saved").iterdir())
    assert names == [".json", ".json", ".safetensors", ".safetensors"]


def test_an_export_is_read_by_transformers_bit_for_bit(
    results: dict[tuple[int, str], list[dict[str, Any]]], folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    expected = whole(results[2, "all rows"])
    model = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    state = model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_every_rank_holds_a_part_and_tied_weights_are_held_once(
    results: dict[tuple[int, str], list[dict[str, Any]]],
) -> None:
    for rank in results[2, "tied"]:
        layout = rank["layout"]
        assert set(layout.tied) | set(layout.tied.values()) == {"lm_head.weight", "model.embed_tokens.weight"}
        assert len({name for name, _ in layout.boxes}) == len(layout.tensors)
    sizes = [sum(box.numel for _, box in rank["layout"].boxes) for rank in results[4, "all rows"]]
    assert max(sizes) < 0.3 * sum(sizes)


def test_copies_that_do_not_divide_are_refused_with_what_would(
    results: dict[tuple[int, str], list[dict[str, Any]]],
) -> None:
    error = results[2, "uneven copies"][0]["error"]
    assert isinstance(error, ConfigError)
    assert "replicate_size: 3 does not divide the 2 ranks" in str(error)
    assert "[1, 2]" in str(error)


def test_the_entry_module_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, rlsdk_fsdp.plugin, rlsdk_fsdp.config; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
