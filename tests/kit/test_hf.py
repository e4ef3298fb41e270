"""Hugging Face folders: what is built from them, and what is written back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DeepseekV3Config,
)

from rlsdk.interfaces import Batch, ConfigError, Head, ModelSpec
from rlsdk.kit.files import export as export_module
from rlsdk.kit.files.export import ExportedTensor, write_model
from rlsdk.kit.files.weight_files import checkpoint_files, open_weights
from rlsdk.kit.model.hf import (
    build_model,
    canonical_parameters,
    load_model_config,
    persistent_buffers,
)
from rlsdk.kit.model.outputs import compute_outputs
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.process.reference import load_plain_model

DEEPSEEK = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
}


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_is_loaded_bit_for_bit(models: dict[str, str]) -> None:
    assert equal(weights(build_model(ModelSpec(path=models["qwen2"]))), weights(load_plain_model(models["qwen2"])))


def test_random_weights_follow_the_seed_and_leave_torchs_generator_alone(models: dict[str, str]) -> None:
    spec = ModelSpec(path=models["qwen2"])
    before = torch.get_rng_state()
    first, again, other = (weights(build_model(spec, seed=seed, init_from_config=True)) for seed in (1, 1, 2))
    assert equal(first, again)
    assert not equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_model_has_structure_and_no_memory(models: dict[str, str]) -> None:
    model = build_model(ModelSpec(path=models["qwen2"]), empty=True)
    shapes = {name: p.shape for name, p in load_plain_model(models["qwen2"]).named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert all(p.is_meta for p in model.parameters())


def test_a_new_value_head_follows_the_seed_and_the_body_is_the_checkpoints(models: dict[str, str]) -> None:
    spec = ModelSpec(path=models["qwen2"], head=Head.VALUE)
    first, again, other = (weights(build_model(spec, seed=seed)) for seed in (1, 1, 2))
    assert equal(first, again)
    assert not torch.equal(first["score.weight"], other["score.weight"])
    plain = weights(load_plain_model(models["qwen2"]))
    assert all(torch.equal(value, plain[name]) for name, value in first.items() if not name.startswith("score."))


def test_dropout_is_off_in_training_mode_too(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path, attention_dropout=0.5))
    model = build_model(ModelSpec(path=path, head=Head.VALUE)).train()
    batch = Batch.from_rows([[5, 6, 7, 8, 9, 10]])
    first, again = (compute_outputs(model, Head.VALUE, batch, ("values",))["values"] for _ in range(2))
    assert torch.equal(first, again)


def test_tied_embeddings_have_one_copy_under_the_inputs_name(models: dict[str, str]) -> None:
    parameters, tied = canonical_parameters(build_model(ModelSpec(path=models["llama"])))
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    with safe_open(Path(models["llama"]) / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(parameters)


def export(model: torch.nn.Module, path: Path, source: str | None = None) -> None:
    parameters, _ = canonical_parameters(model)
    tensors = {name: p.detach() for name, p in parameters.items()} | persistent_buffers(model)
    listed = [ExportedTensor(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()]
    write_model(path, model.config, listed, lambda tensor, _: tensors[tensor.name], source=source)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen2", "llama"])
@pytest.mark.parametrize("limit", [4 << 30, 100_000], ids=["one file", "many files"])
def test_an_export_is_read_by_transformers_bit_for_bit(
    models: dict[str, str], tmp_path: Path, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "MAX_FILE_BYTES", limit)
    model = build_model(ModelSpec(path=models[name]), init_from_config=True, seed=5)
    export(model, tmp_path / "export")
    files = list((tmp_path / "export").glob("*.safetensors"))
    assert (len(files) == 1) == (limit > 1 << 30)
    assert all(file.stat().st_size < limit + 300_000 for file in files)
    read, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values())
    assert equal(weights(read), weights(model))


def test_an_export_keeps_the_buffers_that_a_checkpoint_holds(tmp_path: Path) -> None:
    config = DeepseekV3Config(**DEEPSEEK)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    plain.model.layers[0].mlp.gate.e_score_correction_bias.uniform_()
    plain.save_pretrained(tmp_path / "plain")
    model = build_model(ModelSpec(path=str(tmp_path / "plain")))
    assert list(persistent_buffers(model)) == ["model.layers.0.mlp.gate.e_score_correction_bias"]
    export(model, tmp_path / "export")
    read, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values())
    assert equal(read.state_dict(), plain.state_dict())


def test_an_exported_value_model_is_a_token_classifier(models: dict[str, str], tmp_path: Path) -> None:
    model = build_model(ModelSpec(path=models["qwen2"], head=Head.VALUE), seed=4)
    export(model, tmp_path)
    read = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert read.config.architectures == ["Qwen2ForTokenClassification"]
    assert equal(weights(read), weights(model))
    assert equal(weights(build_model(ModelSpec(path=str(tmp_path), head=Head.VALUE), seed=9)), weights(model))


def test_an_exports_configuration_is_the_models_own_but_for_its_dtype(models: dict[str, str], tmp_path: Path) -> None:
    model = build_model(ModelSpec(path=models["qwen2"]), dtype=torch.bfloat16)
    export(model, tmp_path)
    before, after = (AutoConfig.from_pretrained(path).to_dict() for path in (models["qwen2"], tmp_path))
    assert after["dtype"] == "bfloat16"
    odd = {key for key in before if before[key] != after.get(key)}
    assert odd <= {"dtype", "_name_or_path"}


def test_an_export_takes_the_tokenizer_along(models: dict[str, str], tmp_path: Path) -> None:
    export(build_model(ModelSpec(path=models["qwen2"])), tmp_path, source=models["qwen2"])
    assert AutoTokenizer.from_pretrained(tmp_path).decode([5, 6, 7]) == AutoTokenizer.from_pretrained(
        models["qwen2"]
    ).decode([5, 6, 7])
    assert (tmp_path / "generation_config.json").is_file()


def test_a_folder_without_configuration_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model configuration could be read.*Give a folder with config\.json"):
        load_model_config(ModelSpec(path=str(tmp_path)))


def test_a_checkpoint_that_lacks_tensors_is_refused_by_name(models: dict[str, str], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(models["qwen2"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors .* first 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        build_model(ModelSpec(path=str(tmp_path)))


def test_a_checkpoint_of_another_shape_or_cut_short_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(models["qwen2"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    with pytest.raises(ConfigError, match=r"gate_proj\.weight': it has shape .*give the config\.json that belongs"):
        build_model(ModelSpec(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"weights could not be loaded from .*model\.safetensors"):
        build_model(ModelSpec(path=str(tmp_path)))


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": null}', '{"weight_map": {"lm_head.weight": "gone"}}'])
def test_an_index_of_weight_files_that_is_none_is_refused_by_name(
    index: str, models: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(models["qwen2"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"(model\.safetensors\.index\.json|gone)"):
        [open_weights(path) for path in checkpoint_files(ModelSpec(path=str(tmp_path))).values()]


def test_pickled_weights_are_not_loaded(models: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(models["qwen2"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    torch.save(load_plain_model(models["qwen2"]).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"found neither model\.safetensors nor .*; save it with save_pretrained"):
        build_model(ModelSpec(path=str(tmp_path)))


def test_code_that_comes_with_a_model_does_not_run_unasked(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "never-seen", "auto_map": {"AutoConfig": "custom.CustomConfig"}})
    )
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_model_config(ModelSpec(path=str(tmp_path)))
    assert not ran.exists()
