"""Which rows a follower has recorded: lists, and on a CPU a mark for each class once many ids came."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from samplex_cuda.heads.follow import TableFollower
from samplex_cuda.samplers.base import distinct_ids, mark_ids

C = 40


def test_distinct_ids_by_marks_are_those_of_a_sort():
    for count in (0, 5, C - 1, C, 5 * C):
        ids = torch.randint(-5, C + 5, (count, 2))
        assert torch.equal(distinct_ids(ids, C), distinct_ids(ids.flatten().unique(), C)), count
        assert torch.equal(mark_ids(torch.zeros(C, dtype=torch.bool), ids).nonzero().view(-1), distinct_ids(ids, C))


@pytest.mark.parametrize("size", [3, 17])
def test_many_touched_rows_are_kept_as_marks(size):
    follower, seen = TableFollower(1000, C), set()
    restored = TableFollower(1000, C)
    follower.reset()
    for step in range(60):
        ids = torch.randint(-2, 2 * C if step < 30 else C // 2, (size,))
        seen |= {i for i in ids.tolist() if 0 <= i < C}
        follower.touch(ids, ids[:1])
        assert sum(t.numel() for t in follower.touched) <= 2 * C + size
        if step % 21 == 0:
            assert follower.staleness() == (step + 1, len(seen))
            restored.restore(follower.lag(), torch.device("cpu"))
            for other in (restored, copy.deepcopy(follower), pickle.loads(pickle.dumps(follower))):
                assert other.changed().tolist() == sorted(seen)
                assert other.steps == step + 1
        if step == 58:
            assert follower._seen is not None  # marks, not lists
    follower.mark([torch.tensor([C - 1])])
    assert follower.changed().tolist() == sorted(seen | {C - 1})
    follower.touch(torch.arange(C))
    told = []

    class Told:
        def update(self, ids, rows):
            told.append((ids, rows))

    weight = torch.randn(C, 2)
    follower.look(weight, None)
    follower.flush(Told(), weight, None)
    assert torch.equal(told[0][0], torch.arange(C))
    assert torch.equal(told[0][1], weight)
    assert follower.staleness() == (0, 0)
    follower.touch(torch.tensor([3]))
    assert follower.changed().tolist() == [3]
