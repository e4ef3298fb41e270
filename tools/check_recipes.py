"""Plans every recipe of `examples/recipes` on the hardware that its head names; prints one JSON line for each.

Takes no device and asks no server: of each model the shape is written down here, as in its `config.json` on the hub.
Needs the plugins that the recipes name.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlsdk.config import load_config
from rlsdk.interfaces import RlsdkError
from rlsdk.planning import make_plan, parse_hardware
from rlsdk.registry import Registry
from rlsdk.trainer.runs.prepare import PreparedRun

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "recipes"
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN2 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2 | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "Qwen/Qwen3-8B": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960,
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA | {"hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False},
}  # fmt: skip
SHAPES["Qwen/Qwen2.5-Coder-7B-Instruct"] = SHAPES["Qwen/Qwen2.5-7B-Instruct"]


def check(file: Path, models: Path, registry: Registry) -> dict[str, Any]:
    """What the plan of a recipe says: `fits`, `share` of the fullest device, `unknown`; or `error`."""
    name = load_config([file], registry=registry, sections=()).model.path
    hardware = re.search(r"^# hardware: (\S+)$", file.read_text(), re.MULTILINE)
    if name not in SHAPES or hardware is None:
        return {"recipe": file.name, "error": f"no shape of {name!r} here, or no line '# hardware: ...' there"}
    folder = models / str(name).replace("/", "--")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    try:
        config = load_config([file], ["--model", str(folder)], registry)
        plan = make_plan(PreparedRun.of(config, registry, "cuda"), hardware=parse_hardware(hardware[1]))
    except RlsdkError as error:
        return {"recipe": file.name, "error": str(error)}
    share = plan.peak.known_bytes / (plan.hardware.device_bytes or 1)
    return {"recipe": file.name, "fits": plan.fits, "share": round(share, 3), "unknown": list(plan.unknown)}


def main() -> None:
    registry = Registry.discover()
    with tempfile.TemporaryDirectory() as models:
        found = [check(file, Path(models), registry) for file in sorted(RECIPES.glob("*.yaml"))]
    for one in found:
        print(json.dumps(one))
    sys.exit(any(not one.get("fits") for one in found))


if __name__ == "__main__":
    main()
