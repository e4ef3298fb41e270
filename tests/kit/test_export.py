"""A model folder that is written sharded and streamed: which rank writes what, and how much is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlsdk.kit.files import export
from rlsdk.kit.files.export import ExportedTensor, in_dtype, plan_files, write_model

MIB = 1 << 20


class Config(SimpleNamespace):
    """Stands for a model's configuration."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"dtype": str(self.dtype)}))


def config() -> Any:
    return Config(dtype=None)


def tensors_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[ExportedTensor]:
    return [ExportedTensor(name=f"t{at}", shape=(size,), dtype=dtype) for at, size in enumerate(sizes)]


def value_of(tensor: ExportedTensor) -> Tensor:
    seed = int(tensor.name[1:])
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)


def growth_of(work: Callable[[], None]) -> int:
    """Bytes by which this process's memory was larger at its peak than before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) << 10


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 300))
def test_every_tensor_is_in_one_file_and_no_file_is_larger_than_it_must_be(
    sizes: list[int], world: int, limit: int
) -> None:
    tensors = tensors_of(*sizes)
    files = plan_files(tensors, world, max_bytes=limit)
    assert sorted(tensor.name for file in files for tensor in file.tensors) == sorted(t.name for t in tensors)
    assert all(len(f.tensors) == 1 or sum(t.num_bytes for t in f.tensors) <= limit for f in files)
    assert all(0 <= file.writer < world for file in files)
    assert len({file.name for file in files}) == len(files)
    if len(files) >= world:
        assert {file.writer for file in files} == set(range(world)), "nobody is idle"


def test_writers_stand_on_different_nodes_and_are_not_a_thousand() -> None:
    writers = [file.writer for file in plan_files(tensors_of(*[1] * 5000), 1024, max_bytes=4)]
    assert sorted(set(writers)) == list(range(0, 1024, 32))


def write_as_ranks(folder: Path, tensors: list[ExportedTensor], world: int) -> list[list[str]]:
    """Every rank in turn: nothing is exchanged, since each is given its tensors; returns what each was given."""
    given: list[list[str]] = [[] for _ in range(world)]
    asked: list[list[tuple[str, int]]] = [[] for _ in range(world)]
    for rank in range(world):

        def fetch(tensor: ExportedTensor, writer: int, rank: int = rank) -> Tensor | None:
            asked[rank].append((tensor.name, writer))
            if writer != rank:
                return None
            given[rank].append(tensor.name)
            return value_of(tensor)

        write_model(folder, config(), tensors, fetch, rank=rank, world_size=world)
    assert all(order == asked[0] for order in asked), "a collective for each tensor: all ranks in the same order"
    return given


@pytest.mark.parametrize("world", [1, 3, 8])
def test_ranks_write_files_side_by_side_that_together_are_the_model(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 4000)
    tensors = tensors_of(*[300] * 20, 5000, 7, 0)
    given = write_as_ranks(tmp_path, tensors, world)
    found = read_all(tmp_path)
    assert found.keys() == {tensor.name for tensor in tensors}
    assert all(torch.equal(found[tensor.name], value_of(tensor)) for tensor in tensors)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.num_bytes for tensor in tensors)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - a file, not a mapping
    most = max(sum(t.num_bytes for t in tensors if t.name in names) for names in given)
    assert most < 0.7 * sum(t.num_bytes for t in tensors) or world == 1, "the model is dealt out"
    assert not list(tmp_path.glob(".*")), "no drafts are left"


def test_small_types_lie_behind_wide_ones_and_come_back(tmp_path: Path) -> None:
    mixed = [
        ExportedTensor(name=f"t{at}", shape=shape, dtype=dtype)
        for at, (shape, dtype) in enumerate(
            [
                ((3,), torch.bool),
                ((5,), torch.bfloat16),
                ((2, 3), torch.float64),
                ((), torch.int64),
                ((7,), torch.uint8),
            ]
        )
    ]
    write_model(tmp_path, config(), mixed, lambda tensor, _: value_of(tensor))
    found = load_file(tmp_path / "model.safetensors")
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {t.name: (t.shape, t.dtype) for t in mixed}
    assert all(torch.equal(found[tensor.name], value_of(tensor)) for tensor in mixed)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers asks for it"


def test_what_a_disk_refuses_is_raised_when_all_tensors_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 4000)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export._OpenFile, "write", refuse)
    passed = []
    with pytest.raises(OSError, match="No space left"):
        write_model(
            tmp_path,
            config(),
            tensors_of(*[300] * 9),
            lambda t, _: passed.append(t.name) or value_of(t),  # type: ignore[func-returns-value]
        )
    assert len(passed) == 9, "the other ranks were not left alone in a collective"
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_or_two_are_in_memory_and_not_a_file_nor_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a GB in files of 64 MiB, made tensor by tensor."""
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 64 * MIB)
    tensors = in_dtype({f"t{at}": (4 * MIB // 4,) for at in range(64)}, torch.float32)
    write_model(tmp_path, config(), tensors[:1], lambda t, _: value_of(t))
    grown = growth_of(lambda: write_model(tmp_path / "model", config(), tensors, lambda t, _: value_of(t)))
    assert grown < 48 * MIB, "less than a file"
    assert sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors")) > 256 * MIB
