"""Grading in processes: right values, and every kind of misbehaviour at the cost of its own sample."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.interfaces import ConfigError, DataError, RewardSample
from rlsdk.rewards import FailureKind, RewardDef, RewardLimits, RewardResult, RewardRunner
from rlsdk.rewards.grading.protocol import Record, Tag, encode_record, encode_value, take_records

from .conftest import FUNCTIONS, Start, sample

KINDS = {
    "none": FailureKind.INAPPLICABLE,
    "nan": FailureKind.NAN,
    "inf": FailureKind.NAN,
    "huge": FailureKind.NAN,
    "1e35": FailureKind.NAN,
    "text": FailureKind.TYPE,
    "list": FailureKind.TYPE,
    "raise": FailureKind.EXCEPTION,
    "exit": FailureKind.EXCEPTION,
    "interrupt": FailureKind.EXCEPTION,
    "deep": FailureKind.EXCEPTION,
    "memory": FailureKind.MEMORY,
    "os_exit": FailureKind.CRASH,
    "segfault": FailureKind.CRASH,
    "kill": FailureKind.CRASH,
    "close_all": FailureKind.CRASH,
    "loop": FailureKind.TIMEOUT,
    "sleep": FailureKind.TIMEOUT,
    "power": FailureKind.TIMEOUT,
}
HARMLESS = ("print", "close_stdout", "write_fd", "true")


def check_attribution(result: RewardResult, responses: list[str]) -> None:
    """Every misbehaving sample, and no other, has no score, and is counted under its own kind."""
    assert result.valid.tolist() == [response not in KINDS for response in responses]
    wanted = [0.0 if r in KINDS else 1.0 if r == "true" else 0.5 for r in responses]
    assert result.scores.tolist() == wanted
    assert result.failures == Counter(KINDS[r].value for r in responses if r in KINDS)
    for example in result.examples:
        assert KINDS[responses[example.sample]] is example.kind


def test_scores_are_the_weighted_sum_of_all_rewards() -> None:
    rewards = [
        RewardDef(name="right", target=f"{FUNCTIONS}:answer_is_right", weight=2.0, options={"right": 3.0}),
        RewardDef(name="length", target=f"{FUNCTIONS}:all_lengths", weight=-0.5),
    ]
    with RewardRunner(rewards) as runner:
        result = runner.score([sample("42"), sample("7777"), sample("")])
    assert result.scores.tolist() == [5.0, -2.0, 0.0]
    assert result.scores.dtype == np.float64
    assert {name: values.tolist() for name, values in result.by_reward.items()} == {
        "right": [3.0, 0.0, 0.0],
        "length": [2.0, 4.0, 0.0],
    }
    assert result.valid.all()
    assert not result.failures
    assert result.means() == {"right": 1.0, "length": 2.0}


def test_everything_but_hangs_in_one_batch_costs_its_own_sample_only(start: Start) -> None:
    bad = [kind for kind, failure in KINDS.items() if failure is not FailureKind.TIMEOUT]
    responses = [response for pair in zip(bad, ("fine", *HARMLESS) * 9, strict=False) for response in pair]
    result = start("misbehave").score([sample(response) for response in responses])
    check_attribution(result, responses)
    messages = {responses[example.sample]: example.message for example in result.examples}
    assert re.fullmatch(r"ZeroDivisionError: .* \(functions.py:\d+\)", messages["raise"])
    assert "SIGSEGV" in messages["segfault"]


@pytest.mark.parametrize("workers", [1, 3])
def test_hangs_in_one_batch_cost_their_own_samples_only(start: Start, workers: int) -> None:
    responses = ["loop", "fine", "fine", "sleep", "raise", "fine", "power", "true"]
    limits = RewardLimits(timeout_s=1.0, memory_mb=256)
    result = start("misbehave", limits=limits, num_workers=workers).score([sample(r) for r in responses])
    check_attribution(result, responses)
    assert result.failures["timeout"] == 3


@settings(max_examples=8, deadline=None)
@given(responses=st.lists(st.sampled_from(["fine", "fine", "true", "raise", "none", "os_exit"]), max_size=12))
def test_attribution_holds_for_any_mixture_and_any_number_of_workers(responses: list[str]) -> None:
    for runner in shared_runners():
        check_attribution(runner.score([sample(response) for response in responses]), responses)


def shared_runners() -> list[RewardRunner]:
    if not SHARED:
        target = RewardDef(name="misbehave", target=f"{FUNCTIONS}:misbehave")
        SHARED.extend(RewardRunner([target], RewardLimits(max_losses_in_a_row=20), num_workers=n) for n in (1, 2))
    return SHARED


SHARED: list[RewardRunner] = []


@pytest.fixture(autouse=True, scope="module")
def close_shared() -> object:
    yield
    for runner in SHARED:
        runner.close()


def test_a_sample_arrives_as_it_was_sent(start: Start) -> None:
    sent = RewardSample(
        prompt="p\ud83d é", response="r\x00\n", answer=None, row={"n": 7, "deep": {"x": [None, 1.5]}}, truncated=True,
        extra={"given": "é", "turns": [1, None]},
    )  # fmt: skip
    assert start("echo_fields").score([sent]).scores.tolist() == [1.0]


def test_samples_that_share_a_row_but_not_a_prompt_keep_their_own(start: Start) -> None:
    row = {"n": 1}
    sent = [sample("a", answer="a", prompt="1", row=row), sample("a", answer="b", prompt="2", row=row)]
    assert start("answer_is_right").score(sent).scores.tolist() == [1.0, 0.0]


def test_a_failure_of_one_reward_makes_the_sample_invalid_unless_it_weighs_nothing() -> None:
    def run(weight: float) -> RewardResult:
        rewards = [
            RewardDef(name="length", target=f"{FUNCTIONS}:length"),
            RewardDef(name="bad", target=f"{FUNCTIONS}:misbehave", weight=weight),
        ]
        with RewardRunner(rewards) as runner:
            return runner.score([sample("raise"), sample("ok")])

    weighted = run(1.0)
    assert (weighted.valid.tolist(), weighted.scores.tolist()) == ([False, True], [0.0, 2.5])
    assert weighted.graded["length"].tolist() == [True, True]
    assert weighted.by_reward["length"].tolist() == [5.0, 2.0]
    measured = run(0.0)
    assert (measured.valid.tolist(), measured.scores.tolist()) == ([True, True], [5.0, 2.0])
    assert measured.failures == {"exception": 1}


def test_a_batched_function_sees_all_samples_at_once(start: Start) -> None:
    assert start("group_size", num_workers=2).score([sample("a")] * 7).scores.tolist() == [7.0] * 7


@pytest.mark.parametrize("bad", ["raise", "none", "os_exit", "exit", "memory"])
def test_a_batched_function_that_fails_is_tried_one_by_one(start: Start, bad: str) -> None:
    responses = ["fine", "true", bad, "fine"]
    check_attribution(start("all_misbehave").score([sample(r) for r in responses]), responses)


def test_a_batched_function_that_hangs_is_tried_one_by_one(start: Start) -> None:
    responses = ["fine", "loop", "fine"]
    limits = RewardLimits(timeout_s=1.0, batched_timeout_s=1.5)
    check_attribution(start("all_misbehave", limits=limits).score([sample(r) for r in responses]), responses)


def test_a_batched_function_that_forgets_a_sample_fails_by_name_and_is_not_called_again(start: Start) -> None:
    result = start("forgets_one").score([sample("a"), sample("forgotten"), sample("b")])
    assert not result.valid.any()
    assert result.failures == {"type": 3}
    assert result.examples[0].message.startswith("3 samples, 2 scores; expected 3 values, one for each of the samples")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one", "4 samples, 1 score; expected 4 values"),
        ("more", "4 samples, more than 4 scores"),
        ("endless", "4 samples, more than 4 scores"),
        ("dict", "the function gave a dict; expected 4 values"),
        ("set", "the function gave a set"),
        ("text", "the function gave a str"),
        ("bytes", "the function gave a bytes"),
        ("number", "the function gave a float"),
        ("nothing", "the function gave a NoneType"),
    ],
)
def test_what_is_not_one_value_a_sample_fails_the_whole_batch(start: Start, how: str, message: str) -> None:
    result = start("ranked").score([sample(how)] * 4)
    assert result.failures == {"type": 4}
    assert result.examples[0].message.startswith(message)


@pytest.mark.parametrize("how", ["generator", "array", "column"])
def test_any_ordered_values_are_taken_as_they_are(start: Start, how: str) -> None:
    result = start("ranked").score([sample(how)] * 4)
    assert result.scores.tolist() == [4.0] * 4
    assert not [notice for notice in result.notices if "one by one" in notice]


def test_a_value_that_cannot_be_shown_costs_its_own_sample_of_a_batch(start: Start) -> None:
    result = start("ranked").score([sample("unshowable")] * 4)
    assert result.scores.tolist() == [4.0, 4.0, 4.0, 0.0]
    assert result.failures == {"type": 1}


def test_a_batch_that_is_graded_one_by_one_is_noted_with_the_reason(start: Start) -> None:
    result = start("all_misbehave").score([sample(text) for text in ("fine", "raise", "fine")])
    (notice,) = [notice for notice in result.notices if "one by one" in notice]
    assert re.search(
        r"a batch of 3 is graded one by one with 'all_misbehave': ZeroDivisionError: .*functions.py", notice
    )


def test_an_error_without_a_text_costs_its_own_sample_and_no_process(start: Start) -> None:
    runner = start("rude")
    pids = runner.score([sample("ab")]) and runner.pids
    result = runner.score([sample(text) for text in ("ab", "rude", "surrogate", "abc")])
    assert result.scores.tolist() == [2.0, 0.0, 0.0, 3.0]
    assert result.failures == {"exception": 2}
    assert "RudeError" in result.examples[0].message
    assert result.examples[1].message.startswith(r"ValueError: \ud800 in the text")
    assert runner.pids == pids


def test_when_no_process_can_be_kept_alive_the_rest_fails_and_nothing_hangs(start: Start) -> None:
    runner = start("misbehave", limits=RewardLimits(max_losses_in_a_row=2))
    result = runner.score([sample("fine"), *[sample("os_exit")] * 20])
    assert result.valid.tolist() == [True] + [False] * 20
    assert result.failures == {"crash": 20}
    assert runner.score([sample("fine")]).scores.tolist() == [0.5]


def test_a_batch_that_takes_too_long_ends_with_the_rest_timed_out(start: Start) -> None:
    limits = RewardLimits(timeout_s=0.7, batch_timeout_s=1.5)
    responses = [text for _ in range(8) for text in ("sleep", "fine")]
    before = time.monotonic()
    result = start("misbehave", limits=limits).score([sample(r) for r in responses])
    assert time.monotonic() - before < 20
    assert result.failures["timeout"] + int(result.valid.sum()) == 16
    assert result.valid.tolist() == [at < result.valid.sum() * 2 and at % 2 == 1 for at in range(16)]


def test_an_alarm_that_one_call_leaves_running_does_not_reach_the_next(start: Start) -> None:
    responses = ["alarm", "wait", "alarm", "wait"]
    check_attribution(start("misbehave").score([sample(r) for r in responses]), responses)


def test_signals_work_inside_a_reward_function(start: Start) -> None:
    assert start("alarm_works").score([sample("a")] * 3).scores.tolist() == [1.0] * 3


def test_what_is_printed_goes_to_the_log_and_nowhere_else(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = start("prints", "misbehave", log_path=tmp_path / "rewards.log")
    assert runner.score([sample("one"), sample("close_stdout"), sample("print"), sample("two")]).valid.all()
    text = (tmp_path / "rewards.log").read_text()
    assert "printed one\non stderr one\n" in text
    assert len(text) <= 4 << 20
    assert capfd.readouterr() == ("", "")


def test_prepare_runs_once_before_the_first_sample(start: Start) -> None:
    runner = start("prepared")
    assert runner.score([sample("a")] * 2).scores.tolist() == [1.0, 1.0]
    assert runner.score([sample("a")]).scores.tolist() == [1.0]


def test_one_process_serves_all_calls_until_it_is_lost(start: Start) -> None:
    runner = start("misbehave")
    runner.start()
    pids = runner.pids
    for _ in range(3):
        runner.score([sample("fine"), sample("raise")])
    assert runner.pids == pids
    runner.score([sample("os_exit")])
    runner.score([sample("fine")])
    assert runner.pids != pids


@pytest.mark.parametrize("kills", [1, 3])
def test_a_process_that_is_killed_while_it_loads_is_started_again_a_few_times(kills: int, tmp_path: Path) -> None:
    """As the kernel does where memory is short; found by `rlsdk chaos` (grader@restart)."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"notes = Path({str(notes)!r})\nnumber = len(list(notes.iterdir()))\n(notes / str(number)).touch()\n"
        f"if number < {kills}:\n    time.sleep(60)\n"
        "def length(sample):\n    return float(len(sample.response))\n"
    )
    runner = RewardRunner([RewardDef(name="length", target=f"{tmp_path}/slow.py:length")])
    try:
        runner.start()
        for number in range(kills):
            deadline = time.monotonic() + 20
            while not (notes / str(number)).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(runner.pids[0], signal.SIGKILL)
        if kills < 3:
            assert runner.score([sample("ab")]).scores.tolist() == [2.0]
        else:
            with pytest.raises(ConfigError, match=r"ended while it loaded .*: signal SIGKILL"):
                runner.wait_ready()
    finally:
        runner.close()


