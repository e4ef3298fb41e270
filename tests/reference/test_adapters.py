"""Adapters of the torch engine against PEFT on plain transformers, and what must not pass in silence."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsdk.algorithms import PolicyObjective
from rlsdk.config import load_config
from rlsdk.interfaces import (
    AdapterSpec,
    Batch,
    Box,
    CheckpointError,
    ConfigError,
    Head,
    ModelSpec,
    OptimSpec,
    RankContext,
    TrainSpec,
    WeightPart,
    Workload,
)
from rlsdk.kit.files.adapter_config import spec_of
from rlsdk.kit.model.adapter_files import write_merged
from rlsdk.kit.model.adapters import merged
from rlsdk.kit.model.shapes import count_parameters, shape_fields
from rlsdk.reference.forecast import forecast_training
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.models import random_batch, write_tiny_model
from rlsdk.testing.process.reference import plain_outputs
from rlsdk.testing.rollout.adapter_requirements import with_adapter
from rlsdk.trainer.inputs.model_config import fields_of, quantized_base

OPTIM = OptimSpec(lr=1e-2, eps=1e-6, max_grad_norm=0.5)
CTX = RankContext(role="actor", seed=3)
BATCHES = [random_batch(4, longest=16, seed=seed) for seed in range(3)]
KINDS = {
    "untied": {"architecture": "qwen2"},
    "tied": {"architecture": "qwen3", "tied": True},
    "experts beside dense": {
        **{"architecture": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    },
    "experts": {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def made(kind: str) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("models") / kind, **KINDS[kind])

    return made


def engine_of(path: Path, adapter: AdapterSpec | None, *, dtype: str = "float32", trained: bool = True) -> Any:
    engine = TorchTrainEngine()
    model = ModelSpec(path=str(path), dtype=dtype, adapter=adapter)
    engine.initialize(CTX, TrainSpec(model=model, optim=OPTIM if trained else None, micro_batch_rows=3))
    return engine


def trained_engine(path: Path, adapter: AdapterSpec, *, dtype: str = "float32", steps: int = 2) -> Any:
    """An engine whose adapter is not zero."""
    engine = engine_of(path, adapter, dtype=dtype)
    for batch in BATCHES[:steps]:
        engine.forward_backward(batch, PolicyObjective())
        engine.optim_step()
    return engine


def log_probs(engine: Any, batch: Batch = BATCHES[0]) -> Tensor:
    found: Tensor = engine.forward(batch, ("log_probs",))["log_probs"]
    return found


def peft_model(path: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """PEFT's own model, with random A and B."""
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return get_peft_model(base, LoraConfig(init_lora_weights=False, **config)).eval()


def peft_log_probs(model: Any, batch: Batch = BATCHES[0]) -> Tensor:
    return plain_outputs(model, batch)["log_probs"] * batch["response_mask"]


@settings(max_examples=6)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rank=st.sampled_from([1, 3, 8]),
    alpha=st.sampled_from([1.0, 4.0]),
    rslora=st.booleans(),
    targets=st.sampled_from([("all-linear",), ("q_proj",), ("o_proj", "v_proj")]),
)
def test_log_probs_gradients_and_steps_are_those_of_peft(
    models: Any, tmp_path_factory: pytest.TempPathFactory, kind: str, rank: int, alpha: float, rslora: bool,
    targets: tuple[str, ...],
) -> None:  # fmt: skip
    scaling = "rslora" if rslora else "standard"
    own = AdapterSpec(rank=rank, alpha=alpha, scaling=scaling, targets=targets)  # type: ignore[arg-type]
    layers = list(engine_of(models(kind), own).adapter.layers)
    reference = peft_model(models(kind), r=rank, lora_alpha=alpha, use_rslora=rslora, target_modules=layers)
    folder = tmp_path_factory.mktemp("adapter")
    reference.save_pretrained(folder)
    engine = engine_of(models(kind), AdapterSpec(**{**vars(own), "path": str(folder)}))
    optimizer = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=OPTIM.lr, eps=OPTIM.eps, weight_decay=0.0
    )
    assert (log_probs(engine) - peft_log_probs(reference)).abs().max() < 1e-5
    for batch in BATCHES:
        engine.forward_backward(batch, PolicyObjective())
        PolicyObjective()(plain_outputs(reference, batch), batch).loss.backward()
        wanted = {
            name.removeprefix("base_model.model.").replace(".default", ""): p.grad
            for name, p in reference.named_parameters()
            if p.requires_grad
        }
        found = {name: p.grad for name, p in engine.parameters.items()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6)
        norm = torch.nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.grad is not None], 0.5)
        assert engine.optim_step().grad_norm == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    assert (log_probs(engine) - peft_log_probs(reference)).abs().max() < 1e-4


