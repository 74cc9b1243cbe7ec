"""Negatives of the caller: per row, shared, ragged; with and without a correction; from a column of the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from head_cases import B, C, D, batch, dense_logits, make
from training_cases import dense

import samplex_cuda as sx
from samplex_cuda import data
from samplex_cuda.reference.sampled_softmax import sampled_softmax as reference
from samplex_cuda.training import Config, ConfigError, Trainer, config, open_data


def ragged(lengths=(3, 0, 5, 1, 2, 4, 1), seed=0):
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return offsets, torch.randint(C, (int(offsets[-1]),), generator=g)


def whole(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def row_loss(logits, y, ids, log_q):
    """-log softmax of the target among itself and the ids that are not targets, float64; log_q with log m."""
    own = [t for t in y.reshape(-1).tolist() if t >= 0]
    keep = ~torch.isin(ids, torch.tensor(own, dtype=torch.int64))
    if not own or not bool(keep.any()):
        return logits.sum() * 0.0
    o = torch.cat([logits[own], (logits[ids] - log_q)[keep]])
    return o.logsumexp(0) - logits[own].mean()


def check_gradients(head, got, want, h):
    got.backward()
    grads = [h.grad.clone(), head.weight.grad.to_dense(), head.bias.grad.to_dense()]
    h.grad = head.weight.grad = head.bias.grad = None
    want.backward()
    for a, b in zip(grads, (h.grad, head.weight.grad, head.bias.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("form", ["rows", "shared", "ragged"])
@pytest.mark.parametrize("targets", [1, 3])
def test_a_head_takes_them_with_the_gradient_of_the_reference(corrected, form, targets):
    head = make(dtype=torch.float64, reduction="sum")
    h = torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    y = torch.randint(C, (B,)) if targets == 1 else torch.randint(C, (B, targets))
    if form == "ragged":
        offsets, ids = ragged()
        ids[0] = y.reshape(B, -1)[0, 0]  # a hit
        given = offsets, ids
        each = [ids[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    else:
        ids = given = torch.randint(C, (B, 9) if form == "rows" else (9,))
        ids.view(-1)[0] = y.reshape(B, -1)[0, 0]
        each = list(ids) if form == "rows" else [ids] * B
    log_q = -2.0 - torch.rand(ids.shape) if corrected else None
    got = head(h, y, negatives=sx.Negatives(given, log_q))
    logits = dense_logits(head, h)
    want = 0.0
    for b in range(B):
        m = len(each[b])
        if log_q is None:
            row_q = torch.zeros(m)
        else:
            part = log_q if form == "shared" else log_q[b] if form == "rows" else log_q[offsets[b] : offsets[b + 1]]
            row_q = part.double() + math.log(max(m, 1))
        want = want + row_loss(logits[b], y[b], each[b], row_q)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)
    check_gradients(head, got, want, h)


def test_a_draw_of_a_sampler_is_the_heads_own_step():
    sampler = sx.samplers.Unigram(torch.arange(1, C + 1))
    head, (h, y) = make(sampler=sampler), batch()
    draw = sampler.sample(h, 20, exclude=y, key=sx.Key(3))
    assert torch.equal(head(h, y, negatives=draw), head(h, y, key=sx.Key(3)))


def test_leading_dimensions_and_the_function():
    head = make(reduction="none")
    h, y, ids = torch.randn(2, 3, D), torch.randint(C, (2, 3)), torch.randint(C, (2, 3, 4))
    log_q = torch.randn(2, 3, 4)
    by_head = head(h, y, negatives=sx.Negatives(ids, log_q))
    options = {"reduction": "none"}
    by_function = sx.functional.sampled_softmax(h, head.weight, y, ids, log_q, head.bias, **options)
    assert torch.equal(by_head, by_function)
    assert by_head.shape == (2, 3)
    plain = sx.functional.sampled_softmax(h, head.weight, y, ids, None, head.bias, **options)
    assert torch.equal(plain, head(h, y, negatives=sx.Negatives(ids)))
    want = reference(
        h.reshape(6, D), head.weight, y.reshape(6), ids.reshape(6, 4), torch.full((6, 4), -math.log(4)), head.bias
    )[0]
    torch.testing.assert_close(plain.reshape(6), want, rtol=1e-5, atol=1e-6)
    pair = torch.arange(7) * 4, ids.reshape(-1)
    ragged_too = sx.functional.sampled_softmax(h, head.weight, y, pair, log_q.reshape(-1), head.bias, **options)
    torch.testing.assert_close(ragged_too, by_head)


def test_an_ignored_row_and_an_empty_one_have_no_loss():
    head = make(reduction="none")
    h, y = batch()
    y[2] = -100
    loss = head(h, y, negatives=sx.Negatives(ragged()))
    assert loss[1] == 0  # no negatives
    assert loss[2] == 0
    assert bool((loss[[0, 3, 4, 5, 6]] > 0).all())
    none = whole(B + 1), torch.empty(0, dtype=torch.int64)
    assert bool((head(h, y, negatives=sx.Negatives(none)) == 0).all())


def test_the_fused_update_is_the_unfused_one():
    heads = [make(sampler=sx.samplers.Uniform(C)) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    optimizers = [sx.optim.RowAdagrad(head.parameters(), lr=0.1) for head in heads]
    heads[1].fuse_optimizer(optimizers[1])
    h, y = batch()
    given = sx.Negatives(ragged(), torch.full((16,), -3.0))
    for head, optimizer in zip(heads, optimizers, strict=True):
        head(h, y, negatives=given).backward()
        optimizer.step()
    torch.testing.assert_close(heads[0].weight, heads[1].weight)


def test_a_sampler_that_follows_the_table_hears_of_them():
    head = make(sampler=sx.samplers.Quadratic(torch.randn(C, D)), bias=False)
    h, y = batch()
    head(h, y)
    head(h, y, negatives=sx.Negatives(torch.arange(50, 60)))
    head.update_sampler()
    with torch.no_grad():
        head.weight[50:60] += 1.0
    head(h, y, negatives=sx.Negatives(torch.arange(50, 60)))
    head.update_sampler()
    fresh = sx.samplers.Quadratic(head.weight.detach())
    torch.testing.assert_close(
        head.sampler.log_prob_all(h)[:, 50:60], fresh.log_prob_all(h)[:, 50:60], rtol=1e-3, atol=1e-3
    )


BAD = {
    "kind": (lambda: whole(3), TypeError, "negatives must be a Draw or sx.Negatives"),
    "dtype": (lambda: sx.Negatives(torch.zeros(3)), TypeError, "must be int64"),
    "rows": (lambda: sx.Negatives(whole(B + 1, 3)), ValueError, r"must be \[7, m\]"),
    "log_q": (
        lambda: sx.Negatives(whole(B, 3), torch.zeros(B, 2)), ValueError, r"log_q must be \[7, 3\]"
    ),
    "log_q kind": (
        lambda: sx.Negatives(whole(3), whole(3)), ValueError, "floating",
    ),
    "offsets": (lambda: sx.Negatives((torch.arange(B), torch.arange(3))), ValueError, r"offsets \[8\]"),
    "offsets end": (lambda: sx.Negatives((torch.arange(B + 1), torch.arange(3))), ValueError, "end with 3"),
    "offsets fall": (
        lambda: sx.Negatives((torch.tensor([0, 3, 1, 3, 3, 3, 3, 3]), torch.arange(3))), ValueError, "decreasing",
    ),
    "ragged log_q": (
        lambda: sx.Negatives((torch.tensor([0, 3, 3, 3, 3, 3, 3, 3]), torch.arange(3)), torch.zeros(2)), ValueError,
        r"log_q must be \[3\]",
    ),
    "range": (lambda: sx.Negatives(torch.tensor([C])), IndexError, "ids must be in"),
    "meta": (lambda: sx.Negatives(torch.zeros(3, dtype=torch.int64, device="meta")), ValueError, "must be on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_ones_are_refused_and_nothing_changes(case):
    make_bad, error, text = BAD[case]
    head, (h, y) = make(), batch()
    before = {name: t.clone() for name, t in head.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(error, match=text):
        head(h, y, negatives=make_bad())
    assert torch.equal(torch.get_rng_state(), state)
    for name, t in head.state_dict().items():
        assert torch.equal(t, before[name])
    assert head.weight.grad is None


@pytest.mark.parametrize("loss", ["negative_sampling", "nce", "full_softmax"])
def test_losses_without_a_use_for_them_refuse(loss):
    head, (h, y) = make(loss=loss), batch()
    with pytest.raises(ValueError, match="negatives must be None with"):
        head(h, y, negatives=sx.Negatives(torch.arange(3)))


def test_one_vs_each_takes_them():
    head, (h, y) = make(loss="one_vs_each", reduction="none"), batch()
    ids = torch.randint(C, (5,))
    got = head(h, y, negatives=sx.Negatives(ids))
    s = dense_logits(head, h)
    gaps = s[:, ids] - s.gather(1, y[:, None])
    want = torch.nn.functional.softplus(gaps).masked_fill(ids[None] == y[:, None], 0.0).sum(1)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_eval_mode_ignores_them():
    head, (h, y) = make(), batch()
    head.eval()
    assert torch.equal(head(h, y, negatives=sx.Negatives(torch.arange(3))), head(h, y))


# ---------------------------------------------------------------------------------------------------- from the data
def table(n=120):
    found = np.random.default_rng(0).integers(0, 60, (n, 6))
    found[::3, 3:] = -100
    return found


def test_a_column_of_a_file_reaches_the_head(tmp_path, monkeypatch):
    train = dense()
    np.savez(tmp_path / "train.npz", x=train.x, y=train.targets(torch.arange(120)).numpy(), shown=table())
    settings = [f"data.path={tmp_path / 'train.npz'}", "data.negatives=shown", "training.epochs=1"]
    run = config.override(Config(), settings)
    first, _ = open_data(run)
    offsets, ids = first.negatives(torch.arange(len(first)))
    rows = first.rows[torch.arange(len(first))].numpy()
    want = table()[rows]
    assert ids.tolist() == want[want >= 0].tolist()
    assert offsets.diff().tolist() == (want >= 0).sum(1).tolist()
    seen = []
    forward = sx.SampledClassifier.forward

    def spy(self, h, y, *, negatives=None, **options):
        if self.training:
            seen.append(negatives)
        return forward(self, h, y, negatives=negatives, **options)

    monkeypatch.setattr(sx.SampledClassifier, "forward", spy)
    trainer = Trainer(run, run_dir=tmp_path / "run")
    assert trainer.fit().status == "finished"
    assert all(isinstance(given, sx.Negatives) and given.log_q is None for given in seen)
    assert sum(given.ids[1].shape[0] for given in seen) == ids.shape[0]
    assert Trainer.resume(tmp_path / "run", settings=["training.epochs=2"]).fit().status == "finished"


def test_log_q_of_a_column_reaches_the_head(tmp_path, monkeypatch):
    """By the command line, ragged, padded; the loss is that of the same negatives given by hand."""
    train, log_q = dense(), -np.random.default_rng(1).random((120, 6)).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=train.x, y=train.targets(torch.arange(120)).numpy(), drawn=table())
    np.save(tmp_path / "log_q.npy", log_q)
    settings = [
        f"data.path={tmp_path / 'train.npz'}", "data.negatives=drawn", f"data.negatives_log_q={tmp_path / 'log_q.npy'}",
        "training.epochs=1",
    ]  # fmt: skip
    run = config.override(Config(), settings)
    first, _ = open_data(run)
    rows = first.rows.numpy()
    want = log_q[rows][table()[rows] >= 0]
    assert first.negatives_log_q(torch.arange(len(first))).tolist() == want.tolist()
    seen = []
    forward = sx.SampledClassifier.forward

    def spy(self, h, y, *, negatives=None, **options):
        if self.training:
            seen.append(negatives)
        return forward(self, h, y, negatives=negatives, **options)

    monkeypatch.setattr(sx.SampledClassifier, "forward", spy)
    assert Trainer(run, run_dir=tmp_path / "run").fit().status == "finished"
    assert seen
    assert all(given.log_q.shape == given.ids[1].shape for given in seen)
    assert sorted(torch.cat([given.log_q for given in seen]).tolist()) == sorted(want.tolist())


def test_wrong_log_q_of_data_is_refused(tmp_path):
    train = dense()
    train.set_negatives(table(), np.full((120, 6), -1.0))
    before = train.fingerprint()
    for log_q, text in (
        (np.full((120, 5), -1.0), r"log_q must be \[120, 6\] like the negatives"),
        (np.full((120, 6), np.nan), "finite and at most 0, got nan"),
        (np.full((120, 6), 0.5), "finite and at most 0, got 0.5"),
        (np.full((120, 6), -1), "array of numbers"),
        ((np.arange(121), np.full(120, -1.0)), "one number per negative"),
    ):
        with pytest.raises(ValueError, match=text):
            train.set_negatives(table(), log_q)
    assert train.fingerprint() == before
    train.set_negatives(table())
    assert train.negatives_log_q(torch.arange(3)) is None
    assert train.fingerprint() != before
    with pytest.raises(ConfigError, match="negatives_log_q must be empty without"):
        config.override(Config(), ["data.negatives_log_q=q"]).check()
    np.save(tmp_path / "q.npy", np.zeros(3, dtype=int))
    with pytest.raises(ValueError, match="must be floating point"):
        data.read_negatives("train.svm", str(tmp_path / "q.npy"), log_q=True)


def test_an_npy_file_beside_the_data_and_a_parquet_column(tmp_path):
    np.save(tmp_path / "shown.npy", table(3))
    found = data.read_negatives("train.svm", str(tmp_path / "shown.npy"))
    assert found.tolist() == table(3).tolist()
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    cells, log_q = [[1, 2], [], [5]], [[-1.0, -2.0], [], [-0.5]]
    columns = {"x": [[0.0], [1.0], [2.0]], "y": [0, 1, 2], "shown": pa.array(cells, pa.list_(pa.int64()))}
    columns["q"] = pa.array(log_q, pa.list_(pa.float32()))
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "train.parquet")
    indptr, ids = data.read_negatives(tmp_path / "train.parquet", "shown")
    assert (indptr.tolist(), ids.tolist()) == ([0, 2, 2, 3], [1, 2, 5])
    _, found = data.read_negatives(tmp_path / "train.parquet", "q", log_q=True)
    assert found.tolist() == [-1.0, -2.0, -0.5]


def test_wrong_columns_are_refused(tmp_path):
    train = dense()
    before = train.fingerprint()
    for wrong, text in ((table(119), "120 rows"), (table() + 60, r"in \[0, 60\)")):
        with pytest.raises(ValueError, match=text):
            train.set_negatives(np.where(table()[: len(wrong)] < 0, -100, wrong))
    assert train.negatives(torch.arange(3)) is None
    train.set_negatives(table())
    assert train.fingerprint() != before
    with pytest.raises(ValueError, match="a column of a parquet or npz file"):
        data.read_negatives("train.svm", "shown")
    with pytest.raises(ConfigError, match="negatives must be empty with"):
        config.override(Config(), ["head.loss=nce", "data.negatives=shown"]).check()
    with pytest.raises(ConfigError, match="negatives must be empty for data without a column"):
        Trainer(config.override(Config(), ["data.negatives=shown"]), dense(), None, tmp_path / "run")
