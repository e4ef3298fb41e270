"""Allow-list of environment variables for processes that run code of others; it keeps secrets out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "PWD",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONNOUSERSITE", "PYTHONUSERBASE", "PYTHONUTF8",
    "PYTHONWARNINGS", "PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE",
    "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "CUDA_VISIBLE_DEVICES", "NLTK_DATA",
})  # fmt: skip
"""Variables of paths and of Python's behaviour, which grant no access."""
PREFIXES = ("LC_",)


def allowed_environment(environment: Mapping[str, str], further: Sequence[str] = ()) -> dict[str, str]:
    """Returns the part of `environment` that such processes get, plus default settings.

    Args:
        environment: the full environment.
        further: additional names that the user allows.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in NAMES or name in further or name.startswith(PREFIXES)
    }
    return {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **kept}
