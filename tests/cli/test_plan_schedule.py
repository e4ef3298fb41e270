"""`rlsdk plan --schedule`: virtual time agrees with arithmetic, and the best split is found."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.cli.preparation.plan_schedule import devices_of_run, run
from rlsdk.config import load_config
from rlsdk.interfaces import ConfigError, Episode, FinishReason, Span, Trajectory, VersionRun
from rlsdk.planning.calibration import stale_work
from rlsdk.planning.measured import Devices, measured_rates, read_steps, variation
from rlsdk.planning.rates import Rates, Setting
from rlsdk.planning.replica import Replica
from rlsdk.planning.simulation import simulate
from rlsdk.planning.splits import Workload, best_split, compare, log_normal_lengths, parse_rates
from rlsdk.registry import Registry
from rlsdk.rollouts import Grade, Sample
from rlsdk.rollouts.journal.journal import FOLDER, Journal
from rlsdk.rollouts.journal.records import record_of
from rlsdk.testing.process.models import write_tiny_model

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


@pytest.mark.parametrize(
    ("train", "cores", "expected"),
    [
        # Both halves work all the time, on all processors: each gives half of what the controller needs.
        (1.0, 2, 1.0 + 0.1),
        (1.0, 3, 1.0),
        # While the quicker half has nothing to do, the controller has its processor.
        (0.5, 2, 1.0 + 0.1 * 0.5),
        (2.0, 2, 2.0 + 0.1 * 0.5),
    ],
)
def test_what_the_controller_takes_is_missing_where_all_processors_work(
    train: float, cores: int, expected: float
) -> None:
    """A step of 800 tokens: 1 s of decoding, so many seconds of training, 0.2 s of the controller."""
    rates = Rates(decode_s=0.01, train_tokens_per_s=800 / train, controller_s=0.2, cores=cores, max_running=64)
    off = Setting(train_devices=1, rollout_devices=1, groups_per_step=2, samples_per_group=4, max_staleness=1)
    assert simulate(off, rates, [100], steps=20).step_s == pytest.approx(expected, rel=0.02)
    plain = replace(off, max_staleness=0)
    assert simulate(plain, rates, [100], steps=20).step_s == pytest.approx(1.0 + train)


@pytest.mark.parametrize("grade", [0.3, 0.7])
def test_new_weights_do_not_wait_for_grades_where_samples_drain(grade: float) -> None:
    """The publish of 0.5 s begins with the last token, and the next second of decoding behind it; within these 1.5 s
    grades and the update of 0.4 s come to their end. Weights that waited for grades would make it 1.5 s and those."""
    rates = replace(RATES, grade_s=grade)
    found = simulate(setting(1, train=8), rates, [100], steps=10)
    assert found.step_s == pytest.approx(1.0 + 0.5)
    # A synchronous step has nothing to do meanwhile.
    plain = simulate(setting(0, shared=True), rates, [100], steps=5)
    assert plain.step_s == pytest.approx(1.0 + grade + 1.6 + 0.5)


@pytest.mark.parametrize(("cores", "train", "step"), [(0, 0.5, 1.4), (2, 0.5, 1.6), (0, 2.0, 2.0), (2, 2.0, 2.2)])
def test_weights_that_are_sent_by_a_processor_that_trains_take_from_both(cores: int, train: float, step: float) -> None:
    """1 s of decoding; a publish of 0.4 s, half of it sending: 0.6 s beside an update, which loses 0.2 s to it."""
    rates = Rates(decode_s=0.01, train_tokens_per_s=800 / train, sync_s=0.4, cores=cores, max_running=64)
    off = Setting(train_devices=1, rollout_devices=1, groups_per_step=2, samples_per_group=4, max_staleness=1)
    assert simulate(off, rates, [100], steps=10).step_s == pytest.approx(step)
    # Nothing trains beside the publish of a synchronous step.
    plain = replace(off, max_staleness=0)
    assert simulate(plain, rates, [100], steps=10).step_s == pytest.approx(1.0 + train + 0.4)


def test_keys_and_values_are_made_again_of_prompts_too() -> None:
    """10 ms a token: at 0.5 s one sample has 50 tokens, and one that came at 0.3 s has 20; each prompt has 30."""
    replica = Replica(Rates(decode_s=0.01, prefill_tokens_per_s=1000, prompt_tokens=30))
    replica.waiting.append((0, 100))
    replica.fill()
    replica.advance(0.3, paused=False)
    replica.waiting.append((1, 100))
    replica.fill()
    replica.advance(0.5, paused=False)
    assert replica.recompute_s() == pytest.approx((50 + 20 + 2 * 30) / 1000)


def test_a_long_tail_is_hidden_only_where_samples_go_on() -> None:
    """One sample in 32 is ten times as long: with drain every step waits for it."""
    lengths = [1000, *([100] * 31)]
    drained = simulate(setting(4, train=8), RATES, lengths, steps=30)
    partial = simulate(setting(4, train=8, partial=True), RATES, lengths, steps=30)
    assert drained.step_s == pytest.approx(10.0 + 0.5)
    assert partial.step_s < 0.5 * drained.step_s


def test_where_both_halves_take_as_long_their_variation_makes_samples_go_on() -> None:
    """As measured: with constant rates every sample ends just before new weights come, and nothing is made again; a
    twentieth more or less from step to step is enough that some run then, and their keys and values cost time."""
    work = Setting(
        train_devices=1, rollout_devices=1, groups_per_step=4, samples_per_group=6, max_staleness=2, partial=True
    )
    rates = Rates(
        decode_s=1.4e-3, decode_s_per_sample=0.095e-3, prefill_tokens_per_s=23_400, prompt_tokens=20,
        train_tokens_per_s=24 * 80 / 0.32, sync_s=0.012, max_running=256,
    )  # fmt: skip
    constant = simulate(work, rates, [80], steps=100).step_s
    assert constant == pytest.approx(0.32, rel=0.01)
    varied = replace(rates, update_variation=0.05, decode_variation=0.05)
    found = simulate(work, varied, [80], steps=100).step_s
    assert 1.1 * constant < found < 1.4 * constant
    assert simulate(work, varied, [80], steps=100).step_s == found
    # Halves that wait for each other in any case lose little.
    plain = replace(work, max_staleness=0, partial=False)
    together = simulate(plain, rates, [80], steps=100).step_s
    assert simulate(plain, varied, [80], steps=100).step_s == pytest.approx(together, rel=0.01)


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
    rows = "".join(f'{{"question": "1+{at}", "answer": "{1 + at}"}}\n' for at in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    arguments = [
        "--model", model, "--data", str(tmp_path / "rows.jsonl"), "--data.num_eval_rows", "1", "--reward", "exact",
        "--placement.preset", "disaggregated", "--placement.devices_per_node", "8", "--placement.device", "cpu",
        "--data.max_prompt_tokens", "64", "--rollout.max_response_tokens", "400",
        "--placement.devices", "{actor: 1}", "--trainer.prompts_per_step", "8", "--schedule.max_staleness", "1",
    ]  # fmt: skip
    run(arguments, "decode_ms=8,train_tokens_per_s=4000,sync_s=1,median=100,p99=800", as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["setting"]["max_staleness"] for row in rows] == [0, 1, 2, 4, 8, 1, 2, 4, 8]
    assert rows[0]["gain"] == 1.0
    with pytest.raises(ConfigError, match=r"expected the folder of a run .*, or rates"):
        run(arguments, "nowhere", as_json=False)


def sample_of(length: int) -> Sample:
    made = Span(
        token_ids=np.ones(length, np.int64), log_probs=np.zeros(length, np.float32), versions=(VersionRun(0, length),)
    )
    trajectory = Trajectory(spans=(Span.given((0,)), made), finish_reason=FinishReason.STOP)
    return Sample(episode=Episode.of(trajectory), text="", grade=Grade())


def written_run(
    folder: Path, *, decode: float, per_sample: float, latency: float, samples: int = 8, equal: bool = False
) -> list[dict[str, float]]:
    """A synchronous run of virtual time: 2 replicas, so many samples each (`equal`: of one length); its metrics."""
    journal = Journal(folder / FOLDER, made_by={}, keep="all")
    journal.open(0)
    draw, now, metrics = np.random.default_rng(0), 1e9, []
    for step in range(1, 13):
        journal.write("start", step=step, groups=[2 * step, 2 * step + 1], at=now)
        lengths = np.repeat(draw.integers(5, 60, 1), samples) if equal else draw.integers(5, 60, samples)
        for replica, (index, length) in itertools.product(range(2), enumerate(lengths)):
            running = [int((lengths >= token).sum()) for token in range(1, length + 1)]
            took = latency + sum(decode + per_sample * (n - 1) for n in running)
            at = {"group": 2 * step + replica, "name": "", "sample": index, "at": now + took}
            journal.write("sample", **at, **record_of(sample_of(int(length)), (0,)))
        rollout = latency + sum(
            decode + per_sample * (int((lengths >= t).sum()) - 1) for t in range(1, max(lengths) + 1)
        )
        tokens = 2 * int(lengths.sum())
        step_s = rollout + 0.2 + tokens / 1000
        now += step_s + 0.1
        journal.write("update", step=step, groups=[2 * step, 2 * step + 1], rejected=[], figures={}, at=now - 0.1)
        metrics.append({
            "step": step, "time/step_s": step_s, "time/rollout_s": rollout, "time/sync_s": 0.2,
            "throughput/tokens_per_s": 3 * tokens / step_s, "response/tokens_max": float(max(lengths)),
        })  # fmt: skip
    journal.close()
    return metrics


@pytest.mark.parametrize(
    ("decode", "per_sample", "latency"), [(0.01, 0.0, 0.0), (0.01, 0.002, 0.05), (0.003, 0.003, 0.2)]
)
def test_rates_come_from_a_run(decode: float, per_sample: float, latency: float, tmp_path: Path) -> None:
    """What the run was made with is found again."""
    metrics = written_run(tmp_path, decode=decode, per_sample=per_sample, latency=latency)
    devices = Devices(train=1, replicas=2, per_replica=1, max_running=64)
    rates, lengths = measured_rates(tmp_path, metrics, devices)
    assert rates.decode_s == pytest.approx(decode, abs=1e-4)
    assert rates.decode_s_per_sample == pytest.approx(per_sample, abs=1e-5)
    assert rates.latency_s == pytest.approx(latency, abs=2e-3)
    assert rates.sync_s == 0.2
    assert len(lengths) == 12 * 16
    pools = Setting(train_devices=1, rollout_devices=2, groups_per_step=2, samples_per_group=8)
    found = simulate(pools, rates, lengths, steps=10).step_s
    assert found == pytest.approx(np.mean([m["time/step_s"] for m in metrics]) + 0.1, rel=0.08)


def test_steps_that_a_resume_repeats_or_continues_are_not_measured(tmp_path: Path) -> None:
    """Killed in its last step, and resumed an hour later from a checkpoint two steps before that."""
    metrics = written_run(tmp_path, decode=0.01, per_sample=0.002, latency=0.05)
    devices = Devices(train=1, replicas=2, per_replica=1, max_running=64)
    expected = measured_rates(tmp_path, metrics[:10], devices)[0]
    journal = Journal(tmp_path / FOLDER, made_by={}, keep="all")
    journal.open(10)
    for step in (11, 12):
        journal.write("start", step=step, groups=[2 * step, 2 * step + 1], at=2e9 + step)
        journal.write("update", step=step, groups=[], rejected=[], figures={}, at=2e9 + step)
    journal.close()
    steps, updates = read_steps(tmp_path / FOLDER)
    assert sorted(steps) == list(range(1, 11))
    assert sorted(updates) == [*range(1, 10), 11, 12]
    again = [{**m, "time/step_s": 0.1, "time/rollout_s": 0.01, "throughput/reused_samples": 16.0} for m in metrics[10:]]
    found = measured_rates(tmp_path, [*metrics[:10], *again], devices)[0]
    for name in ("decode_s", "decode_s_per_sample", "latency_s", "train_tokens_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6)


def test_how_much_steps_vary_comes_from_a_run(tmp_path: Path) -> None:
    """Every update takes as long for a token, and then every second one a fifth more; decoding follows its fit."""
    devices = Devices(train=1, replicas=2, per_replica=1, max_running=64)
    metrics = written_run(tmp_path, decode=0.01, per_sample=0.002, latency=0.05)
    rates, _ = measured_rates(tmp_path, metrics, devices)
    assert rates.decode_variation < 0.005
    assert variation([1.0] * 20) == 0.0
    assert variation([1.0, 1.2] * 20) == pytest.approx(np.log(1.2) / 2)
    assert variation([*np.exp(np.random.default_rng(0).normal(0, 0.1, 4000)), 50.0]) == pytest.approx(0.1, rel=0.05)


def test_what_a_further_sample_adds_is_seen_in_runs_with_other_batches(tmp_path: Path) -> None:
    """Where all samples of a step are equally long, one run cannot tell it from the rest of a decoding step."""
    made = {"decode": 0.01, "per_sample": 0.002, "latency": 0.05, "equal": True}
    metrics = written_run(tmp_path / "a", samples=8, **made)
    written_run(tmp_path / "b", samples=3, **made)
    devices = Devices(train=1, replicas=2, per_replica=1, max_running=64)
    rates, _ = measured_rates(tmp_path / "a", metrics, devices, [tmp_path / "b"])
    assert rates.decode_s == pytest.approx(0.01, abs=1e-4)
    assert rates.decode_s_per_sample == pytest.approx(0.002, abs=1e-5)
    assert rates.latency_s == pytest.approx(0.05, abs=2e-3)
    alone, _ = measured_rates(tmp_path / "a", metrics, devices)
    assert alone.decode_s + 7 * alone.decode_s_per_sample == pytest.approx(0.01 + 7 * 0.002, abs=1e-4)
    assert alone.decode_s_per_sample != pytest.approx(0.002, rel=0.1)


def test_runs_beside_the_first_one_are_of_the_same_devices(tmp_path: Path) -> None:
    text = (
        "model: {path: m}\ndata: {train: rows.jsonl, max_prompt_tokens: 16}\nrewards: [{name: exact}]\n"
        "placement: {preset: disaggregated, devices_per_node: 8, devices: {actor: ACTOR}}\n"
    )
    for name, actor in (("a", "2"), ("b", "4")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text.replace("ACTOR", actor))
    model = str(write_tiny_model(tmp_path / "tiny"))
    rows = "".join(f'{{"question": "1+{at}", "answer": "{1 + at}"}}\n' for at in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    arguments = [
        "--model", model, "--data", str(tmp_path / "rows.jsonl"), "--data.num_eval_rows", "1", "--reward", "exact",
        "--data.max_prompt_tokens", "64", "--rollout.max_response_tokens", "64",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"ran on 4 \+ 4 x 1 devices, but .* on 2 \+ 6 x 1 devices"):
        run(arguments, f"{tmp_path / 'a'},{tmp_path / 'b'}", as_json=False)


def test_the_devices_of_a_run_are_read_also_where_it_names_code(tmp_path: Path) -> None:
    """Nothing of it is loaded: a plan for a run needs no trust in it."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text(
        "model: {path: m}\ndata: {train: rows.jsonl, max_prompt_tokens: 16}\nrewards: [{name: 'own.py:score'}]\n"
        "rollout: {rollouter: 'own.py:turns', max_model_tokens: 64, max_response_tokens: 32, max_running_samples: 7,"
        " tp_size: 2}\n"
        "placement: {preset: disaggregated, devices_per_node: 8, devices: {actor: 2}}\n"
    )
    assert devices_of_run(tmp_path) == Devices(train=2, replicas=3, per_replica=2, max_running=7)
    start = {"step": 0, "surroundings": {"machine": "Linux x86_64, 8 CPU cores, 31 GiB memory, no GPU"}}
    (tmp_path / "config.history.jsonl").write_text(json.dumps(start) + "\n")
    assert devices_of_run(tmp_path).cores == 8
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        devices_of_run(tmp_path / "nowhere")