def test_only_the_adapter_is_trained(models: Any) -> None:
    before = torch.get_rng_state()
    engine = engine_of(models("untied"), AdapterSpec(rank=4))
    base = {name: p.clone() for name, p in engine.computed.items()}
    first = {name: p.clone() for name, p in engine.parameters.items()}
    assert torch.equal(log_probs(engine), log_probs(engine_of(models("untied"), None, trained=False))), "B is not 0"
    engine.forward_backward(BATCHES[0], PolicyObjective())
    assert all(p.grad is None and not p.requires_grad for p in engine.computed.values())
    engine.optim_step()
    engine.forward_backward(BATCHES[1], PolicyObjective())
    engine.optim_step()
    assert all(torch.equal(base[name], p) for name, p in engine.computed.items())
    assert all(not torch.equal(first[name], p) for name, p in engine.parameters.items())
    assert len(engine.optimizer.state) == len(first) == 2 * 7 * 2
    assert torch.equal(torch.get_rng_state(), before)


def test_the_reference_is_the_model_without_adapter_bit_for_bit(models: Any) -> None:
    engine = trained_engine(models("tied"), AdapterSpec(rank=4))
    plain = engine_of(models("tied"), None, trained=False)
    reference = engine.forward_reference(BATCHES[1], ("log_probs",))["log_probs"]
    assert torch.equal(reference, log_probs(plain, BATCHES[1]))
    assert not torch.equal(reference, log_probs(engine, BATCHES[1]))


