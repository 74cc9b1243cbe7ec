"""What the static samplers and their ops refuse."""

from __future__ import annotations

import pytest
import torch
from static_cases import LAWS, key_on, make

import samplex_cuda as sx


class TestErrors:
    @pytest.mark.parametrize(
        ("bad", "error", "text"),
        [
            (-1, ValueError, r"num_samples must be an int in \[0, 2\^24\], got -1"),
            (2**24 + 1, ValueError, r"num_samples must be an int in \[0, 2\^24\], got 16777217"),
            (1.5, TypeError, r"num_samples must be an int in \[0, 2\^24\], got 1.5"),
            (True, TypeError, r"num_samples must be an int in \[0, 2\^24\], got True"),
            (None, TypeError, r"num_samples must be an int in \[0, 2\^24\], got None"),
        ],
    )
    @pytest.mark.parametrize("law", LAWS)
    def test_num_samples(self, law, bad, error, text):
        name = "unigram" if law == "alias" else law
        with pytest.raises(error, match=f"^{name}: {text}$"):
            make(law).sample(None, bad, batch_size=1)

    def test_batch(self):
        sampler = make("uniform")
        with pytest.raises(ValueError, match="uniform: batch_size must be given if h is None, got None"):
            sampler.sample(None, 3)
        with pytest.raises(ValueError, match=r"uniform: batch_size must be 2 as h \[2, 4\] float32 on cpu says, got 3"):
            sampler.sample(torch.zeros(2, 4), 3, batch_size=3)
        with pytest.raises(ValueError, match="uniform: batch_size must be an int of at least 0, got -1"):
            sampler.sample(None, 3, batch_size=-1)
        with pytest.raises(ValueError, match=r"uniform: batch_size must be at most 2\^32, got 4294967297"):
            sampler.sample(None, 0, batch_size=2**32 + 1)
        with pytest.raises(TypeError, match=r"uniform: batch_size must be an int of at least 0, got 2\.0"):
            sampler.sample(None, 3, batch_size=2.0)
        with pytest.raises(TypeError, match=r"uniform: h must be a tensor \[\*, d\] or None, got list"):
            sampler.sample([1.0], 3)
        with pytest.raises(ValueError, match=r"uniform: h must be \[\*, d\], got \[\] float32"):
            sampler.sample(torch.tensor(1.0), 3)

    def test_exclude_with_shared(self):
        with pytest.raises(ValueError, match="uniform: exclude must be None with shared=True"):
            make("uniform").sample(None, 3, shared=True, exclude=torch.tensor([0]))

    @pytest.mark.parametrize("law", LAWS)
    @pytest.mark.parametrize(
        ("exclude", "error", "text"),
        [
            (torch.tensor([0, 13]), IndexError, r"exclude must be -1 or in \[0, 13\), got 13 in row 1"),
            (torch.tensor([-2, 0]), IndexError, r"exclude must be -1 or in \[0, 13\), got -2 in row 0"),
            (torch.tensor([[0, -1], [99, 1]]), IndexError, r"exclude must be -1 or in \[0, 13\), got 99 in row 1"),
            (torch.tensor([0, 1, 2]), ValueError, r"exclude must be \[B\] or \[B, P\] with B = 2, got \[3\] int64"),
            (torch.zeros(2, 1, 1, dtype=torch.int64), ValueError, r"exclude must be \[B\] or \[B, P\] with B = 2"),
            (torch.tensor([0, 1], dtype=torch.int32), TypeError, r"exclude must be int64, got \[2\] int32"),
            (torch.tensor([0.0, 1.0]), TypeError, r"exclude must be int64, got \[2\] float32"),
            ([0, 1], TypeError, "exclude offsets must be an int64 tensor, got int"),
            ("ab", TypeError, r"exclude must be a tensor or a pair \(offsets, ids\), got str"),
            (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "exclude must be on cpu, got meta"),
            (
                (torch.tensor([0, 1]), torch.tensor([0])),
                ValueError,
                r"exclude offsets must be \[B \+ 1\] with B = 2, got \[2\] int64",
            ),
            ((torch.tensor([0, 1, 1]), torch.tensor([[0]])), ValueError, r"exclude ids must be \[nnz\], got \[1, 1\]"),
            (
                (torch.tensor([0, 1, 2]), torch.tensor([3])),
                ValueError,
                "exclude_offsets must go from 0 to 1, got 0 and 2",
            ),
            (
                (torch.tensor([1, 1, 1]), torch.tensor([3])),
                ValueError,
                "exclude_offsets must go from 0 to 1, got 1 and 1",
            ),
            (
                (torch.tensor([0, 5, 1]), torch.tensor([3])),
                ValueError,
                "exclude_offsets must not decrease, got 5 then 1",
            ),
        ],
    )
    def test_exclude(self, law, exclude, error, text):
        if isinstance(exclude, torch.Tensor) and exclude.device.type == "meta" and law == "alias":
            text = "h, exclude and key must be on cpu, where the table is, got meta"
        with pytest.raises(error, match=text):
            make(law).sample(torch.zeros(2, 1), 3, exclude=exclude, key=sx.Key(0))

    @pytest.mark.parametrize("law", LAWS)
    def test_log_prob(self, law):
        sampler = make(law)
        with pytest.raises(IndexError, match=r"ids must be in \[0, 13\), got 13 in row 1"):
            sampler.log_prob(None, torch.tensor([0, 13]))
        with pytest.raises(IndexError, match=r"ids must be in \[0, 13\), got -1 in row 0"):
            sampler.log_prob(None, torch.tensor([-1]))
        with pytest.raises(TypeError, match=r"ids must be int64, got \[1\] float32"):
            sampler.log_prob(None, torch.tensor([0.0]))
        with pytest.raises(ValueError, match=r"ids must be \[B, n\] with B = 3, got \[2, 2\] int64"):
            sampler.log_prob(torch.zeros(3, 1), torch.zeros(2, 2, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"ids must be \[B\], \[B, n\] or \[n\], got \[\] int64"):
            sampler.log_prob(None, torch.tensor(1))

    @pytest.mark.parametrize("cls", [sx.samplers.Uniform, sx.samplers.LogUniform])
    def test_num_classes(self, cls):
        with pytest.raises(ValueError, match=r"uniform: num_classes must be an int of at least 1, got 0"):
            cls(0)
        with pytest.raises(ValueError, match=r"uniform: num_classes must be an int in \[1, 2\^52\], got 45035996"):
            cls(2**52 + 1)
        with pytest.raises(TypeError, match=r"uniform: num_classes must be an int of at least 1, got 10\.0"):
            cls(10.0)

    @pytest.mark.parametrize(
        ("counts", "error", "text"),
        [
            ([1, -2, 3], ValueError, "counts must be finite and not negative, got -2.0 for class 1"),
            ([1.0, float("nan")], ValueError, "counts must be finite and not negative, got nan for class 1"),
            ([float("inf"), 1.0], ValueError, "counts must be finite and not negative, got inf for class 0"),
            ([0, 0, 0], ValueError, "counts must have a positive sum, got all zero"),
            ([], ValueError, r"counts must be \[C\] with C >= 1, got \[0\]"),
            ([[1, 2]], ValueError, r"counts must be \[C\] with C >= 1, got \[1, 2\]"),
            (torch.ones(2, 2), ValueError, r"counts must be \[C\] with C >= 1, got \[2, 2\]"),
            (3.0, ValueError, r"counts must be \[C\] with C >= 1, got \[\]"),
            (["a"], TypeError, "counts must be numbers, got <U1"),
        ],
    )
    def test_counts(self, counts, error, text):
        with pytest.raises(error, match=f"^unigram: {text}$"):
            sx.samplers.Unigram(counts)

    @pytest.mark.parametrize("power", [-1.0, float("nan"), float("inf")])
    def test_power_value(self, power):
        with pytest.raises(ValueError, match="unigram: power must be finite and at least 0, got"):
            sx.samplers.Unigram([1, 2], power)

    def test_power_type(self):
        with pytest.raises(TypeError, match="unigram: power must be finite and at least 0, got '1'"):
            sx.samplers.Unigram([1, 2], "1")

    def test_the_ops_check_for_themselves(self):
        key, ids = key_on("cpu"), torch.zeros(1, 1, dtype=torch.int64)
        sampler = make("alias")
        table, prefix = sampler.table, sampler.prefix
        uniform, alias = torch.ops.samplex.uniform_sample, torch.ops.samplex.alias_sample
        for call, text in [
            (
                lambda: uniform(key.float(), 1, 1, 5),
                r"uniform_sample: key must be \[2\] or \[3\] = \[2\] int64 contiguous",
            ),
            (lambda: uniform(key[:1], 1, 1, 5), r"uniform_sample: key must be \[2\] or \[3\]"),
            (lambda: uniform(key, -1, 1, 5), r"uniform_sample: batch must be in \[0, 2\^32\], got -1"),
            (
                lambda: uniform(key, 1, 2**24 + 1, 5),
                r"uniform_sample: num_samples must be in \[0, 2\^24\], got 16777217",
            ),
            (lambda: uniform(key, 1, 1, 0), r"uniform_sample: num_classes must be in"),
            (lambda: uniform(key, 1, 1, 5, ids.int()), r"uniform_sample: exclude must be \[B, P\] = \[1, \*\] int64"),
            (lambda: uniform(key, 1, 1, 5, None, ids), "uniform_sample: exclude_offsets needs exclude, got None"),
            (
                lambda: uniform(key, 1, 1, 5, torch.tensor([[3, 1]])),
                "uniform_sample: exclude must ascend in each row, got 3 before 1 in row 0",
            ),
            (lambda: alias(key, 1, 1, table.float(), prefix), r"alias_sample: table must be \[C, 4\]"),
            (
                lambda: alias(key, 1, 1, torch.zeros(53, dtype=torch.int64)[1:].view(13, 4), prefix),
                "alias_sample: table must be aligned to 16 bytes, got a view that is not",
            ),
            (lambda: alias(key, 1, 1, table, prefix[:-1]), r"alias_sample: prefix must be \[C \+ 1\] = \[14\] int64"),
            (lambda: torch.ops.samplex.uniform_log_prob(ids[0], 5), r"uniform_log_prob: ids must be \[B, n\]"),
        ]:
            with pytest.raises(RuntimeError, match=text):
                call()

    def test_a_failed_call_reserves_nothing(self):
        key = sx.Key(3)
        with pytest.raises(ValueError, match="num_samples"):
            make("uniform").sample(None, -1, batch_size=1, key=key)
        assert key == sx.Key(3)