def test_stale_samples_are_trained_with_the_passes_that_only_they_need() -> None:
    registry, task = Registry.discover({"RLSDK_PLUGINS": "rlsdk"}), ["--model", "m", "--data", "d", "--reward", "exact"]
    for flags, expected in (
        ([], 4 / 3),  # an update is three forward passes, and old log-probs one more
        (["--algorithm.old_log_probs", "rollout"], 1.0),
        (["--trainer.updates_per_step", "2"], 1.0),
        (["--algorithm.kl_coef", "0.1"], 5 / 4),
    ):
        assert stale_work(load_config([], [*task, *flags], registry), registry) == pytest.approx(expected)
    work = Workload(devices=4, groups_per_step=4, samples_per_group=4, lengths=[50, 200])
    slow = replace(RATES, train_tokens_per_s=1.0)  # training is all that counts
    plain, worked = (compare(work, rates, staleness=(1,), steps=4) for rates in (slow, replace(slow, stale_work=1.5)))
    assert worked[0].found.step_s == plain[0].found.step_s
    assert worked[1].found.step_s == pytest.approx(1.5 * plain[1].found.step_s, rel=0.02)


def test_a_run_that_says_nothing_of_each_half_is_refused(tmp_path: Path) -> None:
    devices = Devices(train=1, replicas=1, per_replica=1, max_running=8)
    with pytest.raises(ConfigError, match="has no journal"):
        measured_rates(tmp_path, [], devices)
    metrics = written_run(tmp_path, decode=0.01, per_sample=0.0, latency=0.0)
    with pytest.raises(ConfigError, match="trained on stale samples"):
        measured_rates(tmp_path, [m | {"schedule/staleness_max": 1.0} for m in metrics], devices)


def test_a_comparison_begins_with_the_synchronous_run_on_all_devices() -> None:
    work = Workload(devices=4, groups_per_step=4, samples_per_group=4, lengths=[50, 200])
    rows = compare(work, RATES, staleness=(1,), steps=4)
    assert [(row.setting.shared, row.setting.partial) for row in rows] == [(True, False), (False, False), (False, True)]
    assert all(row.setting.devices == 4 for row in rows)
