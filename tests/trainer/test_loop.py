"""The loop on real reference engines in this process: no cluster, every stage, every role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsdk.config import Role, RunConfig, dump_config, load_config
from rlsdk.config.loading.recipes import recipe_names
from rlsdk.interfaces import BatchError, ConfigError, ParityError, WeightSyncError
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.roles.in_process import InProcessStore, close_in_process, start_in_process
from rlsdk.trainer.checkpoints.checkpoint import holds_model
from rlsdk.trainer.checkpoints.model_source import find_model
from rlsdk.trainer.roles.device_turns import DeviceTurns, shared_pools
from rlsdk.trainer.roles.placement import placement_of, roles
from rlsdk.trainer.roles.session import Session, sharding_manager, start_roles
from rlsdk.trainer.runs.build_rl import rl_stage
from rlsdk.trainer.runs.run_inputs import RunInputs, build_run_inputs
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.stages.rl import RlStage
from rlsdk.trainer.tracking.events import RunView

HERE = Path(__file__).parent
TIMED = ("time/", "throughput/")
TASK = [
    "--data", str(HERE.parent / "e2e" / "sums.jsonl"),
    "--data.num_eval_rows", "8", "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "5",
    "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4", "--trainer.updates_per_step", "2",
    "--train.optim.lr", "1e-3", "--train.optim.warmup_steps", "0", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[]", "--eval.every_steps", "null", "--trainer.save_every_steps", "2",
]  # fmt: skip


class Recorder(RunView):
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.steps: list[Mapping[str, float]] = []
        self.evals: list[Mapping[str, float]] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append({k: v for k, v in metrics.items() if not k.startswith(TIMED)})

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evals.append({k: v for k, v in metrics.items() if not k.startswith(TIMED)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


def config_of(model: str, registry: Registry, steps: int, *extra: str, reward: str = "share_of_digits") -> RunConfig:
    task = ["--model", model, *TASK, "--reward", f"{HERE / 'rewards.py'}:{reward}", "--trainer.steps", str(steps)]
    return load_config([], [*task, *extra], registry)


def session_of(config: RunConfig, registry: Registry, replicas: int = 1, *, forced: bool = False) -> Session:
    """`forced`: roles take turns on one device, as on a GPU."""
    table = roles(config, "cpu")
    placement = placement_of(config.placement, [role.name for role in table], "cpu")
    turns = DeviceTurns(shared=shared_pools(placement, forced=forced))

    def build(role: Role) -> Any:
        return start_in_process(role, registry, ranks=replicas if role.is_rollout else 1)

    groups = start_roles(table, build, turns)
    manager = sharding_manager(config.sharding, registry, groups["actor"], groups["rollout"], timeout_s=60.0)
    return Session(roles=groups, turns=turns, cluster=InProcessStore(), manager=manager)


@contextmanager
def closing_engines(session: Session) -> Iterator[Session]:
    try:
        yield session
    finally:
        close_in_process(session.roles.values())


@contextmanager
def trainer_of(
    config: RunConfig,
    registry: Registry,
    folder: Path,
    view: RunView,
    *,
    replicas: int = 1,
    forced: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Trainer, RlStage, RunInputs]]:
    folder.mkdir(exist_ok=True)
    session = session_of(config, registry, replicas, forced=forced)
    with closing_engines(session), closing(build_run_inputs(config, registry, folder, view)) as run_inputs:
        stage = rl_stage(config, registry, run_inputs, session)
        with closing(stage):
            yield (
                Trainer(
                    stage,
                    session,
                    tokenizer=run_inputs.tokenizer,
                    config_text=dump_config(config),
                    keep_checkpoints=3,
                    stop=stop,
                ),
                stage,
                run_inputs,
            )


def run(config: RunConfig, registry: Registry, folder: Path, **more: Any) -> Recorder:
    view = Recorder()
    with trainer_of(config, registry, folder, view, **more) as (trainer, _, _):
        trainer.fit()
    return view


def test_a_run_that_is_resumed_goes_on_number_for_number(model: str, registry: Registry, tmp_path: Path) -> None:
    whole = run(config_of(model, registry, 4), registry, tmp_path / "whole")
    assert [round(m["policy/version"]) for m in whole.steps] == [2, 4, 6, 8]
    part, view = config_of(model, registry, 4), Recorder()
    with trainer_of(part, registry, tmp_path / "part", view, stop=lambda: len(view.steps) == 2) as (trainer, _, _):
        trainer.fit()
    rest = Recorder()
    with trainer_of(part, registry, tmp_path / "part", rest) as (trainer, stage, _):
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        assert stage.step == 2
        trainer.fit()
    assert [*view.steps, *rest.steps] == whole.steps


def test_checkpoints_in_between_need_not_hold_the_model(model: str, registry: Registry, tmp_path: Path) -> None:
    """Saved after every step, exported after the third, and at the end."""
    config = config_of(model, registry, 4, "--trainer.save_every_steps", "1", "--trainer.export_every_steps", "3")
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, _, _):
        trainer.store.keep = 9
        trainer.fit()
        held = {step: holds_model(path) for step, path in trainer.store.whole()}
        assert held == {1: False, 2: False, 3: True, 4: True}
        assert find_model(tmp_path / "run").model == trainer.store.path_of(4) / "model"
        with pytest.raises(ConfigError, match=r"step_00000002' has no model/ \(trainer.export_every_steps.*_00000003"):
            find_model(trainer.store.path_of(2))


def test_replicas_and_turns_on_one_device_change_no_number_that_matters(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    plain = run(config_of(model, registry, 2), registry, tmp_path / "a")
    turns = run(config_of(model, registry, 2), registry, tmp_path / "b", forced=True)
    assert turns.steps == plain.steps
    three = run(config_of(model, registry, 2), registry, tmp_path / "c", replicas=3)
    for mine, theirs in zip(three.steps, plain.steps, strict=True):
        assert mine.pop("sync/bytes") == 3 * theirs.pop("sync/bytes")  # type: ignore[attr-defined]
        assert mine == {name: pytest.approx(value, abs=2e-5) for name, value in theirs.items()}


def test_five_roles_train_with_a_critic_a_reference_and_a_reward_model(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(
        model, registry, 3, "--algorithm.advantage", "gae", "--algorithm.kl_coef", "0.05",
        "--algorithm.kl_in_reward", "true", "--critic.optim.lr", "1e-3", "--critic.warmup_steps", "1",
        "--critic.optim.warmup_steps", "0", "--reward_models", f"[{{path: {model}, name: good, weight: 0.1}}]",
    )  # fmt: skip
    view = run(config, registry, tmp_path / "ppo", forced=True)
    first, _, third = view.steps
    assert "policy/loss" not in first  # the critic warms up
    assert first["policy/version"] == 0
    assert third["policy/version"] == 4
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(m["critic/grad_norm"] > 0 for m in view.steps)
    assert {"reward/reward.good", "critic/explained_variance", "policy/kl_coef"} <= third.keys()
    checkpoint = tmp_path / "ppo" / "checkpoints" / "step_00000003"
    assert (checkpoint / "critic").is_dir()


def test_the_kl_penalty_in_the_reward_reads_log_probs_of_every_row(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """With several updates a step the first mini-batch's rows had zeros: a KL of many nats where it is 0."""
    config = config_of(model, registry, 1, "--algorithm.kl_coef", "0.1", "--algorithm.kl_in_reward", "true")
    view = Recorder()
    with trainer_of(config, registry, tmp_path / "kl", view) as (trainer, stage, _):
        rewards: list[torch.Tensor] = []
        advantages = stage.learner.algorithm.advantages

        def seen(batch: Any) -> Any:
            found = advantages(batch)
            rewards.append(found[0]["token_level_rewards"] - _scores(found[0]))
            return found

        stage.learner.algorithm.advantages = seen  # type: ignore[method-assign]
        trainer.fit()
    assert rewards[0].abs().max() < 1e-6
    assert view.steps[0]["policy/kl"] == pytest.approx(0.0, abs=1e-6)


