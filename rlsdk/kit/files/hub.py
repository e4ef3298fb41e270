"""Metadata of a model on the Hugging Face hub, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError
from rlsdk.system.files import read_regular

TIMEOUT_S = 10.0
"""Seconds for the hub's first answer."""


def fetch_model_config(name: str, revision: str | None = None, *, field: str = "model.path") -> Mapping[str, Any]:
    """Fetches `config.json` of a model on the hub: from the local cache, or downloaded into it.

    Args:
        name: `org/name`, or `name`.
        revision: branch, tag or commit; None: the main branch.
        field: which names the model, and with which errors begin.

    Raises:
        ConfigError: there is no such model, revision or file, it is gated, or the hub cannot be reached.
    """
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    at = f" at revision {revision!r}" if revision else ""
    try:
        path = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(path, str):
            _ask_once(name, revision)
            path = hf_hub_download(name, "config.json", revision=revision, etag_timeout=TIMEOUT_S)
        fields = json.loads(read_regular(path))
    except hub_errors.GatedRepoError as error:
        raise ConfigError(
            f"{field} {name!r}: access is restricted on the hub; request it on the model's page, then run: "
            "hf auth login"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{field} {name!r}: no such folder here, and no such model on the hub (or it is private: hf auth login)"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        revised = f"{field.removesuffix('path')}revision {revision!r}"
        raise ConfigError(f"{revised}: model {name!r} on the hub has no such revision") from error
    except (ConnectionError, hub_errors.LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"{field} {name!r}{at}: no such folder here, not in the local cache, and the hub cannot be reached; "
            "give a folder, or fix the network (HF_ENDPOINT names a mirror, HF_HOME the cache)"
        ) from error
    except hub_errors.EntryNotFoundError as error:
        raise ConfigError(f"{field} {name!r}{at}: the hub has it, without a config.json") from error
    except (hub_errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"{field} {name!r}{at}: its config.json could not be fetched from the hub: {error}"
        ) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{field} {name!r}{at}: its config.json on the hub has no model_type")
    return fields


def _ask_once(name: str, revision: str | None) -> None:
    """Whether the hub has the file. Checked first, because a download retries for half a minute if the hub cannot be
    reached.

    Raises:
        ConnectionError: no answer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=TIMEOUT_S)
    except (HfHubHTTPError, ValueError):
        raise
    except Exception as error:  # Errors of the HTTP library of the hub's client, which depends on the client's version.
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Folder of a model of the hub in the local cache, named after its commit; None: it is not there. Asks no one."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        reference = folder / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision or ""
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and snapshot.is_dir() else None
    except (OSError, ValueError):
        return None
