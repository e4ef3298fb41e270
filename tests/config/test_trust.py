"""What comes with a run is not run, unless the command line says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.config import RewardConfig, RunConfig, dump_config, load_config
from rlsdk.config.introspection.describe import describe_options
from rlsdk.config.loading.trust import FUNCTION_FIELDS, code_in
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry

HOSTILE = """
model: {path: m, trust_remote_code: true}
rewards: [{name: "runs/x/evil.py:fn"}, {name: gsm8k}]
algorithm: {advantage: "os:system", loss: "evil.py:loss"}
trainer: {callbacks: ["evil.py:step"]}
train: {engine_kwargs: {a.b: 1}}
rollout: {engine_kwargs: {worker_cls: evil.Worker}}
placement: {ray_address: "198.51.100.7:6379"}
tracking: {trackers: [jsonl, mlflow], options: {mlflow: {tracking_uri: "http://198.51.100.7"}, jsonl: {}}}
"""
ALL = (
    "model.trust_remote_code", "rewards.0.name", "algorithm.advantage", "algorithm.loss", "trainer.callbacks.0",
    "train.engine_kwargs.a.b", "rollout.engine_kwargs.worker_cls", "placement.ray_address",
    "tracking.trackers.1", "tracking.options.mlflow.tracking_uri",
)  # fmt: skip


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Somebody else's run."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(HOSTILE)
    return tmp_path / "run"


def test_every_field_that_runs_code_is_refused_and_named(run: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["--config", str(run / "config.yaml")], registry)
    text = str(caught.value)
    assert "add --trust-run" in text
    assert [path for path in ALL if f"\n  {path}: " not in text] == []
    assert "rewards.1" not in text, "a registered reward runs nothing of the run"
    assert f"{run}/config.yaml:3" in text


def test_arguments_of_every_roles_engine_run_code(run: Path, registry: Registry) -> None:
    (run / "config.yaml").write_text(
        "critic: {engine_kwargs: {hook: evil}}\nref: {engine_kwargs: {hook: evil}}\n"
        "reward_models: [{path: m, engine_kwargs: {hook: evil}}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config([run / "config.yaml"], [], registry)
    for path in ("critic.engine_kwargs.hook", "ref.engine_kwargs.hook", "reward_models.0.engine_kwargs.hook"):
        assert f"\n  {path}: " in str(caught.value)


def test_graders_are_not_given_more_than_the_command_line_gives(run: Path, registry: Registry) -> None:
    """The reward `code` runs programs that the run's own model writes."""
    loose = "allow_network: true, allow_writes: true, isolation: never, environment: [HF_TOKEN]"
    (run / "config.yaml").write_text(f"rewards: [{{name: code}}]\nreward_limits: {{{loose}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([run / "config.yaml"], [], registry)
    for field in ("allow_network", "allow_writes", "isolation", "environment.0"):
        assert f"\n  reward_limits.{field}: " in str(caught.value)
    strict = "allow_network: false, allow_writes: false, isolation: always, environment: [], timeout_s: 3.0"
    (run / "config.yaml").write_text(f"rewards: [{{name: code}}]\nreward_limits: {{{strict}}}\n")
    load_config([run / "config.yaml"], [], registry)


@pytest.mark.parametrize("section", ["rollout", "train"])
def test_an_engine_on_a_server_of_a_run_gets_no_prompts(section: str) -> None:
    found = dict(code_in({section: {"options": {"url": "http://198.51.100.7", "name": "x"}}}))
    assert found == {(section, "options", "url"): "http://198.51.100.7"}
    assert dict(code_in({section: {"options": {"url": None}}})) == {}


def test_asked_for_on_the_command_line_it_counts(run: Path, registry: Registry) -> None:
    config = load_config([run / "config.yaml"], ["--trust-run", "--steps", "3"], registry)
    assert config.model.trust_remote_code
    assert config.rewards[0].name == "runs/x/evil.py:fn"
    assert config.trainer.steps == 3


def test_a_file_that_the_person_wrote_and_flags_are_their_own_word(
    tmp_path: Path, run: Path, registry: Registry
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(HOSTILE)
    assert load_config([own], [], registry).model.trust_remote_code
    flags = [
        "--model.trust_remote_code", "false", "--reward", "mine.py:fn", "--algorithm.advantage", "grpo",
        "--algorithm.loss=mine.py:loss", "--trainer.callbacks", "[]", "--train.engine_kwargs", "{}",
        "--rollout.engine_kwargs", "{}", "--placement.ray_address", "null", "--tracking.trackers", "[jsonl]",
        "--tracking.options", "{}",
    ]  # fmt: skip
    config = load_config([run / "config.yaml"], flags, registry)
    assert (config.rewards[0].name, config.algorithm.loss) == ("mine.py:fn", "mine.py:loss")
    with pytest.raises(ConfigError, match=r"algorithm\.loss"):
        load_config([run / "config.yaml"], [*flags[:6], *flags[7:]], registry)
    # The person's file after the run's: what it does not set is still the run's.
    own.write_text("rewards: [{name: mine.py:fn}]")
    with pytest.raises(ConfigError) as caught:
        load_config([run / "config.yaml", own], [], registry)
    assert "rewards" not in str(caught.value)
    assert "trust_remote_code" in str(caught.value)


def test_a_flag_does_not_vouch_for_a_key_that_only_looks_like_it(run: Path, registry: Registry) -> None:
    (run / "config.yaml").write_text("rollout: {engine_kwargs: {a.b: evil}}")
    with pytest.raises(ConfigError, match=r"engine_kwargs\.a\.b"):
        load_config([run / "config.yaml"], ["--rollout.engine_kwargs.a", "1"], registry)


@pytest.mark.parametrize("mark", ["metrics.jsonl", ".lock", "manifest.json"])
def test_a_run_is_known_by_what_stands_beside_its_configuration(mark: str, tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "config.yaml").write_text("rewards: [{name: evil.py:fn}]")
    assert load_config([tmp_path / "config.yaml"], [], registry).rewards
    (tmp_path / mark).touch()
    with pytest.raises(ConfigError, match="--trust-run"):
        load_config([tmp_path / "config.yaml"], [], registry)
    (tmp_path / "other.yaml").write_text("rewards: [{name: evil.py:fn}]")
    with pytest.raises(ConfigError, match="--trust-run"):
        load_config([tmp_path / "other.yaml"], [], registry)
    link = tmp_path.parent / f"{mark}.yaml"
    link.symlink_to(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="--trust-run"):
        load_config([link], [], registry)


def test_what_lies_in_the_folder_that_is_resumed_is_that_run_s(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "recipe.yaml").write_text("rewards: [{name: evil.py:fn}]")
    files = [tmp_path / "given" / "recipe.yaml"]
    assert load_config(files, [], registry).rewards
    with pytest.raises(ConfigError, match="--trust-run"):
        load_config(files, ["--resume", str(tmp_path / "given")], registry)


def test_a_run_without_code_needs_no_flag(run: Path, registry: Registry) -> None:
    plain = load_config([], ["--model", "m", "--data", "quickstart:spell_backward", "--reward", "gsm8k"], registry)
    (run / "config.yaml").write_text(dump_config(plain))
    assert load_config([run / "config.yaml"], ["--resume", str(run)], registry).rewards == plain.rewards
    assert list(code_in(plain.model_dump())) == []


def test_only_the_sections_that_a_command_acts_on_are_asked(run: Path, registry: Registry) -> None:
    (run / "config.yaml").write_text("rewards: [{name: evil.py:fn}]")
    assert load_config([run / "config.yaml"], [], registry, sections=("model", "data"))
    with pytest.raises(ConfigError, match="--trust-run"):
        load_config([run / "config.yaml"], [], registry, sections=("rewards",))


def test_every_field_that_takes_a_function_is_known_here() -> None:
    options = {option.path: option.doc for option in describe_options(RunConfig)}
    options |= {f"rewards.*.{option.path}": option.doc for option in describe_options(RewardConfig)}
    said = {path for path, doc in options.items() if "pkg.mod:" in doc}
    assert said == {field.removesuffix(".*") for field in FUNCTION_FIELDS}


def test_a_reward_of_an_evaluation_set_is_code_like_any_other() -> None:
    fields = {"eval": {"sets": {"mine": {"rewards": [{"name": "acme.rewards:fn"}, {"name": "gsm8k"}]}}}}
    found = [place for place, _ in code_in(fields)]
    assert found == [("eval", "sets", "mine", "rewards", 0, "name")]
