"""One optimizer for dense parameters and class tables: its steps, its state, clipping by torch and by us."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import samplex_cuda as sx
from samplex_cuda.optim import Combined, RowAdam, RowGradient, RowSGD, torch_clip

C, D = 60, 8


class Model(nn.Module):
    """An encoder and a head, its weight tied to the embedding where asked for."""

    def __init__(self, tied: bool = False, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(C, D, sparse=tied and sparse)
        self.encoder = nn.Linear(D, D)
        self.head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=7)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x, y, key):
        return self.head(self.encoder(self.embed(x)), y, key=key)


def batch(step: int):
    g = torch.Generator().manual_seed(step)
    return torch.randint(C, (5,), generator=g), torch.randint(C, (5,), generator=g), sx.Key(3, step)


def combined(model: Model, lr: float = 0.1, rows=RowSGD, dense=torch.optim.SGD) -> Combined:
    tables = list({id(p): p for p in model.head.parameters()}.values())
    rest = [p for p in model.parameters() if not any(p is q for q in tables)]
    return Combined(dense=dense(rest, lr=lr), rows=rows(tables, lr=lr))


def dense_twin(model: Model) -> Model:
    """The same numbers, dense gradients everywhere."""
    twin = Model(tied=model.head.weight is model.embed.weight, sparse=False)
    twin.load_state_dict(model.state_dict())
    twin.head.sparse = False
    return twin


def same(model: Model, twin: Model) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


# ------------------------------------------------------------------------------------------------ steps
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip", [None, "torch", "ours", "value"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_against_dense_sgd(tied, clip, accumulate):
    model = Model(tied)
    twin = dense_twin(model)
    optimizer, plain = combined(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, plain)]
    for step in range(4):
        for m in (model, twin):
            for part in range(accumulate):
                (m(*batch(accumulate * step + part)) * 3).backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in twin.parameters()]))
        if clip in ("torch", "ours"):
            ours = torch.nn.utils.clip_grad_norm_ if clip == "torch" else sx.optim.clip_grad_norm_
            torch.testing.assert_close(ours(model.parameters(), 0.5), norm)
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            assert norm > 0.5
        elif clip == "value":
            for m in (model, twin):
                torch.nn.utils.clip_grad_value_(m.parameters(), 0.02)
        assert isinstance(model.head.weight.grad, RowGradient)
        for o, schedule in zip((optimizer, plain), schedules, strict=True):
            o.step()
            o.zero_grad()
            schedule.step()
        assert model.head.weight.grad is None
        assert model.encoder.weight.grad is None
        same(model, twin)
    assert [g["lr"] for g in optimizer.param_groups] == [plain.param_groups[0]["lr"]] * 2


def test_tied_table_is_one_adam_step():
    """Two steps of Adam are not one: both row gradients must be summed first."""
    model = Model(tied=True)
    twin = dense_twin(model)
    optimizer, plain = combined(model, rows=RowAdam, dense=torch.optim.Adam), torch.optim.Adam(twin.parameters(), 0.1)
    for m, o in ((model, optimizer), (twin, plain)):
        m(*batch(0)).backward()
        o.step()
    same(model, twin)  # at step 1 the lazy rule is the dense one: an untouched row has no moments
    assert optimizer.rows.state[model.head.weight]["step"] == 1


def test_grad_scaler():
    model = Model(tied=True)
    twin = dense_twin(model)
    optimizer, plain = combined(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(3):
        for m, o, scaler in ((model, optimizer, scalers[0]), (twin, plain, scalers[1])):
            loss = m(*batch(step)) * (torch.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(o)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(o)
            scaler.update()
            o.zero_grad()
        same(model, twin)
        assert scalers[0].get_scale() == scalers[1].get_scale() == (8.0 if step == 0 else 4.0)


def test_closure_and_zeros():
    model = Model()
    optimizer = combined(model)

    def closure():
        optimizer.zero_grad()
        loss = model(*batch(0))
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    optimizer.zero_grad(set_to_none=False)
    assert float(model.head.weight.grad.norm()) == 0.0
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.head.weight)


# ------------------------------------------------------------------------------------------------ state
def test_state_goes_round(tmp_path):
    model = Model()
    optimizer = combined(model, rows=RowAdam, dense=torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=8)

    def run(model, optimizer, schedule, steps):
        for step in steps:
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    run(model, optimizer, schedule, range(3))
    stored = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], stored)
    run(model, optimizer, schedule, range(3, 6))

    other = Model()
    again = combined(other, rows=RowAdam, dense=torch.optim.AdamW)
    schedule_again = torch.optim.lr_scheduler.LinearLR(again, 0.5, total_iters=8)
    stored.seek(0)
    for thing, state in zip((other, again, schedule_again), torch.load(stored), strict=True):
        thing.load_state_dict(state)
    run(other, again, schedule_again, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert again.param_groups[-1] is again.rows.param_groups[-1]


def test_state_of_other_groups_is_refused_before_anything_changes():
    model = Model()
    optimizer = combined(model, rows=RowAdam)
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:1]
    with pytest.raises(ValueError, match=r"Combined.load_state_dict: parameters by group must be \[3, 2\], got \[3\]"):
        optimizer.load_state_dict(state)


def test_state_view():
    model = Model()
    optimizer = combined(model, rows=RowAdam, dense=torch.optim.AdamW)
    model(*batch(0)).backward()
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
    assert optimizer.state[model.head.weight] is optimizer.rows.state[model.head.weight]
    optimizer.state[model.encoder.weight] = {"step": 5}
    assert optimizer.dense.state[model.encoder.weight] == {"step": 5}
    assert model.encoder.weight not in optimizer.rows.state


def test_copies():
    model = Model()
    optimizer = combined(model)
    both = copy.deepcopy({"model": model, "optimizer": optimizer})
    model(*batch(0)).backward()
    optimizer.step()
    both["model"](*batch(0)).backward()
    both["optimizer"].step()
    same(model, both["model"])
    assert isinstance(pickle.loads(pickle.dumps(optimizer)), Combined)


def test_gradients_stay_sparse_without_the_optimizer():
    model = Model()
    optimizer = combined(model)
    del optimizer
    model(*batch(0)).backward()
    assert model.head.weight.grad.is_sparse


def test_refused():
    a, b = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(TypeError, match=r"Combined: rows must be an optimizer of samplex_cuda.optim, got SGD"):
        Combined(torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0))
    with pytest.raises(TypeError, match=r"Combined: dense must be an optimizer of torch.optim, got RowSGD"):
        Combined(RowSGD([a]), RowSGD([b]))
    with pytest.raises(ValueError, match="Combined: dense must not own parameters of rows, got 1"):
        Combined(torch.optim.SGD([a, b], lr=1.0), RowSGD([b]))


def test_dense_gradient_of_a_tied_table_names_the_remedy():
    model = Model(tied=True, sparse=False)
    optimizer = combined(model)
    model.head(torch.randn(3, D), torch.arange(3)).backward()
    with pytest.raises(TypeError, match="pass sparse=True to an embedding"):
        model.embed(torch.arange(3)).sum().backward()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------ the gradient
def test_row_gradient():
    ids, rows = torch.tensor([4, 1, 4]), torch.arange(6.0).reshape(3, 2)
    grad = RowGradient(ids, rows.clone(), (6, 2))
    want = torch.zeros(6, 2).index_add_(0, ids, rows)
    assert torch.equal(grad.to_dense(), want)
    assert grad.touched()[0].tolist() == [1, 4]
    for kind in (1, 2, 3.0, torch.inf):
        torch.testing.assert_close(torch.linalg.vector_norm(grad, kind), torch.linalg.vector_norm(want, kind))
    assert torch.equal((grad * 2).to_dense(), want * 2)
    assert torch.equal((grad + grad).to_dense(), want * 2)
    assert torch.equal((grad + want.to_sparse(1)).to_dense(), want * 2)
    assert torch.equal(grad.double().to_dense(), want.double())
    assert torch.equal(pickle.loads(pickle.dumps(grad)).to_dense(), want)
    shared, own = grad.detach(), copy.deepcopy(grad)
    grad.mul_(0.5)
    assert torch.equal(shared.to_dense(), want * 0.5)
    assert torch.equal(own.to_dense(), want)
    assert float(torch._foreach_norm([own, torch.ones(4)])[0]) == pytest.approx(float(want.norm()))
    torch._foreach_mul_([own, torch.ones(4)], torch.tensor(3.0))
    assert torch.equal(own.to_dense(), want * 3)
    assert float(own.zero_().norm(torch.inf)) == 0.0
    assert repr(own) == "RowGradient([6, 2], rows=0)"
    for wrong in (lambda: torch.add(grad, want), lambda: grad.clamp_(0.5), lambda: grad.exp(), lambda: grad * want):
        with pytest.raises((NotImplementedError, TypeError), match="RowGradient: "):
            wrong()
    with pytest.raises(ValueError, match=r"RowGradient: rows must be \[3, 2\], got \[2, 2\]"):
        RowGradient(ids, rows[:2], (6, 2))


def test_row_gradient_bfloat16():
    model = Model().to(torch.bfloat16)
    optimizer = combined(model)
    for step in range(2):
        model(*batch(step)).backward()
    assert model.head.weight.grad.dtype == torch.bfloat16
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0
    optimizer.step()


# ------------------------------------------------------------------------------------------------ fused heads
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_torch_clipping_of_a_fused_head_warns_once(name, monkeypatch):
    monkeypatch.setitem(torch_clip._state, "warned", False)
    model = Model()
    model.head.fuse_optimizer(RowSGD(model.head.parameters(), lr=0.1))
    model(*batch(0)).backward()
    clip = getattr(torch.nn.utils, name)
    with pytest.warns(UserWarning, match=f"torch.nn.utils.{name}: .*not clipped.*sx.optim.Combined"):
        clip(model.parameters(), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip(model.parameters(), 1.0)  # said once
    monkeypatch.setitem(torch_clip._state, "warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip(model.encoder.parameters(), 1.0)  # no row is skipped
        if name == "clip_grad_norm_":
            clip(model.parameters(), float("inf"))  # nothing is clipped: somebody measures


CLIPS = {
    "norm": (clip_grad_norm_, (1.0,)),
    "value": (clip_grad_value_, (1.0,)),
    "with_norm": (torch.nn.utils.clip_grads_with_norm_, (1.0, torch.tensor(2.0))),
}


@pytest.mark.parametrize("name", CLIPS)
def test_functions_that_were_imported_before_warn_too(name, monkeypatch):
    """Names bound before the first head was fused, of every function of torch that clips."""
    clip, given = CLIPS[name]
    model = Model()
    model.head.fuse_optimizer(RowSGD(model.head.parameters(), lr=0.1))
    model(*batch(0)).backward()
    monkeypatch.setitem(torch_clip._state, "warned", False)
    with pytest.warns(UserWarning, match=r"not clipped.*sx.optim.Combined"):
        clip(model.parameters(), *given)


SPARSE_NORMS = {
    "clip_grad_norm_": lambda p: clip_grad_norm_(p, 1.0),
    "imported_later": lambda p: torch.nn.utils.clip_grad_norm_(p, float("inf")),
    "get_total_norm": lambda p: torch.nn.utils.get_total_norm([q.grad for q in p]),
}


@pytest.mark.parametrize("name", SPARSE_NORMS)
def test_torch_names_the_way_out_of_a_sparse_norm(name):
    """Without `Combined` the gradient of a class table is sparse, and torch has no norm of that."""
    model = Model()
    model.head(model.encoder(torch.randn(5, D)), torch.arange(5)).backward()
    given = [p for p in model.parameters() if p.grad is not None]
    assert model.head.weight.grad.is_sparse
    with pytest.raises(TypeError, match=rf"got a sparse one \[{C}, {D}\].*sx.optim.Combined.*sx.optim.clip_grad_norm_"):
        SPARSE_NORMS[name](given)
    sx.optim.clip_grad_norm_(given, 1.0)
    assert float(clip_grad_norm_(model.encoder.parameters(), 1.0)) > 0


@pytest.mark.parametrize("undecorated", [False, True])
def test_the_watch_is_put_inside(undecorated):
    """Torch's decorator keeps its function in a cell; without one the names are exchanged."""
    module = types.SimpleNamespace()

    def plain(parameters, most):
        return "clipped"

    def outer(function):
        @functools.wraps(function)
        def wrapped(*args):
            return function(*args)

        return wrapped

    module.clip = before = plain if undecorated else outer(plain)
    watching = functools.partial(torch_clip._watching, name="clip", is_fused=lambda p: False)
    torch_clip._put_inside(module, "clip", watching)
    assert (module.clip is before) == (not undecorated)
    assert module.clip([torch.zeros(1)], 1.0) == "clipped"


def test_a_fused_head_inside_combined():
    """`Combined` takes the fused head's rows in its state and scheduler; other tables are updated in step()."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=6)
        table = torch.nn.Embedding(9, D, sparse=True)
        encoder = torch.nn.Linear(D, D)
        rows = RowAdam([*head.parameters(), table.weight], lr=0.1)
        optimizer = Combined(dense=torch.optim.SGD(encoder.parameters(), lr=0.1), rows=rows)
        if fused:
            head.fuse_optimizer(optimizer, accumulate=2)
        for step in range(5):
            head(encoder(table(torch.arange(4) + step)), torch.arange(4) * 3, key=sx.Key(3, step)).backward()
            if step % 2 or step == 4:
                if fused:
                    assert head.fused.pending == int(step == 4)
                    head.fused.flush()
                    assert head.fused.pending == 0
                    assert head.weight.grad is None
                optimizer.step()
                optimizer.zero_grad()
        assert int(rows.state[head.weight]["step"]) == 3
        ends.append([*head.parameters(), table.weight, *encoder.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
