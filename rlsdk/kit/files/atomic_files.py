"""Atomic files of an engine: those of `rlsdk.system.atomic`, and files of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlsdk.system.atomic import as_os_error, atomic_path, atomic_write_bytes, atomic_write_json, atomic_write_text

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["atomic_path", "atomic_write_bytes", "atomic_write_json", "atomic_write_tensors", "atomic_write_text"]


def atomic_write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})
) -> None:
    """Writes safetensors; see `atomic_path`. Tensors may be on any device and of any layout, but must not share
    memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_path(path) as draft:
        try:
            save_file({name: t.detach().contiguous() for name, t in tensors.items()}, draft, metadata=dict(metadata))
        except SafetensorError as error:
            raise as_os_error(error, path) from error
