"""Plugins in environments of their own: everything about them is known here, and nothing of them is imported."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from registry_plugins import Install, backend_source

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, LogProbKind, PluginLoadError
from rlsdk.registry import (
    IsolatedPlugin,
    Registry,
    Requirements,
    Row,
    Source,
    State,
    lacks,
    plain_row,
    plain_spec,
    read_record,
    record_path,
    spec_from_plain,
    versions_here,
)

SPEC = BackendSpec(
    name="faraway",
    kind=BackendKind.ROLLOUT,
    engine="never_importable.engine:Engine",
    options="never_importable.config:Options",
    description="Elsewhere.",
    capabilities=frozenset({Capability.SEED, Capability.SLEEP}),
    architectures=frozenset({"qwen2"}),
    max_ranks=2,
    log_prob_kind=LogProbKind.RAW,
    engine_requires={"faraway-engine": ">=1,<2"},
)
OPTIONS = {"name": "Options", "fields": [{"name": "force", "type": "int", "default": 3, "doc": "Of the wind."}]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLSDK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def record(**changes: Any) -> IsolatedPlugin:
    source = Source(distribution="rlsdk-faraway", version="0.7", entry_point="faraway")
    row = Row(name=SPEC.name, kind=SPEC.kind, source=source, spec=SPEC)
    whole = IsolatedPlugin(
        distribution="rlsdk-faraway",
        version="0.7",
        environment="/opt/faraway",
        python=sys.executable,
        owned=True,
        requirements=("rlsdk-faraway",),
        versions={**versions_here(), "faraway-engine": "1.5"},
        rows=(plain_row(row, OPTIONS),),
    )
    return replace(whole, **changes)


def write(plugin: IsolatedPlugin) -> Path:
    path = record_path(plugin.distribution)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plugin.to_plain()))
    return path


def row_of(registry: Registry, distribution: str = "rlsdk-faraway") -> Row:
    (row,) = [row for row in registry.rows() if row.source.distribution == distribution]
    return row


def test_a_specification_survives_as_plain_json() -> None:
    assert spec_from_plain(json.loads(json.dumps(plain_spec(SPEC)))) == SPEC


def test_a_record_reads_back_equal(home: Path) -> None:
    assert read_record(write(record())) == record()


def test_a_recorded_plugin_is_found_negotiated_and_configured_without_being_imported(home: Path) -> None:
    write(record())
    registry = Registry.discover()
    row = row_of(registry)
    assert (row.state, row.reason, str(row.source)) == (State.READY, "environment /opt/faraway", "rlsdk-faraway 0.7")
    spec = registry.backend(BackendKind.ROLLOUT, "faraway")
    assert spec == SPEC
    asked = Requirements(kind=BackendKind.ROLLOUT, num_ranks=4, capabilities=frozenset({Capability.MIN_P}))
    assert {lack.requirement for lack in lacks(asked, spec)} == {"num_ranks", "min_p"}
    options = registry.load_options(spec)
    assert options is not None
    assert options().force == 3
    isolation = registry.isolation(spec)
    assert isolation is not None
    assert isolation.python == sys.executable
    assert pickle.loads(pickle.dumps(registry)).isolation(spec) == isolation


def test_its_engine_cannot_be_imported_here_and_the_error_says_where_it_can(home: Path) -> None:
    write(record())
    registry = Registry.discover()
    with pytest.raises(PluginLoadError, match=r"lives in '/opt/faraway' and cannot be imported here; run this with "):
        registry.load_engine(SPEC)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"python": "/opt/gone/bin/python"}, "its interpreter /opt/gone/bin/python is not there"),
        ({"versions": {**versions_here(), "ray": "2.1.0"}}, "its environment has ray 2.1.0, this one ray "),
        ({"versions": {**versions_here(), "python": "3.99"}}, "its environment has python 3.99, this one python "),
        ({"versions": {**versions_here(), "numpy": "1.26.4"}}, "its environment has numpy 1.26.4, this one numpy "),
    ],
    ids=["interpreter", "ray", "python", "numpy"],
)
def test_an_environment_that_cannot_serve_this_one_is_listed_with_the_way_out(
    home: Path, changes: dict[str, Any], why: str
) -> None:
    write(record(**changes))
    registry = Registry.discover()
    row = row_of(registry)
    assert row.state is State.ELSEWHERE
    assert why in row.reason
    assert row.reason.endswith("run `rlsdk plugins install rlsdk-faraway --isolated`")
    with pytest.raises(PluginLoadError, match=r"'faraway' .* cannot be used: "):
        registry.backend(BackendKind.ROLLOUT, "faraway")


@pytest.mark.parametrize("text", ["{", '{"format": 99}', '{"format": 1, "rows": [], "requirements": []}'])
def test_a_record_that_cannot_be_read_costs_its_own_row_a_reason(home: Path, text: str) -> None:
    write(record()).write_text(text)
    registry = Registry.discover()
    assert row_of(registry).state is State.BROKEN
    assert "cannot be read" in row_of(registry).reason
    assert registry.backend(BackendKind.TRAIN, "torch")


def test_a_draft_of_a_record_is_no_record(home: Path) -> None:
    path = write(record())
    path.rename(path.with_name(f".{path.name}.abc123"))
    assert [row for row in Registry.discover().rows() if row.name == "faraway"] == []


def test_what_is_installed_and_usable_here_goes_first(home: Path, install: Install) -> None:
    write(record())
    install("rlsdk-faraway", backend_source("rlsdk_faraway", name="faraway", kind="ROLLOUT"))
    row = row_of(Registry.discover())
    assert (row.state, row.isolation) == (State.READY, None)


def test_an_installed_plugin_without_its_engine_leaves_the_word_to_its_environment(
    home: Path, install: Install
) -> None:
    write(record())
    more = "engine_requires={'no-such-engine': '>=1'}"
    install("rlsdk-faraway", backend_source("rlsdk_faraway", name="faraway", kind="ROLLOUT", more=more))
    row = row_of(Registry.discover())
    assert row.state is State.READY
    assert row.isolation is not None


def test_it_can_be_left_out_by_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(record())
    monkeypatch.setenv("RLSDK_DISABLE_PLUGINS", "rlsdk-faraway")
    assert row_of(Registry.discover()).state is State.DISABLED
    monkeypatch.setenv("RLSDK_DISABLE_PLUGINS", "")
    monkeypatch.setenv("RLSDK_PLUGINS", "faraway")
    assert row_of(Registry.discover()).state is State.READY


def test_what_runs_in_the_controller_cannot_live_elsewhere(home: Path) -> None:
    source = Source(distribution="rlsdk-faraway", version="0.7", entry_point="faraway")
    write(record(rows=(plain_row(Row(name="kind", kind="reward", source=source), None),)))
    row = row_of(Registry.discover())
    assert row.state is State.ELSEWHERE
    assert "only engines can live in an environment of their own" in row.reason
