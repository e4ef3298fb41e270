"""`rlsdk plan` refuses the data and the names that `rlsdk train` refuses, before anybody waits for a device."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import rlsdk
from rlsdk.interfaces import ConfigError
from rlsdk.testing.process.models import write_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{at}+1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(at + 1)},
        "data_source": "sums",
    }
    for at in range(80)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "verl.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return str(file)


def templated(folder: Path, place: str | None) -> str:
    """A model whose tokenizer has a chat template in one of the places where it may be."""
    model = write_tiny_model(folder / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if place == "tokenizer_config.json":
        config["chat_template"] = TEMPLATE
    elif place is not None:
        (model / place).write_text(TEMPLATE)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return str(model)


def settings(**more: object) -> dict[str, object]:
    return {"data__max_prompt_tokens": 16, "rollout__max_response_tokens": 16, **more}


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", None])
def test_messages_need_a_chat_template_in_a_plan_too(data: str, place: str | None, tmp_path: Path) -> None:
    model = templated(tmp_path, place)
    if place is not None:
        assert rlsdk.plan(model, data, "exact", **settings()).fits is not False
        with pytest.raises(ConfigError, match=r"verl.parquet:1: the prompt is a list of chat messages"):
            rlsdk.plan(model, data, "exact", **settings(data__chat_template="never"))
    else:
        with pytest.raises(ConfigError, match=r"verl.parquet:1: .* no chat template is in use; take a tokenizer that"):
            rlsdk.plan(model, data, "exact", **settings())


def test_a_name_that_no_run_may_have_is_refused(data: str, tmp_path: Path) -> None:
    model = templated(tmp_path, "chat_template.jinja")
    with pytest.raises(ConfigError, match=r"trainer.run_name '../x': expected one folder name"):
        rlsdk.plan(model, data, "exact", **settings(trainer__run_name="../x"))
