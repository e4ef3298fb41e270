"""A rollout engine whose workers are processes of their own, each of which takes its part of the weights itself."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlsdk.interfaces import Delivery, SyncReceipt, WeightLayout
from rlsdk.kit.weights.delivery import encode_deliveries, receive_shards, worker_receipts
from rlsdk.kit.weights.weight_tracing import Piece
from rlsdk.kit.weights.weight_updates import make_receipt, served_fingerprints
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine


def _serve(pipe: Connection, layout: WeightLayout) -> None:
    """Body of a worker: holds the boxes of its layout, and takes what is delivered."""
    assert layout.worker is not None
    torch.set_num_threads(1)
    pieces: dict[str, list[Piece]] = {}
    for name, box in layout.boxes:
        pieces.setdefault(name, []).append(Piece(box=box, memory=torch.zeros(box.size)))
    while (deliveries := pipe.recv()) is not None:
        answer = receive_shards(layout.worker, deliveries, pieces)
        pipe.send((answer, served_fingerprints(pieces)))


class WorkersEngine(TensorRolloutEngine):
    """One worker for each layout."""

    def __init__(self, layouts: Sequence[WeightLayout]) -> None:
        context = multiprocessing.get_context("fork")
        self.workers: list[tuple[Any, Connection]] = []
        for layout in layouts:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, layout), daemon=True)
            process.start()
            self.workers.append((process, mine))
        processes = [process.pid for process, _ in self.workers]
        super().__init__(
            [replace(layout, process=f"{layout.node}:{pid}") for layout, pid in zip(layouts, processes, strict=True)]
        )
        self.shapes = {meta.name: meta.shape for layout in layouts for meta in layout.tensors}

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        plain = encode_deliveries(deliveries)

        def ask(pipe: Connection) -> Any:
            pipe.send(plain)
            return pipe.recv()

        with ThreadPoolExecutor(len(self.workers)) as pool:
            answers = list(pool.map(ask, [pipe for _, pipe in self.workers]))
        workers = worker_receipts([answer for answer, _ in answers], version)
        return make_receipt(self.shapes, "float32", [prints for _, prints in answers], version, workers)

    def close(self) -> None:
        for process, pipe in self.workers:
            if process.is_alive():
                pipe.send(None)
            process.join(10)
            pipe.close()
