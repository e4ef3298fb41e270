"""Adapters with every stage, on 1, 2 and 3 ranks: the numbers of PEFT on one process, and what they do not show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import difference, whole
from jobs import NUM_ROWS, OPTIM, Case, adapter, parts, plain, refused_checkpoints, train
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rlsdk.algorithms.objectives.policy import PolicyObjective
from rlsdk.interfaces import AdapterSpec, Box, CheckpointError, RankContext, WeightPart, Workload
from rlsdk.kit.model.optim import learning_rate
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.reference import plain_outputs
from rlsdk_deepspeed.config import DeepSpeedOptions
from rlsdk_deepspeed.forecast import forecast

EXACT = 1e-5
"""float32."""
STAGES = (1, 2, 3)
SIZES = (2, 1, 3)
ADAPTER = AdapterSpec(rank=3, alpha=6.0)
WORK = Workload(row_tokens=16, update_rows=8, running_rows=1)


def copies(stage: int, size: int) -> int:
    """Ranks that hold each element of a frozen weight."""
    return 1 if stage == 3 else size


@pytest.fixture(scope="module")
def begun(models: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> AdapterSpec:
    """An adapter that PEFT wrote, with random A and B."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("begun")
    config = LoraConfig(r=3, lora_alpha=6.0, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(models["odd"]), config).save_pretrained(folder)
    return replace(ADAPTER, path=str(folder))


@pytest.fixture(scope="module")
def by_peft(models: Mapping[str, str], begun: AdapterSpec) -> dict[str, Any]:
    """The steps of `jobs.drive` by PEFT, on one process and without code of this project but the objective."""
    base = AutoModelForCausalLM.from_pretrained(models["odd"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, begun.path or "", is_trainable=True).eval()
    low = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(low, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay, foreach=False)
    found: dict[str, Any] = {"losses": [], "norms": [], "lrs": []}
    for step in range(3):
        batch = random_batch(NUM_ROWS, seed=10 * step)
        loss = PolicyObjective(entropy_coef=0.01)(plain_outputs(model, batch), batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        found["losses"].append(float(loss.detach()))
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(low, OPTIM.max_grad_norm or torch.inf)))
        found["lrs"].append(learning_rate(step, OPTIM))
        optimizer.param_groups[0]["lr"] = found["lrs"][-1]
        optimizer.step()
        optimizer.zero_grad()
    found["log_probs"] = rows_of(model)
    merged = dict(model.merge_and_unload().named_parameters())
    found["shards"] = [(name, Box.whole(tuple(p.shape)), p.detach().clone()) for name, p in merged.items()]
    return found


