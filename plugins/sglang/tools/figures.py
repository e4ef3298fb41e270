"""Parity with transformers through ten updates, and tokens a second: `python plugins/sglang/tools/figures.py`.

With a random model of 0.3 million parameters, so it says what SGLang's scheduling costs, and nothing of its kernels.
Without a GPU: with PYTHONPATH=plugins/sglang/tests/standins.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from rlsdk.interfaces import RolloutEngine
from rlsdk.testing import RolloutConformance
from rlsdk.testing.rollout.lab import RolloutLab, pieces
from rlsdk_sglang.config import SglangOptions

NUM_SAMPLES, NUM_TOKENS, ROUNDS = 256, 32, 3


class Figures(RolloutConformance):
    """Nothing is required here: the same tools, for figures."""

    backend = "sglang"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lab = Figures.make_lab(Path(folder))
        for tp_size, interval in ((1, 1), (1, NUM_TOKENS), (2, 1)):
            measure(lab, tp_size, interval)
        lab.close()


def measure(lab: RolloutLab, tp_size: int, interval: int) -> None:
    start = time.monotonic()
    options = SglangOptions(kv_cache_mb=256, stream_interval=interval)
    engine = lab.start(tp_size=tp_size, max_running=NUM_SAMPLES, options=options)
    begun = time.monotonic() - start
    try:
        requests = [lab.ask(str(at), lab.prompt(15 + at), 4, max_tokens=40, temperature=0.8) for at in range(8)]
        differences, updates = [lab.worst(requests, lab.run(requests, engine))], []
        for version in range(1, 11):
            state = lab.changed(version)
            start = time.monotonic()
            engine.update_weights(pieces(state), version)
            updates.append(time.monotonic() - start)
            outputs = lab.run(requests, engine)
            differences.append(lab.worst(requests, outputs, lab.plain.with_state(state)))
        rates = [tokens_a_second(lab, engine, seed) for seed in range(ROUNDS)]
    finally:
        start = time.monotonic()
        engine.close()
    print(
        f"tp {tp_size}, stream_interval {interval}: start {begun:.1f} s; close {time.monotonic() - start:.1f} s; "
        f"update {statistics.median(updates):.3f} s; {statistics.median(rates):.0f} tokens/s; largest log-prob "
        f"difference {differences[0]:.1e} before updates, {max(differences[1:]):.1e} after each of ten",
        flush=True,
    )


def tokens_a_second(lab: RolloutLab, engine: RolloutEngine, seed: int) -> float:
    request = lab.ask("x", lab.prompt(15), NUM_SAMPLES, max_tokens=NUM_TOKENS, seed=seed)
    start = time.monotonic()
    outputs = lab.run([request], engine)
    return sum(len(output.token_ids) for output in outputs) / (time.monotonic() - start)


if __name__ == "__main__":
    main()