def test_a_kept_reference_stays(models: Any, tmp_path: Path) -> None:
    adapter = AdapterSpec(rank=4)
    engine, other = trained_engine(models("untied"), adapter), trained_engine(models("untied"), adapter)
    kept = log_probs(engine, BATCHES[1])
    engine.keep_reference()
    for each in (engine, other):
        each.forward_backward(BATCHES[2], PolicyObjective())
        if each is engine:  # between a gradient and its step: the reference must leave no trace
            assert torch.equal(each.forward_reference(BATCHES[1], ("log_probs",))["log_probs"], kept)
        each.optim_step()
    assert torch.equal(log_probs(engine), log_probs(other))
    (tmp_path / "saved").mkdir()
    engine.save_checkpoint(tmp_path / "saved")
    resumed = engine_of(models("untied"), adapter)
    resumed.load_checkpoint(tmp_path / "saved")
    assert torch.equal(resumed.forward_reference(BATCHES[1], ("log_probs",))["log_probs"], kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_have_the_adapter_added_in_float32(models: Any, dtype: str) -> None:
    engine = trained_engine(models("untied"), AdapterSpec(rank=4, alpha=8.0), dtype=dtype)
    base = load_file(models("untied") / "model.safetensors")
    shards = {shard.name: shard for shard in engine.shards()}
    assert [(shard.name, shard.box) for shard in shards.values()] == list(engine.layout().boxes)
    assert {meta.dtype for meta in engine.layout().tensors} == {dtype}
    assert {p.dtype for p in engine.parameters.values()} == {torch.float32}
    assert shards.keys() == base.keys()
    for name, shard in shards.items():
        own = base[name].to(getattr(torch, dtype))
        if (module := name.removesuffix(".weight")) in engine.adapter.layers:
            a, b = (engine.parameters[f"{module}.{kind}.weight"].detach() for kind in ("lora_A", "lora_B"))
            wanted = (own.double() + 2.0 * b.double() @ a.double()).float()
            assert shard.tensor.dtype == own.dtype
            assert (shard.tensor.float() - wanted).abs().max() < (1e-6 if dtype == "float32" else 2e-3)
            assert not torch.equal(shard.tensor, own)
        else:
            assert torch.equal(shard.tensor, own)


@given(
    out=st.integers(1, 40), inner=st.integers(1, 40), rank=st.integers(1, 9), scale=st.floats(0.01, 30.0),
    seed=st.integers(0, 99), half=st.booleans(),
)  # fmt: skip
def test_merging_is_exact_for_rows_and_rounded_once(
    out: int, inner: int, rank: int, scale: float, seed: int, half: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(out, inner, generator=generator).to(torch.bfloat16 if half else torch.float32)
    a, b = torch.randn(rank, inner, generator=generator), torch.randn(out, rank, generator=generator)
    found = merged(base, a, b, scale)
    wanted = base.double() + scale * (b.double() @ a.double())
    size = base.double().abs() + scale * (b.double().abs() @ a.double().abs())
    assert ((found.double() - wanted).abs() <= size * (2**-8 if half else 1e-6)).all()
    assert torch.equal(merged(base, a, torch.zeros_like(b), scale), base)
    cut = out // 2
    parts = torch.cat([merged(base[:cut], a, b[:cut], scale), merged(base[cut:], a, b[cut:], scale)])
    assert (parts.double() - wanted).abs().max() <= (size * (2**-8 if half else 1e-6)).max()


def test_a_small_adapter_is_lost_in_bfloat16_and_counted(models: Any) -> None:
    large = trained_engine(models("untied"), AdapterSpec(rank=4), dtype="bfloat16")
    exact = trained_engine(models("untied"), AdapterSpec(rank=4))
    assert exact.moved_share() > 0.99
    assert large.moved_share() > 0.3
    with torch.no_grad():
        for name, p in large.parameters.items():
            if "lora_B" in name:
                p.mul_(1e-3)
    assert 0.0 < large.moved_share() < 0.05
    assert engine_of(models("untied"), AdapterSpec(rank=4), dtype="bfloat16").moved_share() == 0.0


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("untied", ("all-linear",)), ("tied", ("q_proj", "down_proj")), ("experts beside dense", ("all-linear",))],
)
def test_peft_opens_what_is_written(models: Any, tmp_path: Path, kind: str, targets: tuple[str, ...]) -> None:
    engine = trained_engine(models(kind), AdapterSpec(rank=4, alpha=8.0, targets=targets, scaling="rslora"))
    engine.save_pretrained(tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    base = AutoModelForCausalLM.from_pretrained(models(kind), dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert (peft_log_probs(opened) - log_probs(engine)).abs().max() < 1e-5
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(models(kind))
    assert len(config["target_modules"]) == {"untied": 7, "tied": 2}.get(kind, len(config["target_modules"]))
    again = spec_of(tmp_path / "adapter")
    assert torch.equal(log_probs(engine_of(models(kind), again)), log_probs(engine))
    write_merged(ModelSpec(path=str(models(kind))), tmp_path / "adapter", tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert (peft_log_probs(plain) - log_probs(engine)).abs().max() < 1e-5
    merging = engine_of(models(kind), AdapterSpec(**{**vars(again), "export": "merged"}))
    merging.save_pretrained(tmp_path / "own")
    there, here = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "own"))
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)


def test_resume_is_equal_number_for_number(models: Any, tmp_path: Path) -> None:
    adapter = AdapterSpec(rank=4)
    engine = trained_engine(models("untied"), adapter)
    engine.save_checkpoint(tmp_path)
    assert (
        sum(file.stat().st_size for file in tmp_path.iterdir())
        < 0.5 * (models("untied") / "model.safetensors").stat().st_size
    ), "the base is in the checkpoint"
    resumed = engine_of(models("untied"), AdapterSpec(rank=4, init="gaussian"))
    resumed.load_checkpoint(tmp_path)
    for each in (engine, resumed):
        each.forward_backward(BATCHES[2], PolicyObjective())
        each.optim_step()
    assert all(torch.equal(p, resumed.parameters[name]) for name, p in engine.parameters.items())


