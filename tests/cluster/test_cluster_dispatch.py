"""Where calls go and what comes back, on four real workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlsdk.cluster import Cluster, WorkerGroup, wait_any
from rlsdk.interfaces import Batch, BatchError, ConfigError

MakeGroup = Callable[..., WorkerGroup]


@pytest.fixture(scope="module")
def paired(make_group: MakeGroup) -> WorkerGroup:
    """Two data-parallel ranks of two model-parallel ranks each."""
    return make_group(tp_size=2)


def batch_of(*lengths: int) -> Batch:
    ids = torch.tensor([100 + row for row in range(len(lengths))])
    return Batch.from_rows([[row + 1] * length for row, length in enumerate(lengths)], row_id=ids)


def test_all_ranks_get_the_same_arguments_and_answer_in_rank_order(group: WorkerGroup) -> None:
    assert group.run("ranks", 10, factor=2) == [20, 22, 24, 26]


def test_rank_zero_alone_is_called_and_its_result_comes_as_it_is(group: WorkerGroup) -> None:
    assert group.run("zero") == 0


def test_the_first_result_is_that_of_the_first_collecting_rank(group: WorkerGroup) -> None:
    assert group.run("first") == 0


def test_the_first_that_is_done_answers_for_all(group: WorkerGroup) -> None:
    assert group.run("race", [1.0, 1.0, 0.0, 1.0]) == 2


def test_any_goes_to_a_rank_that_has_nothing_to_do(make_group: MakeGroup) -> None:
    group = make_group()
    slow = [group.submit("anyone", 1.0) for _ in range(3)]
    assert group.run("anyone", 0.0) == 3
    assert sorted(item.result() for item in slow) == [0, 1, 2]


def test_each_rank_can_have_arguments_of_its_own(group: WorkerGroup) -> None:
    assert group.run_each("ranks", [(1,), (10,), (100,), (1000,)]) == [1, 11, 102, 1003]
    with pytest.raises(ConfigError, match="arguments for 1 ranks, the group has 4"):
        group.run_each("ranks", [(1,)])


def test_rows_are_balanced_by_tokens_and_rejoined_in_order(group: WorkerGroup, cluster: Cluster) -> None:
    batch = batch_of(3, 50, 1, 20, 21, 2, 40, 9)
    answer: Batch = group.run("double", cluster.put(batch))
    assert answer["row_id"].tolist() == batch["row_id"].tolist()
    assert torch.equal(answer["doubled"], batch["input_ids"] * 2)
    tokens = [int(batch.lengths[answer["by"] == rank].sum()) for rank in range(4)]
    assert max(tokens) == 50
    assert sum(tokens) == batch.num_tokens


def test_the_ranks_of_one_data_parallel_rank_share_its_rows(paired: WorkerGroup, cluster: Cluster) -> None:
    batch = batch_of(5, 4, 3, 2, 1)
    found = paired.run("two_batches", cluster.put(batch), batch, note="n")
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(found[0][0] + found[2][0]) == batch["row_id"].tolist()
    assert all(first == second and note == "n" for first, second, note in found)
    joined: Batch = paired.run("double", batch)
    assert set(joined["by"].tolist()) == {0, 2}, "only collecting ranks are read"


def test_fewer_rows_than_ranks_leave_some_ranks_an_empty_batch(group: WorkerGroup) -> None:
    batch = batch_of(4, 2)
    answer: Batch = group.run("double", batch)
    assert torch.equal(answer["doubled"], batch["input_ids"] * 2)
    assert group.run("nothing", batch) is None


def test_selected_rows_travel_as_numbers_and_come_back_in_the_selected_order(
    group: WorkerGroup, cluster: Cluster
) -> None:
    stored = cluster.put(batch_of(3, 1, 4, 1, 5, 9, 2))
    chosen = stored.select([5, 0, 3]).select(torch.tensor([2, 0]))
    answer: Batch = group.run("double", chosen)
    assert chosen.num_tokens == 10
    assert answer["row_id"].tolist() == [103, 105]
    assert answer["doubled"].tolist() == [8] + [12] * 9


def test_a_lost_row_is_an_error_that_names_it(group: WorkerGroup) -> None:
    with pytest.raises(BatchError, match=r"rows came back changed: .* missing row_id \[10"):
        group.run("drop_a_row", batch_of(3, 3, 3, 3, 3))


def test_a_whole_batch_is_read_in_place_by_every_rank(group: WorkerGroup, make_group: MakeGroup) -> None:
    batch = batch_of(*[2000] * 20)
    assert group.run("whole", batch) == [batch["row_id"].tolist()] * 4
    one_share = make_group(tp_size=4)
    assert one_share.run("shares_memory", batch) == [True] * 4


def test_batches_of_different_sizes_cannot_be_split_together(group: WorkerGroup) -> None:
    with pytest.raises(BatchError, match="have 2 rows, but argument 1 has 3"):
        group.run("two_batches", batch_of(1, 1), batch_of(1, 1, 1), "n")
    with pytest.raises(BatchError, match="no argument is a Batch"):
        group.run("double", 3)


def test_a_misspelt_method_names_the_nearest(group: WorkerGroup) -> None:
    with pytest.raises(ConfigError, match="did you mean 'double'"):
        group.run("duoble", batch_of(1))


def test_submitted_calls_run_in_order_and_can_be_awaited_in_any(make_group: MakeGroup) -> None:
    group = make_group()
    waiting = [group.submit("append", number) for number in range(30)]
    assert waiting[-1].result() == [list(range(30))] * 4
    assert waiting[0].result()[0][:1] == [0]
    assert all(item.done() for item in waiting)


def test_wait_any_returns_the_first_that_is_done(make_group: MakeGroup) -> None:
    group = make_group()
    slow = group.submit("wait_for_release")
    fast = group.submit("where")
    assert wait_any([slow, fast], timeout_s=60) is fast
    assert not slow.done()
    group.run("let_go")
    assert slow.result(60) == [True] * 4
