"""Models, worlds of several sizes, whose processes all tests share, and what a landing elsewhere leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import transformers

from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.process.worlds import Seat, World, close_process_pools

LONG = ("test_the_run_goes_on_with_zero_3_and_vllm", "test_an_adapter_of_zero_3_is_served_alone_by_vllm")
LEFT_OUT = pytest.StashKey[str]()
"""What of these tests does not run, as `tools/run_tests.py` reads it."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("models")
    small = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    mixture = transformers.AutoModelForCausalLM.from_config(small)
    mixture.save_pretrained(folder / "mixture")
    found = {
        "plain": write_tiny_model(folder / "plain", seed=1),
        "tied": write_tiny_model(folder / "tied", tied=True, seed=2, architecture="llama"),
        "odd": write_tiny_model(folder / "odd", seed=3, architecture="qwen3", vocab_size=131),
        # Experts that transformers joins into one tensor of three dimensions while it loads them.
        "mixture": folder / "mixture",
    }
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    yield lambda size: World(size, Seat(backend="deepspeed"))
    close_process_pools()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of an engine that is unchanged (`--rlsdk-basic deepspeed`), each test runs with one set of values a stage, and
    those of `LONG` do not run."""
    if "deepspeed" not in config.getoption("--rlsdk-basic").split(","):
        return
    own = [item for item in items if isinstance(item, pytest.Function) and item.cls is None]
    first: dict[tuple[str, object], pytest.Item] = {}
    for item in own:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        first.setdefault((item.originalname, values.get("stage")), item)
    left_out = {item for item in own if item not in first.values() or item.originalname in LONG}
    if left_out:
        config.stash[LEFT_OUT] = (
            f"{len(left_out)} of {len(own)} tests of deepspeed: other values of those that ran, and {', '.join(LONG)}"
        )
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if what := terminalreporter.config.stash.get(LEFT_OUT, None):
        terminalreporter.write_line(f"LEFT OUT: {what}")