@torch.no_grad()
def rows_of(model: Any) -> dict[int, torch.Tensor]:
    """Log-probs of each row by plain transformers."""
    batch = random_batch(NUM_ROWS, seed=3)
    found = plain_outputs(model, batch)["log_probs"] * batch["response_mask"]
    return dict(zip(batch["row_id"].tolist(), found.split(batch.lengths.tolist()), strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_losses_norms_weights_and_outputs_equal_peft(
    stage: int, size: int, models: Any, world: Any, begun: AdapterSpec, by_peft: dict[str, Any]
) -> None:
    case = Case(models["odd"], DeepSpeedOptions(zero_stage=stage), adapter=begun)
    found = difference(world(size).run(train, case), by_peft, copies(stage, size))
    print(f"ZeRO-{stage} x {size}", found)
    assert max(found.values()) <= EXACT


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["rank 1, tied", "calls", "lonely", "recomputed", "mixture", "offload", "head"])
def test_other_models_and_calls_equal_one_process(what: str, stage: int, models: Any, world: Any) -> None:
    offload = DeepSpeedOptions(zero_stage=stage, offload_optimizer=True, offload_param=stage == 3)
    spec = {"rank 1, tied": AdapterSpec(rank=1, targets=("q_proj",)), "head": AdapterSpec(rank=2, targets=("lm_head",))}
    case = Case(
        models[{"rank 1, tied": "tied", "mixture": "mixture"}.get(what, "plain")],
        offload if what == "offload" else DeepSpeedOptions(zero_stage=stage),
        adapter=spec.get(what, ADAPTER),
        calls=2 if what == "calls" else 1,
        lonely=what == "lonely",
        checkpointing=what == "recomputed",
        logits=4 * 128 if what == "head" else 1 << 25,
        split=True,
    )
    found = difference(world(2).run(train, case), plain(case), copies(stage, 2))
    print(f"ZeRO-{stage} x 2, {what}", found)
    assert max(found.values()) <= EXACT


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_weights_below_a_float32_adapter(stage: int, models: Any, world: Any, tmp_path: Path) -> None:
    case = Case(
        models["plain"], DeepSpeedOptions(zero_stage=stage), dtype="bfloat16", adapter=ADAPTER, export=str(tmp_path)
    )
    ranks, expected = world(2).run(train, case), plain(case)
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], abs=0.02)
    assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=0.05)
    assert {meta.dtype for rank in ranks for meta in rank["layout"].tensors} == {"bfloat16"}
    for rank in world(2).run(adapter, case):
        assert rank["dtypes"] == {torch.float32}
        assert all(rank[what] for what in ("first", "off", "kept", "resumed", "equal"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_references_exports_checkpoints_and_memory(
    stage: int, size: int, models: Any, world: Any, tmp_path: Path
) -> None:
    case = Case(models["odd"], DeepSpeedOptions(zero_stage=stage), adapter=ADAPTER, export=str(tmp_path), split=True)
    ranks = world(size).run(adapter, case)
    for rank in ranks:
        assert rank["first"], "before any other pass, the model without an adapter to the bit"
        assert rank["off"], "after two steps"
        assert rank["kept"]
        assert all(norm > 0 for norm in rank["norms"]), "a reference that is asked must not freeze the adapter"
        assert rank["moved"] == ranks[0]["moved"] > 0.99
        assert rank["skipped"] == float("inf")
        assert rank["stayed"], "a skipped step"
        assert rank["resumed"]
        assert rank["equal"]
    base = AutoModelForCausalLM.from_pretrained(models["odd"], dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, tmp_path / "exported_adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "exported_merged", dtype=torch.float32).eval()
    for model in (opened, merged):
        expected = rows_of(model)
        found = {row: values for rank in ranks for row, values in rank["after"].items()}
        assert all((values - expected[row]).abs().max() < EXACT for row, values in found.items())
    contexts = [RankContext(role="actor", rank=rank, world_size=size, local_rank=rank) for rank in range(size)]
    foreseen = forecast(contexts, case.spec, WORK)
    for rank, memory in zip(ranks, foreseen.memory, strict=True):
        assert rank["held"]["optimizer"] == pytest.approx(memory.optimizer_bytes, abs=8 * 100)
        assert rank["held"]["weights"] == pytest.approx(memory.weights_bytes, rel=0.01)
        assert memory.optimizer_bytes < 0.2 * memory.weights_bytes


SAVED = [(2, 2), (1, 1), (3, 3)]
"""Stage and ranks of runs that save."""
Save = Callable[[tuple[int, int]], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def saved(models: Any, world: Any, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Stage and ranks -> folder, and what the run that saved did after it."""

    @functools.cache
    def save(source: tuple[int, int]) -> tuple[Path, list[dict[str, Any]]]:
        stage, size = source
        folder = tmp_path_factory.mktemp(f"zero{stage}-{size}")
        case = Case(models["odd"], DeepSpeedOptions(zero_stage=stage), adapter=ADAPTER, save=str(folder))
        return folder, world(size).run(train, case)

    return save


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("source", SAVED)
def test_a_run_goes_on_at_another_size_and_stage(
    source: tuple[int, int], stage: int, models: Any, world: Any, saved: Save
) -> None:
    size = {1: 1, 2: 2, 3: 3}[stage]
    folder, went_on = saved(source)
    case = Case(models["odd"], DeepSpeedOptions(zero_stage=stage), adapter=ADAPTER, load=str(folder))
    ranks = world(size).run(train, case)
    assert max(difference(ranks, plain(case), copies(stage, size)).values()) <= EXACT
    if source == (stage, size):
        assert ranks[0]["norms"] == went_on[0]["norms"][2:]
        mine, theirs = (whole(found, copies(stage, size)) for found in (ranks, went_on))
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    size_on_disk = sum(file.stat().st_size for file in folder.iterdir())
    assert size_on_disk < 0.5 * (Path(models["odd"]) / "model.safetensors").stat().st_size


@pytest.mark.parametrize("stage", STAGES)
def test_another_base_scale_or_kind_is_refused_on_every_rank(
    stage: int, models: Any, world: Any, saved: Save, tmp_path: Path
) -> None:
    folder, _ = saved((2, 2))
    options = DeepSpeedOptions(zero_stage=stage)
    world(2).run(train, Case(models["odd"], options, save=str(tmp_path)))
    cases = {
        "adapter of another model": Case(models["odd"], options, dtype="bfloat16", adapter=ADAPTER, load=str(folder)),
        f"scale {ADAPTER.scale:g}": Case(models["odd"], options, adapter=replace(ADAPTER, alpha=3.0), load=str(folder)),
        "holds an adapter alone": Case(models["odd"], options, load=str(folder)),
        "weights are all trained": Case(models["odd"], options, adapter=ADAPTER, load=str(tmp_path)),
    }
    for rank in world(2).run(refused_checkpoints, cases):
        for told, error in rank.items():
            assert isinstance(error, CheckpointError), told
            assert told in str(error)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("size", [2, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_parts_are_what_is_held_and_foreseen(
    stage: int, size: int, trained: bool, models: Any, world: Any, begun: AdapterSpec
) -> None:
    from safetensors.torch import load_file

    case = Case(models["odd"], DeepSpeedOptions(zero_stage=stage), adapter=begun, calls=int(trained))
    ranks = world(size).run(parts, case)
    base = whole([rank[WeightPart.BASE] for rank in ranks], copies(stage, size))
    files = load_file(Path(models["odd"]) / "model.safetensors")
    assert base.keys() == files.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in files.items())
    low = whole([rank[WeightPart.ADAPTER] for rank in ranks], 1 if trained else copies(stage, size))
    written = load_file(Path(begun.path or "") / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in low} == written.keys()
    assert all(torch.equal(low[name.removeprefix("base_model.model.")], tensor) for name, tensor in written.items())
    if trained:
        assert [rank[part]["private"] for rank in ranks for part in WeightPart] == [[]] * 2 * size
    contexts = [RankContext(role="actor", rank=rank, world_size=size, local_rank=rank) for rank in range(size)]
    spec = case.spec if trained else replace(case.spec, optim=None)
    for rank, (foreseen,) in zip(ranks, forecast(contexts, spec, WORK).layouts, strict=True):
        layout = rank[WeightPart.BASE]["layout"]
        assert replace(foreseen, process=layout.process) == layout