def _scores(batch: Any) -> torch.Tensor:
    """Each row's score on its last token."""
    flat = torch.zeros(batch.num_tokens, dtype=torch.float64)
    flat[batch.offsets[1:] - 1] = batch["scores"]
    return flat


@pytest.mark.parametrize("old", ["auto", "always", "decoupled"])
def test_a_correction_weighs_next_to_nothing_between_engines_that_agree(
    model: str, registry: Registry, tmp_path: Path, old: str
) -> None:
    extra = ["--algorithm.old_log_probs", old, "--algorithm.correction.mode", "mask"]
    plain = run(config_of(model, registry, 2), registry, tmp_path / "a")
    view = run(config_of(model, registry, 2, *extra), registry, tmp_path / "b")
    assert view.steps[0]["mismatch/kl_k3"] < 1e-9
    assert view.steps[0]["mismatch/ess_sequence"] > 0.999
    assert view.steps[1]["reward/mean"] == pytest.approx(plain.steps[1]["reward/mean"], abs=1e-4)


def test_a_stretch_without_signal_goes_on(model: str, registry: Registry, tmp_path: Path) -> None:
    """Every reward is the same: gradients are zero, weights stay, and nothing ends the run."""
    config = config_of(model, registry, 4, reward="constant")
    view = run(config, registry, tmp_path / "flat")
    assert len(view.steps) == 4
    assert [m["policy/grad_norm"] for m in view.steps] == [0.0] * 4
    assert view.steps[-1]["reward/groups_with_signal"] == 0.0


