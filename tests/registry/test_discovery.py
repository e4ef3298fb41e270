"""Plugins that are installed, whole or broken: each costs its own row a reason, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from registry_plugins import Install, backend_source, rows_of

from rlsdk.interfaces import (
    INTERFACE_VERSION,
    BackendKind,
    DuplicatePluginError,
    InterfaceVersionError,
    PluginLoadError,
    RlsdkError,
)
from rlsdk.registry import PLUGIN, ComponentKind, Registry, State

pytestmark = pytest.mark.usefixtures("site")


def test_a_plugin_on_the_path_is_found_by_its_entry_point(install: Install) -> None:
    install("rlsdk-acme", backend_source("acme_engine"), version="2.3")
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-acme")
    assert (row.name, row.kind, row.state, row.source.version) == ("acme", BackendKind.TRAIN, State.READY, "2.3")
    assert registry.backend(BackendKind.TRAIN, "acme").name == "acme"


def test_the_built_ins_register_without_any_distribution_being_installed() -> None:
    registry = Registry.discover()
    assert "torch" in registry.usable(BackendKind.TRAIN)
    assert "transformers" in registry.usable(BackendKind.ROLLOUT)
    assert {"grpo", "rloo"} <= set(registry.usable(ComponentKind.ADVANTAGE))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("x = 1", "marked with @hookimpl"),
    ],
)
def test_an_entry_module_that_fails_is_a_row_with_its_reason_and_breaks_nothing(
    install: Install, source: str, reason: str
) -> None:
    install("rlsdk-bad", source, entry="bad")
    install("rlsdk-good", backend_source("good", "good"))
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-bad")
    assert (row.name, row.kind, row.state) == ("bad", PLUGIN, State.BROKEN)
    assert reason in row.reason
    assert {"good", "torch"} <= set(registry.usable(BackendKind.TRAIN))


def test_a_failed_import_is_a_loud_error_with_its_own_message_when_asked_for_by_name(install: Install) -> None:
    install("rlsdk-vllm", "raise RuntimeError('driver too old')", entry="vllm")
    with pytest.raises(PluginLoadError, match=r"'vllm' \(rlsdk-vllm 1.0\) is broken.*driver too old") as caught:
        Registry.discover().backend(BackendKind.ROLLOUT, "vllm")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("interface", ["(2, 0)", str(INTERFACE_VERSION)])
def test_a_plugin_of_this_or_an_older_minor_version_is_usable(install: Install, interface: str) -> None:
    install("rlsdk-acme", backend_source("acme", more=f"interface={interface}"))
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-acme")
    assert row.state is State.READY
    assert registry.backend(BackendKind.TRAIN, "acme").name == "acme"


@pytest.mark.parametrize("interface", ["(3, 0)", "(2, 99)", "(0, 9)"])
def test_a_plugin_written_for_another_interface_is_refused_with_both_versions(install: Install, interface: str) -> None:
    install("rlsdk-acme", backend_source("acme", more=f"interface={interface}"))
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-acme")
    assert row.state is State.WRONG_INTERFACE
    served = re.escape(".".join(map(str, INTERFACE_VERSION)))
    with pytest.raises(
        InterfaceVersionError, match=rf"written for interface .* this rlsdk serves {served}; install a newer"
    ):
        registry.backend(BackendKind.TRAIN, "acme")


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("ROLLOUT", "GenerationOutput.versions takes the place of .*first_sample.*num_decoded and kv_used are new"),
        ("TRAIN", "hosts check states .offloaded, frozen. in front of the engine"),
    ],
)
def test_the_author_of_a_plugin_for_interface_1_is_told_what_changed_and_where_it_stands(
    install: Install, kind: str, changed: str
) -> None:
    install("rlsdk-acme", backend_source("acme", kind=kind, more="interface=(1, 1)"))
    with pytest.raises(
        InterfaceVersionError, match=rf"written for interface 1\.1, .*{changed}.*docs/plugin_versions\.md"
    ):
        Registry.discover().backend(BackendKind[kind], "acme")


def test_a_newer_interface_may_speak_of_things_that_this_one_does_not_know(install: Install) -> None:
    install("rlsdk-acme", backend_source("acme", more="interface=(3, 0), devices=frozenset({'tpu'})"))
    (row,) = rows_of(Registry.discover(), "rlsdk-acme")
    assert row.state is State.WRONG_INTERFACE


def test_two_distributions_with_one_name_are_both_shown_and_neither_is_used(install: Install) -> None:
    install("rlsdk-one", backend_source("one"))
    install("rlsdk-two", backend_source("two"))
    registry = Registry.discover()
    (one,), (two,) = rows_of(registry, "rlsdk-one"), rows_of(registry, "rlsdk-two")
    assert (one.state, two.state) == (State.CLASH, State.CLASH)
    assert "rlsdk-two" in one.reason
    assert "rlsdk-one" in two.reason
    with pytest.raises(DuplicatePluginError, match=r"rlsdk-one 1\.0 and by rlsdk-two 1\.0.*RLSDK_DISABLE_PLUGINS"):
        registry.backend(BackendKind.TRAIN, "acme")


def test_a_built_in_name_cannot_be_taken_over_in_silence(install: Install) -> None:
    install("rlsdk-evil", backend_source("evil", "torch"))
    with pytest.raises(
        DuplicatePluginError, match=r"rlsdk .* and by rlsdk-evil 1\.0.*RLSDK_DISABLE_PLUGINS=rlsdk-evil"
    ):
        Registry.discover().backend(BackendKind.TRAIN, "torch")
    without = Registry.discover({"RLSDK_DISABLE_PLUGINS": "rlsdk_evil"})
    assert without.backend(BackendKind.TRAIN, "torch").engine.startswith("rlsdk.reference")


def test_the_same_name_of_another_kind_is_no_clash(install: Install) -> None:
    install("rlsdk-acme", backend_source("acme", "torch", "ROLLOUT"))
    registry = Registry.discover()
    assert registry.backend(BackendKind.TRAIN, "torch").engine.startswith("rlsdk.reference")
    assert registry.backend(BackendKind.ROLLOUT, "torch").engine == "acme_engine:Engine"


def test_a_broken_twin_does_not_take_a_working_name_away(install: Install) -> None:
    install("rlsdk-good", backend_source("good"))
    install("rlsdk-old", backend_source("old", more="interface=(0, 1)"))
    assert Registry.discover().backend(BackendKind.TRAIN, "acme").engine == "good_engine:Engine"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("register(5)", "registered 5 (int); expected a BackendSpec"),
        ("register(B(name='Bad Name', kind=K.TRAIN, engine='a:B'))", "lower-case letters, digits and dashes"),
        ("register(B(name='x', kind='train', engine='a:B'))", "kind 'train'"),
        ("register(B(name='x', kind=K.TRAIN, engine='no-colon'))", "expected 'package.module:Class'"),
        ("register(B(name='x', kind=K.TRAIN, engine=object))", "expected 'package.module:Class'"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', options='nonsense'))", "options 'nonsense'"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', interface='1.0'))", "expected two whole numbers"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', capabilities={'fly'}))", "capability 'fly'"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', capabilities=None))", "capability None"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', devices=frozenset()))", "devices frozenset()"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', dtypes={'float31'}))", "float31"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', max_ranks=0))", "max_ranks 0"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', log_prob_kind='odd'))", "log_prob_kind 'odd'"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', engine_requires={'torch': 'new'}))", "version specifier"),
        ("register(B(name='x', kind=K.TRAIN, engine='a:B', engine_requires=['torch']))", "expected a mapping"),
        ("return [B(name='x', kind=K.TRAIN, engine='a:B')]", "call register(...) for each instead"),
        ("register()", "missing 1 required positional argument"),
        ("raise ValueError('oops')", "ValueError: oops"),
        ("raise SystemExit(1)", "SystemExit: 1"),
    ],
)
def test_nonsense_from_a_hook_is_a_row_with_its_reason(install: Install, call: str, reason: str) -> None:
    install(
        "rlsdk-odd",
        "from rlsdk.interfaces import BackendSpec as B, BackendKind as K, hookimpl\n"
        f"@hookimpl\ndef rlsdk_register_backends(register):\n    {call}\n",
    )
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-odd")
    assert row.state is State.BROKEN
    assert reason in row.reason
    assert "torch" in registry.usable(BackendKind.TRAIN)
    with pytest.raises(RlsdkError):
        registry.backend(BackendKind.TRAIN, "x")


def test_what_was_registered_before_a_hook_failed_can_be_used(install: Install) -> None:
    install("rlsdk-acme", backend_source("acme") + "    raise ValueError('second half')\n")
    registry = Registry.discover()
    assert [row.state for row in rows_of(registry, "rlsdk-acme")] == [State.READY, State.BROKEN]
    assert registry.backend(BackendKind.TRAIN, "acme")


def test_a_misspelt_hook_is_shown_with_the_nearest_one(install: Install) -> None:
    source = "from rlsdk.interfaces import hookimpl\n@hookimpl\ndef rlsdk_register_reward(register): pass\n"
    install("rlsdk-typo", source)
    (row,) = rows_of(Registry.discover(), "rlsdk-typo")
    assert row.state is State.BROKEN
    assert "'rlsdk_register_reward'; did you mean 'rlsdk_register_rewards'?" in row.reason


def test_a_hook_with_wrong_arguments_is_shown(install: Install) -> None:
    source = "from rlsdk.interfaces import hookimpl\n@hookimpl\ndef rlsdk_register_rewards(registry): pass\n"
    install("rlsdk-args", source)
    (row,) = rows_of(Registry.discover(), "rlsdk-args")
    assert row.state is State.BROKEN
    assert "registry" in row.reason


def test_a_hook_wrapper_of_one_plugin_cannot_reach_another(install: Install) -> None:
    install(
        "rlsdk-grabber",
        "import pluggy\nfrom rlsdk.interfaces import hookimpl\n"
        "@pluggy.HookimplMarker('rlsdk')(wrapper=True)\n"
        "def rlsdk_register_backends(register):\n    yield\n    raise RuntimeError('mine')\n",
    )
    install("rlsdk-good", backend_source("good", "good"))
    assert {"good", "torch"} <= set(Registry.discover().usable(BackendKind.TRAIN))


def test_metadata_that_cannot_be_read_costs_a_row_only(install: Install) -> None:
    info = install("rlsdk-garbled", "")
    (info / "entry_points.txt").write_bytes(b"[rlsdk]\n\xff\xfe = \xff")
    registry = Registry.discover()
    assert any(row.state is State.BROKEN and "metadata cannot be read" in row.reason for row in registry.rows())
    assert "torch" in registry.usable(BackendKind.TRAIN)


def test_an_entry_point_may_name_an_object_with_hooks_but_not_a_class(install: Install) -> None:
    source = (
        "from rlsdk.interfaces import hookimpl\nclass Plugin:\n    @hookimpl\n"
        "    def rlsdk_register_rewards(self, register):\n        register('mine', len)\nplugin = Plugin()\n"
    )
    install("rlsdk-object", source, points="[rlsdk]\nobject = rlsdk_object:plugin\nclass = rlsdk_object:Plugin\n")
    registry = Registry.discover()
    assert registry.component(ComponentKind.REWARD, "mine") is len
    (broken,) = [row for row in rows_of(registry, "rlsdk-object") if row.state is State.BROKEN]
    assert broken.reason.startswith("its entry point gives the class")


def test_a_distribution_further_down_the_path_does_not_count(
    install: Install, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("rlsdk-acme", backend_source("acme"))
    shadowed = tmp_path_factory.mktemp("shadowed") / "Rlsdk.Acme-0.1.dist-info"
    shadowed.mkdir()
    (shadowed / "METADATA").write_text("Metadata-Version: 2.1\nName: Rlsdk.Acme\nVersion: 0.1\n")
    (shadowed / "entry_points.txt").write_text("[rlsdk]\nacme = gone\n")
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path, str(shadowed.parent)])
    registry = Registry.discover()
    assert [row.source.version for row in rows_of(registry, "rlsdk-acme")] == ["1.0"]
    assert not rows_of(registry, "Rlsdk.Acme")


def test_an_engine_that_is_absent_makes_the_backend_unavailable_and_says_how_to_get_it(install: Install) -> None:
    more = "engine_requires={'rlsdk-no-such-engine': '>=1'}, install_hint='pip install no-such-engine'"
    install("rlsdk-acme", backend_source("acme", more=more))
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-acme")
    assert row.state is State.ENGINE_MISSING
    with pytest.raises(
        PluginLoadError, match=r"needs rlsdk-no-such-engine>=1, not installed; run `pip install no-such"
    ):
        registry.backend(BackendKind.TRAIN, "acme")


@pytest.mark.parametrize("names", ["pluggy", "rlsdk-no-such-engine | pluggy"])
def test_an_engine_outside_the_tested_window_warns_and_works(
    install: Install, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("rlsdk-acme", backend_source("acme", more=f"engine_requires={{{names!r}: '<0.1'}}"))
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-acme")
    assert row.state is State.UNTESTED
    assert f"tested with {names}<0.1, installed is" in row.reason
    assert registry.backend(BackendKind.TRAIN, "acme").name == "acme"
    assert "tested with" in caplog.text


def test_an_engine_inside_the_tested_window_is_ready(install: Install) -> None:
    install("rlsdk-acme", backend_source("acme", more="engine_requires={'pluggy': '>=1'}"))
    assert rows_of(Registry.discover(), "rlsdk-acme")[0].state is State.READY


def test_the_environment_chooses_which_plugins_are_loaded(install: Install) -> None:
    install("rlsdk-one", backend_source("one", "one"), entry="first")
    install("rlsdk-two", backend_source("two", "two"))
    only = Registry.discover({"RLSDK_PLUGINS": "first"})
    assert only.usable(BackendKind.TRAIN) == ["one", "torch"]
    (left_out,) = rows_of(only, "rlsdk-two")
    assert (left_out.state, left_out.reason) == (State.DISABLED, "not among those of RLSDK_PLUGINS")
    without = Registry.discover({"RLSDK_DISABLE_PLUGINS": "rlsdk-one, other"})
    assert "two" in without.usable(BackendKind.TRAIN)
    with pytest.raises(PluginLoadError, match="left out by RLSDK_DISABLE_PLUGINS"):
        without.backend(BackendKind.TRAIN, "first")


def test_a_plugin_that_the_environment_names_but_nobody_installed_is_shown() -> None:
    rows = Registry.discover({"RLSDK_PLUGINS": "rlsdk-ghost"}).rows()
    assert any(row.name == "rlsdk-ghost" and "no such plugin is installed" in row.reason for row in rows)


def test_a_disabled_plugin_is_not_even_imported(install: Install, site: Path) -> None:
    marker = site / "imported"
    install("rlsdk-noisy", f"open({str(marker)!r}, 'w').close()")
    Registry.discover({"RLSDK_DISABLE_PLUGINS": "rlsdk-noisy"})
    assert not marker.exists()
