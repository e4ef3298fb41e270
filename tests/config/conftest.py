from __future__ import annotations

import pytest
from config_plugins import make_registry

from rlsdk.registry import Registry


@pytest.fixture(scope="session")
def registry() -> Registry:
    return make_registry()