def test_an_update_too_small_for_the_dtype_goes_on(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 3, "--model.dtype", "bfloat16", "--train.optim.lr", "1e-12")
    assert len(run(config, registry, tmp_path / "small").steps) == 3


def test_weights_that_do_not_reach_the_replicas_end_the_run(model: str, registry: Registry, tmp_path: Path) -> None:
    """An engine that trains a copy of what it hands out."""
    config = config_of(model, registry, 3)
    with trainer_of(config, registry, tmp_path / "stale", Recorder()) as (trainer, stage, _):
        engine = stage.learner.session.actor.group.hosts[0].engine  # type: ignore[attr-defined]
        frozen = {name: p.detach().clone() for name, p in engine.engine.parameters.items()}
        step = engine.optim_step

        def forgets() -> Any:
            result = step()
            for name, parameter in engine.engine.parameters.items():
                parameter.data.copy_(frozen[name])
            return result

        engine.optim_step = forgets
        with pytest.raises(WeightSyncError, match="no tensor changed"):
            trainer.fit()


def test_engines_are_compared_in_every_step_and_not_in_the_first_alone(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """From the second step on the sampler's log-probs are half a nat too low."""
    gate = ["--trainer.parity_threshold", "0.01", "--trainer.parity_action", "error"]
    with trainer_of(config_of(model, registry, 3, *gate), registry, tmp_path / "gate", Recorder()) as (
        trainer,
        stage,
        _,
    ):
        learn = stage.learner.learn

        def drifted(batch: Any, step: int, clock: Any) -> Any:
            low = batch["rollout_log_probs"] - 0.5
            return learn(batch if step == 0 else batch.with_tokens(rollout_log_probs=low), step, clock)

        stage.learner.learn = drifted  # type: ignore[method-assign]
        with pytest.raises(ParityError, match=r"differ by 0\.50\d\d nats on average"):
            trainer.fit()
        assert stage.step == 2


def test_a_callback_that_raises_ends_the_run_after_a_save(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 5, "--trainer.callbacks", f"[{HERE / 'rewards.py'}:stop_at_three]")
    with trainer_of(config, registry, tmp_path / "called", Recorder()) as (trainer, _, _):
        with pytest.raises(ValueError, match="three"):
            trainer.fit()
        assert trainer.last_checkpoint is not None
        assert trainer.last_checkpoint.name == "step_00000003"


def test_failed_rewards_are_no_zeros(model: str, registry: Registry, tmp_path: Path) -> None:
    """Neither in the means, nor among the groups with signal; and too many end the run."""
    some = config_of(model, registry, 1, "--eval.every_steps", "1", reward="fails_on_some")
    view = run(some, registry, tmp_path / "some")
    step = view.steps[0]
    assert 0 < step["reward/invalid_share"] <= 0.5
    assert step["reward/mean"] == 1.0
    assert step["reward/groups_with_signal"] == 0.0
    assert view.evals[-1]["eval/reward_sampled"] == 1.0
    assert view.evals[-1]["eval/invalid_share_sampled"] > 0
    assert any(text.startswith("evaluation (sampled):") for text in view.notices)
    with pytest.raises(BatchError, match=r"100% of the step, more than reward_limits.max_failure_share 50%"):
        run(config_of(model, registry, 1, reward="always_fails"), registry, tmp_path / "all")


def test_epochs_are_cut_anew(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 1, "--trainer.epochs_per_step", "2")
    cuts: list[Sequence[Sequence[int]]] = []
    with trainer_of(config, registry, tmp_path / "epochs", Recorder()) as (trainer, stage, _):
        plans = stage.learner.algorithm._plans  # type: ignore[attr-defined]

        def seen(batch: Any, step: int) -> Any:
            found = plans(batch, step)
            cuts.extend([rows.tolist() for rows in cut] for _, cut in found)
            return found

        stage.learner.algorithm._plans = seen  # type: ignore[attr-defined]
        trainer.fit()
    assert len(cuts) == 2
    assert cuts[0] != cuts[1]
    for cut in cuts:
        assert sorted(row for rows in cut for row in rows) == list(range(16))


def test_groups_without_signal_are_replaced_and_the_resume_knows_how_far_the_data_went(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """Of the two halves of a run the second begins behind what the first refilled with. Which groups share a decoding
    step depends on when others were graded, and so do the last digits of log-probs."""
    extra = ["--algorithm", "dapo", "--algorithm.dynamic_sampling.min_spread", "0.25"]
    whole = run(config_of(model, registry, 4, *extra), registry, tmp_path / "whole")
    assert sum(m["rollout/rejected_groups"] for m in whole.steps) > 0
    part, view = config_of(model, registry, 4, *extra), Recorder()
    with trainer_of(part, registry, tmp_path / "part", view, stop=lambda: len(view.steps) == 2) as (trainer, _, _):
        trainer.fit()
    rest = Recorder()
    with trainer_of(part, registry, tmp_path / "part", rest) as (trainer, stage, _):
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        trainer.fit()
        assert stage.source.rejected is not None
    for mine, theirs in zip([*view.steps, *rest.steps], whole.steps, strict=True):
        assert mine == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in theirs.items()}


def test_remax_measures_each_sample_against_a_greedy_one(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 1, "--algorithm", "remax", "--trainer.samples_per_prompt", "2")
    batches: list[Any] = []
    view = Recorder()
    with trainer_of(config, registry, tmp_path / "remax", view) as (trainer, stage, _):
        learn = stage.learner.learn

        def seen(batch: Any, step: int, clock: Any) -> Any:
            found = learn(batch, step, clock)
            batches.append(found.batch)
            return found

        stage.learner.learn = seen  # type: ignore[method-assign]
        trainer.fit()
    (batch,) = batches
    assert batch.num_rows == 8
    assert batch["baseline_scores"].isfinite().all()
    for uid in batch["uid"].unique().tolist():
        assert batch["baseline_scores"][batch["uid"] == uid].unique().numel() == 1
    mask = batch["response_mask"]
    last = [int(batch.token_index(torch.tensor([row]))[-1]) for row in range(8)]
    assert mask[last].all()
    gain = batch["scores"] - batch["baseline_scores"]
    assert torch.allclose(batch["advantages"][last], gain.float(), atol=1e-6)
    assert view.steps[0]["policy/entropy"] == pytest.approx(-float(batch["rollout_log_probs"][mask].mean()))


def test_scores_far_from_zero_teach_what_those_near_it_do(model: str, registry: Registry, tmp_path: Path) -> None:
    """In float32 all scores of a group were one number, and nothing was learned; the metrics said that they differ."""
    near, far = (
        run(config_of(model, registry, 2, reward=reward), registry, tmp_path / reward).steps
        for reward in ("number_of_digits", "large")
    )
    for one, other in zip(near, far, strict=True):
        for name in ("reward/groups_with_signal", "reward/std", "policy/grad_norm", "policy/loss"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
        assert other["reward/mean"] - 1e8 == pytest.approx(one["reward/mean"], abs=1e-6)
        assert one["policy/grad_norm"] > 0


def test_scores_that_differ_by_rounding_only_are_no_signal(model: str, registry: Registry, tmp_path: Path) -> None:
    """With dynamic sampling, such groups were accepted, and had no advantage."""
    flags = ["--algorithm.dynamic_sampling.enabled", "true", "--algorithm.dynamic_sampling.max_groups", "1.5"]
    view = run(config_of(model, registry, 1, *flags, reward="rounded"), registry, tmp_path / "rounded")
    assert view.steps[0]["reward/groups_with_signal"] == 0.0
    assert view.steps[0]["policy/grad_norm"] == 0.0
    assert view.steps[0]["rollout/rejected_groups"] == 2.0


def test_samples_of_a_part_of_the_distribution_show_no_entropy(model: str, registry: Registry, tmp_path: Path) -> None:
    view = run(config_of(model, registry, 1, "--rollout.top_p", "0.9"), registry, tmp_path / "cut")
    assert "policy/entropy" not in view.steps[0]
    assert view.steps[0]["policy/sample_nll"] > 0


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_trains(model: str, registry: Registry, tmp_path: Path, name: str) -> None:
    # The tiny model never ends a response by itself: all would be filtered.
    extra = ["--trainer.samples_per_prompt", "4", "--algorithm.lengths.overlong_filter", "false"]
    if name == "on_policy_distillation":
        extra += ["--teachers", str(write_tiny_model(tmp_path / "teacher", seed=9))]
    config = config_of(model, registry, 2, "--algorithm", name, *extra)
    assert config.algorithm.recipe == name
    view = run(config, registry, tmp_path / name)
    assert all(m["policy/grad_norm"] > 0 for m in view.steps)


def test_several_updates_with_a_loss_without_a_ratio_are_warned_of(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """Nothing was said, and ReMax fell to no right answer at all."""
    view = Recorder()
    config = config_of(model, registry, 1, "--algorithm", "remax", "--trainer.updates_per_step", "2")
    with trainer_of(config, registry, tmp_path / "run", view):
        pass
    assert [text for text in view.notices if "algorithm.loss 'reinforce' has no ratio and no clip" in text]
