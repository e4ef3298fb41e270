"""Shapes of well-known models: their parameters are those that their owners publish."""

from __future__ import annotations

import pytest
import torch

from rlsdk.interfaces import ConfigError, ModelSpec
from rlsdk.kit.model.hf import load_model_config
from rlsdk.kit.model.shapes import NAMES

PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "mistral-7b": 7_248_023_552, "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200, "mixtral-8x7b": 46_702_792_704, "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320, "gemma-3-1b": 999_885_952,
    "phi-3.5-mini": 3_821_079_552, "phi-4": 14_659_507_200, "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384, "deepseek-v3-671b": 671_026_404_352,
}  # fmt: skip
"""Parameters by the models' cards and their weight files; a tied head is counted once, biases of routers that no
gradient trains are not."""


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_has_as_many_parameters_as_the_model(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = load_model_config(ModelSpec(path=f"shape:{name}"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no known shape; did you mean 'qwen2.5-7b'.*llama-3.1-8b"):
        load_model_config(ModelSpec(path="shape:Qwen2.5-8b"))
