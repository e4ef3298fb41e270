"""Parity with transformers through ten updates, and tokens a second: `python plugins/sglang/tools/figures.py`.

With the tests' stand-ins and their random model of 0.3 million parameters, so it says what SGLang's scheduling costs on
a CPU, and nothing of its kernels.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import conftest  # noqa: F401 - the stand-ins
from cases import adopt, ask, changed, halves, make_engine, plain_model, run, state_of, worst

from rlsdk.testing.models import write_tiny_model
from rlsdk_sglang.config import SglangOptions

NUM_SAMPLES, NUM_TOKENS, ROUNDS = 256, 32, 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", seed=1)
        for tp_size in (1, 2):
            for interval in (1, NUM_TOKENS) if tp_size == 1 else (1,):
                measure(model, tp_size, interval)


def measure(model: Path, tp_size: int, interval: int) -> None:
    start = time.monotonic()
    options = SglangOptions(kv_cache_mb=256, stream_interval=interval)
    engine = make_engine(model, tp_size=tp_size, max_running=NUM_SAMPLES, options=options)
    begun = time.monotonic() - start
    try:
        plain, differences, updates = plain_model(model), [], []
        requests = [ask(str(at), range(5, 20 + at), 4, max_tokens=40, seed=at, temperature=0.8) for at in range(8)]
        for version in range(11):
            if version:
                state = changed(state_of(plain), version)
                start = time.monotonic()
                engine.update_weights(iter(halves(state)), version)
                updates.append(time.monotonic() - start)
                adopt(plain, state)
            differences.append(worst(plain, requests, run(engine, requests)))
        rates = [tokens_a_second(engine, at) for at in range(ROUNDS)]
    finally:
        start = time.monotonic()
        engine.close()
    print(
        f"tp {tp_size}, stream_interval {interval}: start {begun:.1f} s; close {time.monotonic() - start:.1f} s; "
        f"update {statistics.median(updates):.3f} s; {statistics.median(rates):.0f} tokens/s; largest log-prob "
        f"difference {differences[0]:.1e} before updates, {max(differences[1:]):.1e} after each of ten",
        flush=True,
    )


def tokens_a_second(engine: object, seed: int) -> float:
    request = ask("x", range(5, 20), NUM_SAMPLES, max_tokens=NUM_TOKENS, seed=seed, stop_token_ids=())
    start = time.monotonic()
    outputs = run(engine, [request])
    return sum(len(output.token_ids) for output in outputs) / (time.monotonic() - start)


if __name__ == "__main__":
    main()
