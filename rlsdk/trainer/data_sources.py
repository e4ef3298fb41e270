"""Which data a run names, and whether they are there. Imports no torch: a command is refused before that."""

from __future__ import annotations

from rlsdk.config import RunConfig
from rlsdk.data import check_source
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.registry import ComponentKind, Registry


def source_names(config: RunConfig) -> dict[str, str]:
    """Field of the configuration -> the data source that it names."""
    data = config.data
    found = {f"data.mixture.{at}.source": part.source for at, part in enumerate(data.mixture)}
    found |= {} if data.train is None else {"data.train": data.train}
    found |= {} if data.eval is None else {"data.eval": data.eval}
    ptx = config.algorithm.ptx.source
    found |= {} if ptx is None else {"algorithm.ptx.source": ptx}
    return found | {
        f"eval.sets.{name}.data": part.data for name, part in config.eval.sets.items() if part.data is not None
    }


def check_sources(config: RunConfig, registry: Registry) -> None:
    """Refuses data that are not there before the run has a folder or a process.

    Raises:
        ConfigError, DataError: a source of `data` cannot be found; the message begins with its field.
    """
    kinds = registry.usable(ComponentKind.DATASET)
    for field, name in source_names(config).items():
        try:
            check_source(name, kinds=kinds)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{field}: {error}") from error
