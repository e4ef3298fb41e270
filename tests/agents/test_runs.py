"""What a run makes of `rollout.environment`: what it refuses, and what it plays."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_cases import Scripted, prompt_of

from rlsdk.agents.environments.naming import find_environment
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.config import RunConfig, load_config
from rlsdk.interfaces import ConfigError, Ended, PluginNotFoundError, hookimpl
from rlsdk.registry import Registry
from rlsdk.trainer.inputs.environments import check_response_template, environment_rollouter, load_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "guess"
sys.path.insert(0, str(EXAMPLE))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's data and model."""
    import games

    folder = tmp_path_factory.mktemp("guess")
    games.main(folder)
    return folder


def config_of(task: Path, *arguments: str) -> RunConfig:
    flags = ["--model", str(task / "model"), "--data", str(task / "train.jsonl"), *arguments]
    return load_config([str(EXAMPLE / "run.yaml")], flags, Registry.discover())


def test_the_example_is_played_in_its_own_format(task: Path) -> None:
    from transformers import AutoTokenizer

    config = config_of(task, "--rollout.environment", f"{EXAMPLE / 'guess.py'}:Guess")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    rollout = environment_rollouter(config, tokenizer)
    rollout = type(rollout)(environment=rollout.environment, form=_ended(tokenizer), limits=rollout.limits)
    row = json.loads((task / "train.jsonl").read_text().splitlines()[0])
    policy = Scripted(tokenizer, ["g1", "g15", f"g{row['answer']}", "never"])
    prompt = prompt_of(**row)
    episode = asyncio.run(rollout(prompt, policy))
    assert (episode.ended, episode.reward) == (Ended.AGENT, 1.0)
    assert episode.info["tool_calls"] == len(policy.calls)
    assert episode.info["tool_errors"] == 0


def _ended(tokenizer: Any) -> Any:
    """The chat format with the scripted policy's end of a turn."""
    from rlsdk.agents.chats.chat_format import ChatFormat

    return ChatFormat(tokenizer, stop_token_ids=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(";")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.rollouter", "mine.py:fn"], r"rollout.rollouter: 'mine.py:fn': expected 'single_turn', because"),
        (["--rollout.environment", "Guess"], r"rollout.environment: 'Guess': expected file.py:Class"),
        (["--rewards", "[{name: exact, label: environment}]"], r"rewards.0.label.*another label: 'environment' is"),
        (["--data.chat_template", "never"], r"data.chat_template: 'never': expected auto, because"),
        (["--data.allow_special_tokens", "true"], r"data.allow_special_tokens: True: expected false"),
        (["--rollout.max_model_tokens", "null"], r"rollout.max_model_tokens.*rollout.environment is"),
    ],
)
def test_settings_that_do_not_go_with_an_environment_are_refused(
    task: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(task, *arguments)


def test_a_class_or_option_that_there_is_not_is_named(task: Path) -> None:
    file = EXAMPLE / "guess.py"
    with pytest.raises(ConfigError, match=r"did you mean 'Guess'"):
        load_environment(config_of(task, "--rollout.environment", f"{file}:Gues"))
    options = ["--rollout.environment", f"{file}:Guess", "--rollout.environment_options", "{highest: 3}"]
    with pytest.raises(ConfigError, match=r"environment_options: .*guess.py:Guess' is not made with them"):
        load_environment(config_of(task, *options))


def test_a_broken_response_template_is_refused_before_a_tokenizer_is_loaded(task: Path, tmp_path: Path) -> None:
    config = config_of(task, "--rollout.environment", f"{EXAMPLE / 'guess.py'}:Guess")
    check_response_template(config)
    settings = json.loads((task / "model" / "tokenizer_config.json").read_text())
    settings["response_template"]["fields"]["content"]["open"] = 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    broken = config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": str(tmp_path)})})
    with pytest.raises(ConfigError, match=r"response_template is refused: Field 'content': 'open' must be"):
        check_response_template(broken)
    named = broken.rollout.model_copy(update={"tool_format": "json_in_tags"})
    check_response_template(broken.model_copy(update={"rollout": named}))


def test_an_environment_of_a_plugin_is_named_with_a_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        def reset(self) -> None:
            pass

        def ask(self, **arguments: object) -> str:
            return ""

    Made.ask.tool_schema = {"description": "Asks.", "parameters": {}}  # type: ignore[attr-defined]

    class Plugin:
        @hookimpl
        def rlsdk_register_environments(self, register: Any) -> None:
            register("worlds", lambda rest: type(rest, (Made,), {}), "Worlds.")

    registry = Registry()
    registry.register_module(Plugin())
    monkeypatch.setattr(Registry, "discover", classmethod(lambda cls: registry))
    made = find_environment("worlds:Small:one")
    (tool,) = EnvironmentClass.of(made, "worlds:Small:one").tools
    assert (made.__name__, tool["function"]["description"]) == ("Small:one", "Asks.")
    with pytest.raises(ConfigError, match="expected worlds:REST"):
        find_environment("worlds:")
    with pytest.raises(PluginNotFoundError, match="pip install rlsdk-openenv"):
        find_environment("openenv:http://h")
    with pytest.raises(PluginNotFoundError, match="did you mean 'worlds'"):
        find_environment("world:Small")