def test_a_process_that_dies_between_two_calls_costs_nothing(start: Start) -> None:
    runner = start("length")
    runner.score([sample("a")])
    os.kill(runner.pids[0], signal.SIGKILL)
    assert runner.score([sample("ab")]).scores.tolist() == [2.0]


def test_no_sample_is_no_work(start: Start) -> None:
    result = start("length", "all_lengths").score([])
    assert result.scores.shape == result.valid.shape == (0,)
    assert result.means() == {"length": 0.0, "all_lengths": 0.0}


def test_grading_is_the_same_for_any_number_of_workers(start: Start) -> None:
    samples = [sample("x" * at) for at in range(101)]
    results = [start("length", "misbehave", "all_lengths", num_workers=n).score(samples) for n in (1, 3)]
    assert results[0].scores.tolist() == results[1].scores.tolist() == [2 * at + 0.5 for at in range(101)]


def test_a_reward_that_cannot_be_loaded_is_refused_before_the_first_sample(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no function 'lenght'; did you mean 'length'"):
        start("lenght").wait_ready()
    (tmp_path / "leaves.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(ConfigError, match=r"importing '.*leaves.py' failed: .*os._exit\(5\)"):
        RewardRunner([RewardDef(name="f", target=f"{tmp_path}/leaves.py:f")]).wait_ready()
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(100)\n")
    with pytest.raises(ConfigError, match=r"took more than 0.5 s to load"):
        RewardRunner(
            [RewardDef(name="f", target=f"{tmp_path}/slow.py:f")], RewardLimits(start_timeout_s=0.5)
        ).wait_ready()


def test_what_a_function_imports_when_it_is_called_does_not_count_as_the_time_of_a_sample(tmp_path: Path) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(1.5)\nUNIT = 0.5\n")
    (tmp_path / "lazy.py").write_text(
        "def unit():\n    from takes_long import UNIT\n    return UNIT\n\n\n"
        "def absent():\n    import a_module_that_nobody_has\n\n\n"
        "def of_trl(completions, **columns):\n    return [unit() * len(text) for text in completions]\n\n\n"
        "def own(sample):\n    return unit() * len(sample.response) if sample.response else absent()\n"
    )
    limits = RewardLimits(timeout_s=0.7, batched_timeout_s=0.7)
    for name in ("own", "of_trl"):
        with RewardRunner([RewardDef(name="f", target=f"{tmp_path}/lazy.py:{name}")], limits) as runner:
            assert runner.score([sample("four")]).scores.tolist() == [2.0]


def test_wrong_definitions_are_refused() -> None:
    reward = RewardDef(name="a", target="m:f")
    for rewards in ([], [reward, reward]):
        with pytest.raises(ConfigError, match="at least one, each with its own name"):
            RewardRunner(rewards)
    with pytest.raises(ConfigError, match="num_workers is 0"):
        RewardRunner([reward], num_workers=0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        RewardLimits(timeout_s=0)


def test_what_a_rollouter_hands_over_is_json(start: Start) -> None:
    sent = RewardSample(prompt="p", response="r", answer=None, row={}, truncated=False, extra={"board": object()})
    with pytest.raises(DataError, match=r"field 'board' of the rollouter's Trajectory\.extra is a object"):
        start("length").score([sent])


def test_a_row_that_is_not_json_is_named(start: Start) -> None:
    runner = start("length")
    with pytest.raises(DataError, match="field 'image' of its row is a bytes, expected JSON types"):
        runner.score([sample("a", row={"question": "q", "image": b"x"})])
    assert runner.score([sample("abc")]).scores.tolist() == [3.0]


def test_a_batch_that_is_interrupted_leaves_nothing_for_the_next(start: Start) -> None:
    """As Ctrl-C would: the exception comes out of `score`, and later results are those of later samples."""
    runner = start("misbehave", limits=RewardLimits(timeout_s=60))
    runner.wait_ready()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.score([sample("true"), sample("sleep")])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert runner.score([sample("fine")]).scores.tolist() == [0.5]


@given(
    values=st.lists(st.floats(allow_nan=False) | st.text(max_size=20), max_size=20),
    cuts=st.lists(st.integers(1, 40), max_size=10),
)
def test_records_survive_any_cut_of_the_stream(values: list[float | str], cuts: list[int]) -> None:
    stream = b"".join(
        encode_value(v) if isinstance(v, float) else encode_record(Tag.FAILED, {"message": v}) for v in values
    )
    buffer, got = bytearray(), list[Record]()
    for size in [*cuts, len(stream)]:
        buffer += stream[:size]
        stream = stream[size:]
        got.extend(take_records(buffer))
    assert [r.value if r.body is None else r.body["message"] for r in got] == values
    assert not buffer
