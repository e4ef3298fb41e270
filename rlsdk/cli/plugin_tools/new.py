"""`rlsdk plugins new`: writes a complete distribution, whose tests pass before any change.

The templates are in `templates/`: `common/` for all kinds, and one folder for each kind, `train_ranks/` for `--ranks`.
Marks such as `@NAME@` in their text are replaced, and `PACKAGE` in a path is replaced by the package's name.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rlsdk.interfaces import INTERFACE_VERSION, ConfigError, nearest
from rlsdk.registry import Registry
from rlsdk.version import __version__


@dataclass(frozen=True)
class Kind:
    """One kind of plugin."""

    what: str
    """Description of the kind."""
    use: str
    """The command that uses it."""


KINDS: Mapping[str, Kind] = {
    "train": Kind("Train backend", "rlsdk train --train-backend @NAME@"),
    "rollout": Kind("Rollout backend", "rlsdk train --rollout-backend @NAME@"),
    "sharding": Kind("Sharding manager", "rlsdk train     # takes it for the pair that it is registered for"),
    "reward": Kind("Reward", "rlsdk train --model FOLDER --data FILE.jsonl --reward @NAME@"),
    "algorithm": Kind("Advantage estimator", "rlsdk train --algorithm.advantage @NAME@"),
    "tracker": Kind("Tracker", "rlsdk train --tracking.trackers '[jsonl, @NAME@]'"),
}
HIDDEN = ("gitignore", "github/")
"""Files that are written with a leading dot; without it here, so that they do not apply to this repository."""
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX = ".in"
"""Suffix of every template, so that tools do not treat templates as source code."""


def new_plugin(name: str, kind: str, folder: Path | None, *, ranks: bool = False) -> None:
    """Writes the distribution `rlsdk-NAME` into a new folder, and prints the next commands.

    Args:
        ranks: a train engine of several ranks.

    Raises:
        ConfigError: there is no such kind, the name is invalid or taken, or the folder exists and is not empty.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind!r} is not a kind{nearest(kind, KINDS)}; kinds: {', '.join(KINDS)}")
    if ranks and kind != "train":
        raise ConfigError(f"--ranks with --kind {kind!r}: only a train engine has ranks; use --kind train")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"plugin name {name!r}: expected lower-case letters, digits and dashes, such as 'acme'")
    if taken := [row for row in Registry.discover().rows() if row.name == name and row.state.usable]:
        raise ConfigError(f"plugin name {name!r} is taken by the {taken[0].kind} of {taken[0].source}; choose another")
    folder = folder or Path(f"rlsdk-{name}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} already exists; give a new folder with --folder")
    words = _words(name, kind)
    for path, text in _filled(f"{kind}_ranks" if ranks else kind, words):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(f"{folder}: {KINDS[kind].what.lower()} {name!r} in {len(list(folder.rglob('*.py')))} Python files\n")
    print(f'  cd {folder} && pip install -e ".[test]" && pytest')
    print(f"  {words['USE']}")


def _words(name: str, kind: str) -> dict[str, str]:
    """Returns the values of the marks in templates."""
    major, minor = __version__.split(".")[:2]
    above = f"0.{int(minor) + 1}" if major == "0" else f"{int(major) + 1}"
    described = KINDS[kind]
    return {
        "NAME": name,
        "PACKAGE": f"rlsdk_{name.replace('-', '_')}",
        "FUNCTION": name.replace("-", "_"),
        "CLASS": "".join(part.capitalize() for part in name.split("-")),
        "DISTRIBUTION": f"rlsdk-{name}",
        "RANGE": f">={major}.{minor},<{above}",
        "INTERFACE": str(INTERFACE_VERSION),
        "WHAT": f"{described.what} {name}",
        "USE": described.use.replace("@NAME@", name),
    }


def _filled(room: str, words: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Yields path and text of every file."""
    for folder in ("common", room):
        root = Path(str(files("rlsdk.cli.plugin_tools") / "templates" / folder))
        for template in sorted(root.rglob(f"*{_SUFFIX}")):
            path = str(template.relative_to(root)).removesuffix(_SUFFIX).replace("PACKAGE", words["PACKAGE"])
            text = template.read_text(encoding="utf-8")
            for word, value in words.items():
                text = text.replace(f"@{word}@", value)
            yield Path(f".{path}" if path.startswith(HIDDEN) else path), text
