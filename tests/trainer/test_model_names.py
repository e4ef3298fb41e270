"""Names of models that are no folder here: refused by the field that gave them."""

from __future__ import annotations

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.trainer.inputs.model_config import fields_of


@pytest.mark.parametrize("name", ["n" * 5000, "./" + "n" * 300, "a/b/c", "\0"])
def test_what_can_be_no_folder_and_no_model_of_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^ref\.path .*no such folder, and not the name of a model") as raised:
        fields_of(name, None, "ref.path")
    assert len(str(raised.value)) < 300
