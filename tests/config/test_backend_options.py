"""A backend's own options: carried by name, typed by the plugin's class, refused when nobody reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_plugins import GustOptions, Nested, Speed, TurboOptions

from rlsdk.config import RunConfig, backend_options, load_config
from rlsdk.config.checks.commands import READERS
from rlsdk.config.introspection.describe import describe_options
from rlsdk.config.loading.load import read_config
from rlsdk.config.loading.reads import unread
from rlsdk.interfaces import BackendKind, ConfigError
from rlsdk.registry import Registry

TURBO = ["--train-backend", "turbo"]


def test_options_are_written_under_the_backends_name_in_files_and_flags(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "train:\n  backend: turbo\n  options: {ratio: 0.1}\n  turbo: {cpu_offload: true, nested: {depth: 3}}\n"
    )
    config = load_config([path], ["--train.turbo.shard_size", "8", "--train.turbo.label", "007"], registry)
    assert config.train.options == {
        "ratio": 0.1,
        "cpu_offload": True,
        "nested": {"depth": 3},
        "shard_size": 8,
        "label": "007",
    }
    spec = registry.backend(BackendKind.TRAIN, "turbo")
    assert backend_options(spec, config.train.options, registry) == TurboOptions(
        ratio=0.1, cpu_offload=True, nested=Nested(depth=3), shard_size=8, label="007"
    )


def test_richer_types_are_written_as_plain_data(registry: Registry) -> None:
    flags = ["--train.turbo.sizes", "[1, 2]", "--train.turbo.speed", "fast", "--train.turbo.where", "a/b"]
    config = load_config([], [*TURBO, *flags, "--train.turbo.cpu_offload"], registry)
    built = backend_options(registry.backend(BackendKind.TRAIN, "turbo"), config.train.options, registry)
    assert built == TurboOptions(sizes=(1, 2), speed=Speed.FAST, where=Path("a/b"), cpu_offload=True)


def test_a_pydantic_model_serves_as_well(registry: Registry) -> None:
    spec = registry.backend(BackendKind.ROLLOUT, "gust")
    assert backend_options(spec, {"width": 3}, registry) == GustOptions(width=3)
    with pytest.raises(ConfigError, match=r"rollout\.gust\.width: is required"):
        backend_options(spec, {}, registry)


def test_wrong_options_are_all_listed_as_the_user_wrote_them(registry: Registry) -> None:
    flags = ["--train.turbo.cpu_ofload", "true", "--train.turbo.shard_size", "big", "--train.turbo.nested.dept", "1"]
    flags += ["--train.turbo.mode", "ful", "--train.turbo.sizes", "[a]", "--train.turbo.ratio", "true"]
    with pytest.raises(ConfigError) as caught:
        load_config([], [*TURBO, *flags], registry)
    found = [line.strip() for line in str(caught.value).splitlines()]
    assert "train.turbo.cpu_ofload: unknown key; did you mean 'cpu_offload'? (--train.turbo.cpu_ofload)" in found
    assert "train.turbo.nested.dept: unknown key; did you mean 'depth'? (--train.turbo.nested.dept)" in found
    assert "train.turbo.shard_size: 'big': expected a whole number (--train.turbo.shard_size)" in found
    assert any(
        line.startswith("train.turbo.mode: 'ful': expected one of 'full' or 'hybrid'; did you") for line in found
    )
    assert "train.turbo.sizes.0: 'a': expected a whole number (--train.turbo.sizes)" in found
    assert "train.turbo.ratio: True: expected a number (--train.turbo.ratio)" in found
    assert len(found) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--train.turbo.cpu_offload"],
            r"train\.turbo: options of backend 'turbo' that nobody reads: train\.backend is 'tor",
        ),
        (["--train.fsdp.x", "1"], "options of backend 'fsdp' that nobody reads"),
        (["--train.gust.width", "1"], "'gust' that nobody reads: it is a rollout backend"),
        (["--train.torch.x", "1"], r"train\.torch\.x: backend 'torch' has no options"),
        (["--train.options.x", "1"], r"train\.torch\.x: backend 'torch' has no options"),
        (["--train.trubo.x", "1"], r"train\.trubo: unknown key"),
    ],
)
def test_an_option_that_nobody_reads_is_an_error(flags: list[str], message: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], flags, registry)


def test_options_of_a_backend_that_is_not_chosen_are_named_where_a_file_holds_them(
    tmp_path: Path, registry: Registry
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  turbo: {cpu_offload: true}\nref: {turbo: {ratio: text}}\n")
    loaded = read_config([path], [], registry)
    assert (loaded.problems, loaded.config) == ([], RunConfig())
    assert [str(one.path) for one in loaded.idle] == ["train.turbo", "ref.turbo"]
    assert unread(loaded.given, loaded.config, READERS["train"], (), loaded.idle) == (
        [],
        [
            f"{path}: `rlsdk train` does not read train.turbo (train.backend is 'torch'), "
            "ref.turbo (ref.backend is 'torch')"
        ],
    )
    chosen = read_config([path], ["--train-backend", "turbo"], registry)
    assert chosen.idle == []
    with pytest.raises(ConfigError, match=r"train\.turbo: options of backend 'turbo' that nobody reads.*the call"):
        load_config([], [], registry, values={"train": {"turbo": {"ratio": 1.0}}})
    path.write_text("train:\n  gust: {width: 1}\n")  # a rollout backend cannot be chosen there
    with pytest.raises(ConfigError, match=rf"'gust' that nobody reads: it is a rollout backend \({path}:2\)"):
        load_config([path], [], registry)


def test_options_that_are_no_mapping_are_refused(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {backend: turbo, options: 5, turbo: {ratio: 1}}\nrollout: 7\n")
    with pytest.raises(ConfigError, match=r"train\.options: 5: expected a mapping"):
        load_config([path], [], registry)


def test_engine_arguments_pass_through_untouched(registry: Registry) -> None:
    config = load_config([], ["--rollout.engine_kwargs", "{a: {b: [1, null]}}"], registry)
    assert config.rollout.engine_kwargs == {"a": {"b": [1, None]}}


def test_options_describe_themselves_with_types_defaults_and_texts() -> None:
    found = {option.path: option for option in describe_options(TurboOptions)}
    assert found["cpu_offload"].doc == "Keeps parameters on the host."
    assert (found["cpu_offload"].type, found["cpu_offload"].default) == ("true or false", "false")
    assert (found["shard_size"].type, found["shard_size"].default) == ("int or null", "null")
    assert (found["sizes"].type, found["sizes"].default) == ("list of int", "[]")
    assert found["mode"].type == "'full' or 'hybrid'"
    assert (found["nested.depth"].default, found["nested.depth"].doc) == ("2", "Of the nesting.")
    assert [(o.path, o.default, o.doc) for o in describe_options(GustOptions)] == [
        ("caching", "true", "Of prefixes."),
        ("width", "", ""),
    ]
