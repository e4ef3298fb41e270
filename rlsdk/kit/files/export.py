"""Writes a model as a Hugging Face folder, sharded and streamed: no rank ever holds more than one or two full tensors.

The file of each tensor, and the rank that writes each file, follow from names and shapes alone, so all ranks compute
the same assignment without communication. Ranks send one tensor at a time to its writer; writers take turns, so that
while one writes to disk the ranks serve another.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from rlsdk.kit.files.model_files import INDEX
from rlsdk.kit.ranks.progress import advance
from rlsdk.system.atomic import atomic_path, atomic_write_json
from rlsdk.system.files import foreign_reason
from rlsdk.system.printable import printable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_FILE_BYTES = 4 << 30
"""Largest size in bytes of one safetensors file of an export."""
MAX_WRITERS = 32
"""Most ranks that write at the same time. Each receives tensors from all others, over one connection per rank."""
_log = logging.getLogger(__name__)
OF_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*", "generation_config*")
"""Files of a model's folder that an export copies."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors."""


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """One tensor of the exported checkpoint."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One file, and the rank that writes it."""

    name: str
    writer: int
    """Rank."""
    tensors: Sequence[ExportedTensor]


Fetch = Callable[[ExportedTensor, int], Tensor | None]
"""Returns the full tensor on the given rank, in any dtype and on any device, and None on the others. Collective: every
rank calls it for the same tensors in the same order."""


def in_dtype(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> list[ExportedTensor]:
    """Tensors with these names and shapes, all exported in one dtype."""
    return [ExportedTensor(name=name, shape=tuple(shape), dtype=dtype) for name, shape in shapes.items()]


def plan_files(
    tensors: Sequence[ExportedTensor], world_size: int, *, max_bytes: int | None = None
) -> list[ExportedFile]:
    """Assigns tensors to files in order, and files to writers that are far apart, that is on different nodes.

    Args:
        tensors: of the whole model, tied copies left out.
        world_size: number of ranks.
        max_bytes: of a file, unless a single tensor is larger; None: `MAX_FILE_BYTES`.
    """
    limit = MAX_FILE_BYTES if max_bytes is None else max_bytes
    groups: list[list[ExportedTensor]] = []
    size = 0
    for tensor in tensors:
        if not groups or size + tensor.num_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    count = len(groups)
    writers = min(count, world_size, MAX_WRITERS)
    return [
        ExportedFile(
            name="model.safetensors" if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors",
            writer=at % writers * world_size // writers,
            # Wide dtypes first: safetensors requires every tensor to begin at a multiple of its item size.
            tensors=sorted(group, key=lambda tensor: -tensor.dtype.itemsize),
        )
        for at, group in enumerate(groups)
    ]


def write_model(
    path: Path,
    config: PretrainedConfig,
    tensors: Sequence[ExportedTensor],
    fetch: Fetch,
    *,
    rank: int = 0,
    world_size: int = 1,
    source: str | None = None,
) -> None:
    """Writes a model folder for `from_pretrained`. Collective: every rank must call. An error of a writer is raised
    there after all tensors have been sent, so that no rank waits for it.

    Args:
        path: folder to write; created if missing.
        config: of the model; its dtype becomes that of the first tensor.
        tensors: all tensors, the same list on every rank.
        fetch: sends a tensor to its writer.
        rank: of this process.
        world_size: ranks that call.
        source: folder of the original model, whose unchanged files (tokenizer, generation defaults) are copied; a hub
            name or None copies nothing.

    Raises:
        OSError: a file could not be written.
    """
    files = plan_files(tensors, world_size)
    with ExitStack() as stack:
        writing = stack.enter_context(_Writer(path))
        for wave in _waves(files):
            for file, tensor in wave:
                advance()
                values = fetch(tensor, file.writer)
                if file.writer == rank:
                    assert values is not None
                    writing.add(file, tensor, values)
                del values
    if rank == 0:
        _write_rest(path, config, files, source)


def _waves(files: Sequence[ExportedFile]) -> Iterator[list[tuple[ExportedFile, ExportedTensor]]]:
    """Batches of one file per writer, and of these one tensor of each file at a time."""
    num_writers = len({file.writer for file in files})
    for at in range(0, len(files), num_writers):
        together = files[at : at + num_writers]
        for tensors in zip_longest(*(file.tensors for file in together)):
            yield [(file, tensor) for file, tensor in zip(together, tensors, strict=True) if tensor is not None]


class _Writer:
    """Writes the files of one rank on its own thread, one tensor behind the one that arrives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlsdk-export")
        self._last: Future[None] | None = None
        self._open: _OpenFile | None = None
        self._error: Exception | None = None

    def add(self, file: ExportedFile, tensor: ExportedTensor, values: Tensor) -> None:
        """Queues the next tensor of a file; waits until the previous one is written."""
        self._wait()
        if self._error is None:
            host = values.detach().to("cpu", tensor.dtype).contiguous()
            self._last = self._thread.submit(self._write, file, tensor, host)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        self._thread.shutdown()
        if self._open is not None:
            self._open.abandon()
        if self._error is not None and error[0] is None:
            raise self._error

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None and (failure := last.exception()) is not None:
            assert isinstance(failure, Exception)
            self._error = failure

    def _write(self, file: ExportedFile, tensor: ExportedTensor, values: Tensor) -> None:
        if self._open is None:
            self._open = _OpenFile(self.folder / file.name, file.tensors)
        self._open.write(values)
        if tensor is file.tensors[-1]:
            done, self._open = self._open, None
            done.close()


class _OpenFile:
    """A safetensors file that is written sequentially: its header gives the position of each tensor in advance.

    The library's own writer needs all tensors of a file at once. Format: an unsigned little-endian 64-bit length, as
    many bytes of JSON, then the tensors (https://github.com/huggingface/safetensors#format).
    """

    def __init__(self, path: Path, tensors: Sequence[ExportedTensor]) -> None:
        self._stack = ExitStack()
        draft = self._stack.enter_context(atomic_path(path))
        self._file: BinaryIO = self._stack.enter_context(draft.open("wb"))
        header = _header(tensors)
        self._file.write(len(header).to_bytes(8, "little") + header)

    def write(self, values: Tensor) -> None:
        self._file.write(values.view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._stack.close()

    def abandon(self) -> None:
        """Removes the temporary file."""
        error = OSError("the export was given up")
        self._stack.__exit__(type(error), error, None)


def _header(tensors: Sequence[ExportedTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _write_rest(path: Path, config: PretrainedConfig, files: Sequence[ExportedFile], source: str | None) -> None:
    """Writes the index, the configuration, and the unchanged files."""
    path.mkdir(parents=True, exist_ok=True)
    if len(files) > 1:
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
        atomic_write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    copy_unchanged(source, path)
    config = copy.deepcopy(config)
    config.dtype = files[0].tensors[0].dtype
    config.save_pretrained(path)


def copy_unchanged(source: str | None, target: Path) -> None:
    for pattern in OF_TOKENIZER if source is not None else ():
        for file in Path(source or "").glob(pattern):
            if file.is_dir():
                continue
            if reason := foreign_reason(Path(source or ""), file):
                _log.warning("%s is not copied into the export: it %s", printable(str(file)), printable(reason))
                continue
            shutil.copy(file, target / file.name)