def test_another_base_is_refused_at_resume(models: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    adapter = AdapterSpec(rank=4)
    trained_engine(models("untied"), adapter).save_checkpoint(tmp_path / "saved")
    other = write_tiny_model(tmp_path / "other", seed=1)
    for path, spec, said in (
        (other, adapter, "adapter of another model"),
        (models("untied"), None, "holds an adapter alone"),
        (models("untied"), AdapterSpec(rank=4, alpha=16.0), "adapter of another model"),
        (models("untied"), AdapterSpec(rank=2, alpha=16.0), "tensors differ"),
    ):
        engine = engine_of(path, spec)
        before = log_probs(engine)
        with pytest.raises(CheckpointError, match=said):
            engine.load_checkpoint(tmp_path / "saved")
        assert torch.equal(log_probs(engine), before)
    (tmp_path / "whole").mkdir()
    engine_of(models("untied"), None).save_checkpoint(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="weights are all trained"):
        engine_of(models("untied"), adapter).load_checkpoint(tmp_path / "whole")


def test_all_linear_takes_no_router_and_no_output_layer(models: Any) -> None:
    engine = engine_of(models("experts"), AdapterSpec(rank=2))
    assert {name.rpartition(".")[2] for name in engine.adapter.layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    engine = engine_of(models("experts beside dense"), AdapterSpec(rank=2))
    assert {name.rpartition(".")[2] for name in engine.adapter.layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("kind", "targets", "said"),
    [
        ("tied", ("lm_head",), "is tied to that of another layer"),
        ("tied", ("q_proj", "embed_tokens"), "no linear layer"),
        ("untied", ("embed_tokens",), "Embedding, and no linear layer"),
        ("untied", ("q_pro",), "q_proj"),
        ("untied", (), "is empty"),
        ("experts", ("gate_up_proj",), "stacked experts"),
        ("experts beside dense", ("gate_proj",), "beside stacked experts"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused(
    models: Any, kind: str, targets: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        engine_of(models(kind), AdapterSpec(rank=2, targets=targets))
    assert str(caught.value).startswith("model.lora.targets")


def test_an_untied_output_layer_may_have_one(models: Any, tmp_path: Path) -> None:
    engine = trained_engine(models("untied"), AdapterSpec(rank=2, targets=("lm_head",)))
    engine.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(models("untied"), dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert (peft_log_probs(opened) - log_probs(engine)).abs().max() < 1e-5
    assert not torch.equal(dict(_served(engine))["lm_head.weight"], engine.computed["lm_head.weight"])


def _served(engine: Any) -> dict[str, Tensor]:
    shards = list(engine.shards())
    assert all(shard.box == Box.whole(tuple(shard.tensor.shape)) for shard in shards)
    return {shard.name: shard.tensor for shard in shards}


def test_a_folder_of_another_adapter_is_refused(models: Any, tmp_path: Path) -> None:
    peft_model(models("untied"), r=4, lora_alpha=8, target_modules=["q_proj"]).save_pretrained(tmp_path / "a")
    good = {"rank": 4, "alpha": 8.0, "targets": ("q_proj",), "path": str(tmp_path / "a")}
    engine_of(models("untied"), AdapterSpec(**good))  # type: ignore[arg-type]
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for change, said in (
        ({"rank": 2}, "--model.lora.rank 4"),
        ({"alpha": 16.0}, "--model.lora.alpha 8.0"),
        ({"targets": ("q_proj", "v_proj")}, "tensors differ"),
        ({"path": str(tmp_path / "none")}, "could not be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine_of(models("untied"), AdapterSpec(**{**good, **change}))  # type: ignore[arg-type]
    for name, value in (("use_dora", True), ("modules_to_save", ["lm_head"]), ("alpha_pattern", {"q_proj": 2})):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ConfigError, match=name):
            engine_of(models("untied"), AdapterSpec(**{**good, "path": str(tmp_path / name)}))  # type: ignore[arg-type]
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="1 tensors differ"):
        engine_of(models("untied"), AdapterSpec(**good))  # type: ignore[arg-type]


@settings(max_examples=12, deadline=None)
@given(
    rank=st.integers(1, 9),
    alpha=st.floats(0.5, 64.0),
    scaling=st.sampled_from(["standard", "rslora"]),
    targets=st.sets(st.sampled_from(["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]), min_size=1),
    seed=st.integers(0, 99),
)
def test_the_two_parts_are_the_merged_weights(
    models: Any, rank: int, alpha: float, scaling: Any, targets: set[str], seed: int
) -> None:
    spec = AdapterSpec(rank=rank, alpha=alpha, scaling=scaling, targets=tuple(targets))
    engine, generator = engine_of(models("untied"), spec), torch.Generator().manual_seed(seed)
    for parameter in engine.parameters.values():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    parts = {part: {s.name: s.tensor for s in engine.part_shards(part)} for part in WeightPart}
    for part, tensors in parts.items():
        layout = engine.part_layout(part)
        assert [name for name, _ in layout.boxes] == list(tensors)
        assert {meta.name: meta.shape for meta in layout.tensors} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {tuple(t.shape)[0 if ".lora_A." in n else 1] for n, t in parts[WeightPart.ADAPTER].items()} == {rank}
    found = with_adapter(parts[WeightPart.BASE], parts[WeightPart.ADAPTER], spec)
    for name, tensor in _served(engine).items():
        adapted = f"{name.removesuffix('.weight')}.lora_A.weight" in engine.parameters
        assert (tensor - found[name]).abs().max() <= (1e-5 * spec.scale * rank if adapted else 0.0)


def test_a_model_folder_with_an_adapter_in_it_is_refused(models: Any, tmp_path: Path) -> None:
    shutil.copytree(models("untied"), tmp_path / "both")
    peft_model(models("untied"), r=4, target_modules=["q_proj"]).save_pretrained(tmp_path / "both")
    assert (tmp_path / "both" / "config.json").is_file()
    for build in (lambda: engine_of(tmp_path / "both", None), lambda: fields_of(str(tmp_path / "both"), None, "f")):
        with pytest.raises(ConfigError, match=r"holds both a model .* and an adapter .*model\.lora\.path"):
            build()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "both" / name).unlink()
    engine_of(tmp_path / "both", None)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_quantized_weights_below_an_adapter_are_refused_with_what_bfloat16_needs(method: str) -> None:
    model = {**shape_fields("shape:qwen3-8b"), "quantization_config": {"quant_method": method, "load_in_4bit": True}}
    config = load_config([], ["--model", "m", "--model.lora.rank", "8"])
    (found,) = quantized_base(config, model)
    size = count_parameters(model)
    assert size is not None
    assert found.path == "model.lora.rank"
    assert method in found.text
    assert f"{2 * size / 1e9:.1f} GB" in found.text
    assert not list(quantized_base(load_config([], ["--model", "m"]), model))
    assert not list(quantized_base(config, shape_fields("shape:qwen3-8b")))


def test_the_forecast_counts_optimizer_state_of_the_adapter_alone(models: Any) -> None:
    model = ModelSpec(path=str(models("tied")), dtype="bfloat16", adapter=AdapterSpec(rank=4))
    spec = TrainSpec(model=model, optim=OPTIM, micro_batch_rows=3)
    (memory,) = forecast_training([CTX], spec, Workload(row_tokens=16, update_rows=4, running_rows=4)).memory
    engine = trained_engine(models("tied"), AdapterSpec(rank=4), dtype="bfloat16")
    held = {part: sum(t.nbytes for t in engine._tensors_of(part)) for part in ("weights", "optimizer")}
    assert memory.weights_bytes == held["weights"]
    assert memory.optimizer_bytes == pytest.approx(held["optimizer"], rel=0.01)  # it also counts steps
    assert memory.gradients_bytes == sum(p.nbytes for p in engine.parameters.values())


def test_other_heads_are_refused(models: Any) -> None:
    engine = TorchTrainEngine()
    model = ModelSpec(path=str(models("untied")), adapter=AdapterSpec(rank=2), head=Head.SCORE)
    with pytest.raises(ConfigError, match="score head"):
        engine.initialize(CTX, TrainSpec(model=model, optim=OPTIM, micro_batch_rows=3))


def test_without_peft_the_command_is_named(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsdk.kit.model.adapters.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rlsdk\[lora\]'"):
        engine_of(models("untied"), AdapterSpec(rank=2))
