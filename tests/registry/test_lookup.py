"""Looking names up: what is found, and what the error says when it is not."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from registry_plugins import Install, backend_source

from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    PluginLoadError,
    PluginNotFoundError,
    RegisterBackend,
    RegisterComponent,
    hookimpl,
)
from rlsdk.registry import ComponentKind, Registry, State

ENGINE = "from rlsdk.interfaces import TrainEngine\nclass Engine(TrainEngine):\n    def layout(self): ...\n"


class InProcess:
    """A plugin that is not installed."""

    def __init__(self, *names: str, kind: BackendKind = BackendKind.TRAIN) -> None:
        self.names = names
        self.kind = kind

    @hookimpl
    def rlsdk_register_backends(self, register: RegisterBackend) -> None:
        for name in self.names:
            register(BackendSpec(name=name, kind=self.kind, engine="somewhere:Engine"))

    @hookimpl
    def rlsdk_register_sharding_managers(self, register: RegisterComponent) -> None:
        register("*+*", list)
        register("fast+*", dict)
        register("fast+other", set)


@pytest.fixture
def registry() -> Registry:
    return Registry.discover({})


def test_a_misspelt_backend_answers_with_the_nearest_name_and_what_is_installed(registry: Registry) -> None:
    with pytest.raises(
        PluginNotFoundError, match=r"'torhc' is not installed \(installed: .*'torch'.*did you mean 'torch'"
    ):
        registry.backend(BackendKind.TRAIN, "torhc")


def test_a_misspelt_backend_that_is_not_installed_either_answers_with_the_pip_command() -> None:
    with pytest.raises(PluginNotFoundError, match=r"did you mean 'vllm'\? Then run `pip install rlsdk-vllm`"):
        Registry().backend(BackendKind.ROLLOUT, "vlm")


@pytest.mark.parametrize(
    ("kind", "name"), [("train", "megatron"), ("train", "deepspeed"), ("rollout", "vllm"), ("rollout", "sglang")]
)
def test_a_known_backend_that_is_not_installed_answers_with_the_pip_command(kind: str, name: str) -> None:
    with pytest.raises(PluginNotFoundError, match=f"run `pip install rlsdk-{name}`"):
        Registry().backend(BackendKind(kind), name)


def test_a_name_of_another_kind_is_explained(registry: Registry) -> None:
    with pytest.raises(PluginNotFoundError, match="'transformers' is a rollout backend, not a train backend"):
        registry.backend(BackendKind.TRAIN, "transformers")
    with pytest.raises(PluginNotFoundError, match="'vllm' is a rollout backend, not a train backend"):
        registry.backend(BackendKind.TRAIN, "vllm")
    with pytest.raises(PluginNotFoundError, match="'ppo_clip' is a loss, not an advantage"):
        registry.component(ComponentKind.ADVANTAGE, "ppo_clip")


def test_an_empty_registry_says_that_nothing_is_installed() -> None:
    with pytest.raises(PluginNotFoundError, match="installed: none"):
        Registry().component(ComponentKind.REWARD, "gsm8k")


def test_a_plugin_registers_in_process(registry: Registry) -> None:
    rows = registry.register_module(InProcess("mine"), distribution="mine-dist", version="3")
    assert [row.state for row in rows if row.kind == BackendKind.TRAIN] == [State.READY]
    assert "mine" in registry.usable(BackendKind.TRAIN)
    assert str(registry.row(BackendKind.TRAIN, "mine").source) == "mine-dist 3"


def test_registering_one_name_twice_is_a_clash_even_within_a_plugin() -> None:
    registry = Registry()
    rows = registry.register_module(InProcess("twin", "twin"))
    assert {row.state for row in rows if row.name == "twin"} == {State.CLASH}
    assert "2 times" in rows[0].reason


def test_the_closest_sharding_manager_is_chosen_for_a_pair() -> None:
    registry = Registry()
    registry.register_module(InProcess())
    assert registry.sharding_manager("fast", "other") is set
    assert registry.sharding_manager("fast", "any") is dict
    assert registry.sharding_manager("slow", "other") is list
    assert registry.sharding_manager("slow", "other", "fast+*") is dict
    with pytest.raises(PluginNotFoundError):
        registry.sharding_manager("slow", "other", "slow+other")


def test_an_engine_is_imported_only_when_it_is_asked_for(install: Install, site: Path) -> None:
    marker = site / "imported"
    install("rlsdk-acme", backend_source("acme"))
    (site / "acme_engine.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise OSError('libacme.so not found')")
    registry = Registry.discover()
    spec = registry.backend(BackendKind.TRAIN, "acme")
    assert not marker.exists()
    with pytest.raises(PluginLoadError, match=r"'acme' \(rlsdk-acme 1.0\) is installed.*OSError: libacme") as caught:
        registry.load_engine(spec)
    assert isinstance(caught.value.__cause__, OSError)


def test_an_engine_that_lacks_a_method_or_is_of_another_kind_is_a_bug_of_its_plugin(
    install: Install, site: Path
) -> None:
    install("rlsdk-acme", backend_source("acme"))
    install("rlsdk-roll", backend_source("acme", "roll", "ROLLOUT"))
    (site / "acme_engine.py").write_text(ENGINE)
    registry = Registry.discover()
    with pytest.raises(PluginLoadError, match=r"lacks \['forward', .*bug of the plugin"):
        registry.load_engine(registry.backend(BackendKind.TRAIN, "acme"))
    with pytest.raises(PluginLoadError, match=r"not a subclass of rlsdk\.interfaces\.RolloutEngine"):
        registry.load_engine(registry.backend(BackendKind.ROLLOUT, "roll"))


@pytest.mark.parametrize(
    ("attribute", "reason"), [("missing", "AttributeError"), ("number", "neither a dataclass nor")]
)
def test_options_that_are_no_class_of_fields_are_a_bug_of_the_plugin(
    install: Install, site: Path, attribute: str, reason: str
) -> None:
    install("rlsdk-acme", backend_source("acme", more=f"options='acme_options:{attribute}'"))
    (site / "acme_options.py").write_text("number = 5\n")
    registry = Registry.discover()
    with pytest.raises(PluginLoadError, match=reason):
        registry.load_options(registry.backend(BackendKind.TRAIN, "acme"))


def test_a_component_that_cannot_be_imported_is_a_loud_error() -> None:
    registry = Registry()

    @hookimpl
    def rlsdk_register_rewards(register: RegisterComponent) -> None:
        register("gone", "no_such_module:reward")
        register("odd", 5)

    registry.register_module(SimpleNamespace(rlsdk_register_rewards=rlsdk_register_rewards))
    with pytest.raises(PluginLoadError, match=r"reward 'gone'.*No module named 'no_such_module'"):
        registry.component(ComponentKind.REWARD, "gone")
    with pytest.raises(PluginLoadError, match=r"target 5: expected 'package\.module:attribute'"):
        registry.component(ComponentKind.REWARD, "odd")


def test_a_registry_survives_pickling_without_the_exceptions(install: Install) -> None:
    install("rlsdk-bad", "import threading\nclass E(Exception):\n    lock = threading.Lock()\nraise E()", entry="bad")
    registry = Registry.discover()
    copy = pickle.loads(pickle.dumps(registry))
    assert [(row.name, row.state) for row in copy.rows()] == [(row.name, row.state) for row in registry.rows()]
    assert copy.backend(BackendKind.TRAIN, "torch") == registry.backend(BackendKind.TRAIN, "torch")
