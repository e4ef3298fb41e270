"""Weights that arrive: all of them or none, served at once, and never an old one again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import ask, assert_exact, changed, collect, halves, make_engine, plain_with, run, tokens_of

from rlsdk.interfaces import Box, RlsdkError, WeightShard, WeightSyncError, fingerprint
from rlsdk.reference.loading import load_shards
from rlsdk.testing.process.models import write_tiny_model


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("weights") / "model", tied=request.param)


def test_an_update_is_served_whole_and_its_receipt_is_of_what_is_served(folder: Path) -> None:
    engine = make_engine(folder, load_weights=False)
    with pytest.raises(WeightSyncError, match="no weights have arrived yet"):
        run(engine, [ask("x", [5])])
    for version in (3, 4):
        state = changed(engine, version)
        receipt = engine.update_weights(iter(halves(state)), version)
        assert receipt.version == version
        assert receipt.num_tensors == len(state)
        assert receipt.num_bytes == sum(tensor.numel() * 4 for tensor in state.values())
        assert receipt.fingerprints == {
            name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in state.items()
        }
        plain = plain_with(folder, state)
        for output in run(engine, [ask("x", [5, 9, 12], 4)]):
            assert_exact(plain, [5, 9, 12], output)
            assert output.policy_version == output.last_policy_version == version


def test_the_layout_names_what_is_held_once(folder: Path) -> None:
    engine = make_engine(folder)
    (layout,) = engine.layout()
    assert [name for name, _ in layout.boxes] == [meta.name for meta in layout.tensors] == list(engine.parameters)
    assert all(box == Box.whole(meta.shape) for (_, box), meta in zip(layout.boxes, layout.tensors, strict=True))
    assert {meta.dtype for meta in layout.tensors} == {"float32"}
    tied = engine.model.config.tie_word_embeddings
    assert dict(layout.tied) == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert make_engine(folder, dtype="bfloat16").layout()[0].tensors[0].dtype == "bfloat16"


def test_other_dtypes_are_converted_on_arrival(qwen2: Path) -> None:
    engine = make_engine(qwen2, dtype="bfloat16")
    state = {name: tensor.float() for name, tensor in changed(engine).items()}
    receipt = engine.update_weights(iter(halves(state)), 1)
    assert receipt.num_bytes == sum(tensor.numel() * 2 for tensor in state.values())
    for name, tensor in state.items():
        assert torch.equal(engine.parameters[name], tensor.bfloat16())
        assert receipt.fingerprints[name] == fingerprint(tensor.bfloat16(), Box.whole(tuple(tensor.shape)))


DAMAGES = {
    "missing": "1 of [0-9]+ tensors were not covered, first 'model.norm.weight'",
    "unknown": "'model.norms.weight' is not a tensor of this model; did you mean 'model.norm.weight'",
    "values": r"has shape \[128\]; a piece arrived at \[0\] of size \[64\], with values of shape \[3\]",
    "beyond": r"has shape \[128\]; a piece arrived at \[100\] of size \[64\]",
    "dimensions": r"has shape \[128\]; a piece arrived at \[0, 0\] of size \[64, 1\]",
    "twice": r"the piece at \[0\] of size \[64\] overlaps the one at \[0\] of size \[64\]",
}


def damaged(pieces: list[WeightShard], damage: str) -> Iterator[WeightShard]:
    rest = [piece for piece in pieces if piece.name != "model.norm.weight"]
    low, high = (piece for piece in pieces if piece.name == "model.norm.weight")
    yield from rest
    if damage == "unknown":
        yield replace(low, name="model.norms.weight")
    elif damage == "values":
        yield replace(low, tensor=low.tensor[:3])
    elif damage == "beyond":
        yield replace(low, box=Box((100,), (64,)))
    elif damage == "dimensions":
        yield replace(low, box=Box((0, 0), (64, 1)), tensor=low.tensor[:, None])
    elif damage == "breaks off":
        raise OSError("the line is dead")
    else:
        yield low
        if damage == "twice":
            yield low
            yield high


@pytest.mark.parametrize("damage", [*DAMAGES, "breaks off"])
def test_a_failed_update_serves_nothing_until_a_whole_one_comes(qwen2: Path, damage: str) -> None:
    engine = make_engine(qwen2)
    pieces = halves(changed(engine))
    with pytest.raises((WeightSyncError, OSError), match=DAMAGES.get(damage, "the line is dead")):
        engine.update_weights(damaged(pieces, damage), 9)
    with pytest.raises(WeightSyncError, match="update to version 9 failed halfway; a complete update is needed"):
        run(engine, [ask("x", [5])])
    engine.update_weights(iter(pieces), 10)
    assert run(engine, [ask("x", [5])])[0].policy_version == 10


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_any_tiling_is_taken_and_any_gap_is_seen(rows: int, columns: int, data: st.DataObject) -> None:
    cuts = [sorted(data.draw(st.sets(st.integers(0, size))) | {0, size}) for size in (rows, columns)]
    value = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + 1
    pieces = [
        WeightShard(name="w", box=box, tensor=value[box.slices(Box.whole((rows, columns)))])
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False)
        for left, right in zip(cuts[1], cuts[1][1:], strict=False)
        for box in [Box((top, left), (bottom - top, right - left))]
    ]
    pieces = data.draw(st.permutations(pieces))
    target = torch.zeros(rows, columns)
    assert load_shards({"w": target}, pieces, 1) == value.numel() * 4
    assert torch.equal(target, value)
    with pytest.raises(WeightSyncError, match="not covered"):
        load_shards({"w": target}, pieces[1:], 1)
    with pytest.raises(WeightSyncError, match="overlaps"):
        load_shards({"w": target}, [*pieces, pieces[0]], 1)


def test_a_piece_that_is_its_own_place_is_not_copied(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    own = {name: parameter.detach() for name, parameter in engine.parameters.items()}
    versions = {name: parameter._version for name, parameter in engine.parameters.items()}
    engine.update_weights(iter(halves(own)), 1)
    assert {name: parameter._version for name, parameter in engine.parameters.items()} == versions


def test_an_update_is_refused_while_requests_run_and_changes_nothing(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    request = ask("x", [5, 6], 3, max_tokens=20, stop_token_ids=())
    expected = tokens_of(run(engine, [request]))
    pieces = halves(changed(engine))

    async def update_midway() -> list[Any]:
        task = asyncio.create_task(collect(engine, [request]))
        await asyncio.sleep(0)
        with pytest.raises(
            WeightSyncError, match="version 7 arrived while 1 requests are running; finish, abort or pause them first"
        ):
            engine.update_weights(iter(pieces), 7)
        with pytest.raises(RlsdkError, match=r"sleep\(\) was called while 1 calls of generate\(\) are running"):
            engine.sleep()
        return await task

    outputs = asyncio.run(update_midway())
    assert tokens_of(outputs) == expected
    assert {o.policy_version for o in outputs} == {0}


def test_the_same_prompt_after_an_update_reads_nothing_of_before(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    request = ask("x", list(range(5, 40)), 5, max_tokens=6)
    run(engine, [request])
    state = changed(engine)
    engine.update_weights(iter(halves(state)), 1)
    plain = plain_with(qwen2, state)
    for output in run(engine, [request]):
        assert_exact(plain, request.prompt_ids, output)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_refuses_work_and_wake_restores_it(folder: Path, level: int) -> None:
    engine = make_engine(folder)
    before = tokens_of(run(engine, [ask("x", [5, 6], 3)]))
    state = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
    engine.sleep(level)
    held = sum(parameter.untyped_storage().nbytes() for parameter in engine.parameters.values())
    assert (held == 0) == (level == 2)
    for asleep in (["kv_cache", "weights"], ["kv_cache"]):
        with pytest.raises(RlsdkError, match=re.escape(f"asleep: call wake({asleep}) first")):
            run(engine, [ask("x", [5])])
        engine.wake((asleep[-1],))
    if level == 2:
        with pytest.raises(WeightSyncError, match=r"sleep dropped the weights: call wake\(\), then update_weights\(\)"):
            run(engine, [ask("x", [5])])
        engine.update_weights(iter(halves(state)), 1)
    assert tokens_of(run(engine, [ask("x", [5, 6], 3)])) == before


def test_an_update_of_sleeping_weights_is_refused(qwen2: Path) -> None:
    engine = make_engine(qwen2)
    pieces = [replace(piece, tensor=piece.tensor.clone()) for piece in halves(changed(engine))]
    engine.sleep(2)
    engine.sleep(2)
    with pytest.raises(RlsdkError, match=r"update_weights\(\) was called while the engine is asleep: call wake"):
        engine.update_weights(iter(pieces), 1)
    engine.wake()
    engine.wake()
    engine.update_weights(iter(pieces), 1)
    assert np.isfinite(run(engine, [ask("x", [5])])[0].log_probs).all()


def test_memory_of_an_update_is_bounded_by_a_piece(qwen2: Path) -> None:
    """Pieces are taken one at a time, and each is done with before the next is asked for."""
    engine = make_engine(qwen2)
    state = changed(engine)

    def reused() -> Iterator[WeightShard]:
        buffer = torch.empty(max(tensor.numel() for tensor in state.values()))
        for name, tensor in state.items():
            view = buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            yield WeightShard(name=name, box=Box.whole(tuple(tensor.shape)), tensor=view)
            buffer.fill_(float("nan"))

    engine.update_weights(reused(), 1)
    for name, tensor in state.items():
        assert torch.equal(engine.parameters[name], tensor)
