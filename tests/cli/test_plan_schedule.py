"""`rlsdk plan --schedule`: virtual time agrees with arithmetic, and the best split is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.cli.plan_schedule import run
from rlsdk.interfaces import ConfigError
from rlsdk.planning.simulation import Rates, Setting, simulate
from rlsdk.planning.splits import Workload, best_split, compare, log_normal_lengths, measured_rates, parse_rates
from rlsdk.testing.models import write_tiny_model

RATES = Rates(decode_s=0.01, decode_s_per_sample=0.0, train_tokens_per_s=1000, sync_s=0.5, max_running=64)


def setting(staleness: int, *, partial: bool = False, shared: bool = False, train: int = 1) -> Setting:
    return Setting(
        train_devices=train, rollout_devices=2, shared=shared, groups_per_step=4, samples_per_group=8,
        max_staleness=staleness, partial=partial,
    )  # fmt: skip


def test_a_synchronous_step_is_rollout_and_update_and_sync() -> None:
    """4 groups of 8 samples of 100 tokens: 1 s of decoding, 3200 tokens in 1.6 s on both devices, half a second."""
    found = simulate(setting(0, shared=True), RATES, [100], steps=5)
    assert found.step_s == pytest.approx(1.0 + 1.6 + 0.5)
    assert found.staleness == [1.0]


@pytest.mark.parametrize(("train", "expected"), [(1, 3.2 + 0.5), (8, 1.0 + 0.5)])
def test_one_step_off_is_the_longer_half_and_the_sync(train: int, expected: float) -> None:
    """Weights that drain come when both halves are done; the one that is quicker waits."""
    found = simulate(setting(1, train=train), RATES, [100], steps=10)
    # A publish goes on while the next step trains, so the update hides it where that is the longer half.
    assert found.step_s == pytest.approx(max(3.2, 1.0 + 0.5) if train == 1 else expected)
    assert found.train_idle == pytest.approx(0.0 if train == 1 else 1 - 0.4 / 1.5, abs=1e-6)
    assert found.staleness == pytest.approx([0.0, 1.0])


def test_a_long_tail_is_hidden_only_where_samples_go_on() -> None:
    """One sample in 32 is ten times as long: with drain every step waits for it."""
    lengths = [1000, *([100] * 31)]
    drained = simulate(setting(4, train=8), RATES, lengths, steps=30)
    partial = simulate(setting(4, train=8, partial=True), RATES, lengths, steps=30)
    assert drained.step_s == pytest.approx(10.0 + 0.5)
    assert partial.step_s < 0.5 * drained.step_s


@settings(max_examples=25, deadline=None)
@given(
    staleness=st.integers(1, 4),
    partial=st.booleans(),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    per_sample=st.floats(0, 0.01),
)
def test_every_sample_is_made_and_none_is_older_than_the_bound(
    staleness: int, partial: bool, lengths: list[int], per_sample: float
) -> None:
    rates = Rates(decode_s=0.01, decode_s_per_sample=per_sample, train_tokens_per_s=500, sync_s=0.1, max_running=5)
    found = simulate(setting(staleness, partial=partial), rates, lengths, steps=4)
    assert sum(found.staleness) == pytest.approx(1.0)
    assert len(found.staleness) == staleness + 1
    assert 0 <= found.train_idle <= 1
    assert 0 <= found.rollout_idle <= 1


def test_the_best_split_beats_its_neighbours() -> None:
    work = Workload(devices=16, groups_per_step=8, samples_per_group=8, lengths=[100])
    rates = Rates(decode_s=0.01, decode_s_per_sample=0.002, train_tokens_per_s=500, max_running=256)
    best, found = best_split(work, rates, 1, partial=False, steps=8)
    for replicas in range(1, 16):
        other = Setting(
            train_devices=16 - replicas, rollout_devices=replicas, groups_per_step=8, samples_per_group=8,
            max_staleness=1,
        )  # fmt: skip
        assert simulate(other, rates, [100], steps=8).step_s >= 0.87 * found.step_s
    assert best.devices == 16


def test_lengths_have_the_median_and_the_tail_that_were_asked_for() -> None:
    lengths = log_normal_lengths(middle=2000, p99=30_000, most=1 << 20, count=200_000)
    assert np.median(lengths) == pytest.approx(2000, rel=0.02)
    assert np.quantile(lengths, 0.99) == pytest.approx(30_000, rel=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode_ns=8", r"did you mean 'decode_ms'|expected \["),
        ("decode_ms=fast", "expected a number"),
        ("decode_ms=8,median=10,p99=20", "lacks train_tokens_per_s"),
        ("decode_ms=-8", "expected 0 or more"),
    ],
)
def test_rates_that_cannot_be_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_rates(text, max_running=8, devices_per_replica=1)
    with pytest.raises(ConfigError, match="0 < median <= p99"):
        log_normal_lengths(middle=10, p99=5, most=10, count=1)


def test_the_command_prints_a_row_for_each_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 4)
    arguments = [
        "--model", model, "--data", str(tmp_path / "rows.jsonl"), "--reward", "exact",
        "--placement.preset", "disaggregated", "--placement.devices_per_node", "8", "--placement.device", "cpu",
        "--data.max_prompt_tokens", "64", "--rollout.max_response_tokens", "400",
        "--placement.devices", "{actor: 1}", "--trainer.prompts_per_step", "8", "--schedule.max_staleness", "1",
    ]  # fmt: skip
    run(arguments, "decode_ms=8,train_tokens_per_s=4000,sync_s=1,median=100,p99=800", as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["setting"]["max_staleness"] for row in rows] == [0, 1, 2, 4, 8, 1, 2, 4, 8]
    assert rows[0]["gain"] == 1.0
    with pytest.raises(ConfigError, match="expected the folder of a run, or rates"):
        run(arguments, "nowhere", as_json=False)


def test_rates_come_from_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no journal"):
        measured_rates(tmp_path, [], max_running=8, devices=1, per_replica=1)


def test_a_comparison_begins_with_the_synchronous_run_on_all_devices() -> None:
    work = Workload(devices=4, groups_per_step=4, samples_per_group=4, lengths=[50, 200])
    rows = compare(work, RATES, staleness=(1,), steps=4)
    assert [(row.setting.shared, row.setting.partial) for row in rows] == [(True, False), (False, False), (False, True)]
    assert all(row.setting.devices == 4 for row in rows)
