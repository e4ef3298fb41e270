"""Files of tensors are whole, whatever the memory of the tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from rlsdk.kit.files.atomic_files import atomic_write_tensors


def test_tensors_of_any_stride_can_be_read_back(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(6).view(2, 3).T, "b": torch.ones(3, dtype=torch.bfloat16), "s": torch.tensor(2.0)}
    atomic_write_tensors(tmp_path / "a.safetensors", tensors)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
