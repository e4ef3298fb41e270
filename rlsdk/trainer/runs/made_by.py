"""What a run's samples and grades are made by: settings, and the content of code, models and data that they name.

The journal keeps it with the samples. Where it differs at a resume, the samples are not used, and the names of what
differs are said.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig
from rlsdk.config.derived.roles import own_sections
from rlsdk.config.sections.influence import influential_settings
from rlsdk.interfaces import BackendSpec
from rlsdk.kit.files.hub import cached_snapshot
from rlsdk.trainer.inputs.contents import code_digests, file_digest, joined, model_digests, path_digests, rows_digest
from rlsdk.version import __version__

if TYPE_CHECKING:
    from rlsdk.data import PromptDataset
    from rlsdk.registry import Registry, Row
    from rlsdk.trainer.runs.run_inputs import RunInputs

PACKAGES = ("torch", "transformers")
"""Distributions that the numbers of every run depend on."""
_IN_FILE = re.compile(r"(.+\.py):\w+")
_IN_MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_FUNCTIONS = re.compile(r"rewards\.\d+\.name|algorithm\.\w+|rollout\.(rollouter|environment|agent)(_options\..+)?")
"""Settings that may name a function of a module."""
_READ_AS_ROWS = ("data.", "algorithm.ptx.source")
"""Settings whose files count by the rows that were read of them."""
MOST_PATH = 1024
"""Most characters of a text that may be the path of a file."""


def made_by(config: RunConfig, registry: Registry, run_inputs: RunInputs) -> dict[str, Any]:
    """All that samples and grades of a run depend on, by name, in JSON types: about a hundred short entries.

    Reads files of code whole and little of weights: a few milliseconds.
    """
    settings = influential_settings(config)
    made: dict[str, Any] = {**settings, **_versions(config, registry)}
    models = _models(config)
    for field, text in _texts(settings):
        if field not in models:
            made |= {f"content of {field} ({name})": digest for name, digest in _files(field, text).items()}
    for field, (path, revision) in models.items():
        made |= {f"content of {field} ({name})": digest for name, digest in _model(path, revision).items()}
    made |= _rows(config, run_inputs.train_prompts)
    if run_inputs.examples:
        examples = ((list(each.prompt_ids), list(each.answer_ids)) for each in run_inputs.examples)
        made["content of algorithm.ptx"] = rows_digest(examples)
    plain: dict[str, Any] = json.loads(json.dumps(made))
    return plain


def _texts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text among the settings, also in lists, by dotted path."""
    for name, value in settings.items():
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _texts({f"{name}.{key}": item for key, item in value.items()})
        elif isinstance(value, list | tuple):
            yield from _texts({f"{name}.{at}": item for at, item in enumerate(value)})


def _files(field: str, text: str) -> Mapping[str, str]:
    """Digests of the files that a setting names: code with what it imports from beside it, or another file."""
    if len(text) > MOST_PATH or "\n" in text:
        return {}
    if match := _IN_FILE.fullmatch(text):
        return _within(code_digests, Path(match[1]))
    if _FUNCTIONS.fullmatch(field) and (match := _IN_MODULE.fullmatch(text)):
        return _of_module(match[1])
    if field.startswith(_READ_AS_ROWS) or "://" in text or not ("/" in text or "." in text):
        return {}
    return _within(path_digests, Path(text))


def _within(read: Any, path: Path) -> Mapping[str, str]:
    """What `read` gives for a path, which may be none."""
    try:
        digests: Mapping[str, str] = read(path.expanduser().resolve())
        return digests
    except (OSError, ValueError, RuntimeError):
        return {}


def _of_module(name: str) -> Mapping[str, str]:
    """Digest of a module with what it imports from its package, which is not imported; of an installed one without
    what it imports, but with the version."""
    top, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return {}
    origin = Path(spec.origin)
    root = origin.parent.parent if origin.name == "__init__.py" else origin.parent
    place = root.joinpath(top, *parts)
    files = [path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]
    if files and "site-packages" in root.parts:
        version = {f"version of {top}": metadata.version(top)} if _is_installed(top) else {}
        return {name: file_digest(files[0]), **version}
    return {name: joined(code_digests(files[0], root))} if files else {}


def _models(config: RunConfig) -> dict[str, tuple[str, str | None]]:
    """Path and revision of every model and tokenizer, by field."""
    model = config.model
    named: list[tuple[str, str | None, str | None]] = [
        ("model.path", model.path, model.revision),
        ("model.tokenizer", model.tokenizer, model.revision),
        *((f"{section}.path", own.path, own.revision) for section, own in own_sections(config)),
        *((f"reward_models.{at}.path", each.path, each.revision) for at, each in enumerate(config.reward_models)),
        *((f"teachers.{at}.path", each.path, each.revision) for at, each in enumerate(config.teachers)),
    ]
    for at, reward in enumerate(config.rewards):
        if reward.judge is not None and (engine := reward.judge.engine) is not None:
            named.append((f"rewards.{at}.judge.engine.path", engine.path, engine.revision))
    return {field: (path, revision) for field, path, revision in named if path is not None}


def _model(path: str, revision: str | None) -> Mapping[str, str]:
    """Digests of a model's files; of a hub name those of the snapshot in the cache, and its commit."""
    if Path(path).is_dir():
        return model_digests(Path(path))
    snapshot = cached_snapshot(path, revision)
    return {} if snapshot is None else {"commit": snapshot.name, **model_digests(snapshot)}


def _rows(config: RunConfig, prompts: PromptDataset) -> dict[str, str]:
    """Digests of the rows of each source of prompts, and of the tokens that they became."""
    names = [part.source for part in config.data.mixture] or [config.data.train or "train"]
    digests: dict[str, str] = {}
    start = 0
    for at, part in enumerate(prompts.parts):
        rows = prompts.rows[start : start + part.size]
        field = f"data.mixture.{at}" if config.data.mixture else "data.train"
        name = part.name if part.name in names else names[0]
        digests[f"content of {field} ({name})"] = rows_digest((row.row, row.answer) for row in rows)
        start += part.size
    return digests | {"tokens of the prompts": f"xxh3:{prompts.fingerprint():016x}"}


def _versions(config: RunConfig, registry: Registry) -> dict[str, str]:
    """Versions of rlsdk, of the plugins whose backends and components the configuration names, and of their engines."""
    named = {text for _, text in _texts(config.model_dump(mode="json"))}
    versions = {"rlsdk": __version__, **{name: metadata.version(name) for name in PACKAGES if _is_installed(name)}}
    for row in registry.rows():
        if row.name in named:
            versions |= _of_row(row)
    return {f"version of {name}": version for name, version in versions.items()}


def _of_row(row: Row) -> dict[str, str]:
    if row.isolation is not None:
        return {f"{name} (for {row.name})": version for name, version in row.isolation.versions.items()}
    engines: Sequence[str] = list(row.spec.engine_requires) if isinstance(row.spec, BackendSpec) else []
    alternatives = [name.strip() for names in engines for name in names.split("|")]
    own = {name: metadata.version(name) for name in alternatives if _is_installed(name)}
    return {row.source.distribution: row.source.version, **own} if row.source.version else own


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
