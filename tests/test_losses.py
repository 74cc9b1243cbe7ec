"""Losses as objects: their options, what they declare, and a loss that is defined outside of the package."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import samplex_cuda as sx
from samplex_cuda.losses import Needs

C, D, B, M = 60, 8, 7, 9
PACKAGE = Path(sx.__file__).parent


# ------------------------------------------------------------------------------------------------ options
def test_short_names_are_the_objects():
    assert sx.losses.names() == (
        "sampled_softmax", "negative_sampling", "nce", "one_vs_each", "augment_reduce", "full_softmax",
    )  # fmt: skip
    for name in sx.losses.names():
        if name != "augment_reduce":
            assert sx.losses.resolve(name) == sx.losses.by_name(name)()
            assert sx.losses.resolve(name).name == name
    loss = sx.losses.SampledSoftmax(label_smoothing=0.1)
    assert sx.losses.resolve(loss) is loss
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, "nce")
    assert head.loss == sx.losses.NCE()
    head.loss = "one_vs_each"
    assert head.loss == sx.losses.OneVsEach()
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.label_smoothing = 0.5


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("label_smoothing", 0.1, "sx.losses.SampledSoftmax(label_smoothing=...) or sx.losses.FullSoftmax(label_smoot"),
        ("absolute", True, "sx.losses.SampledSoftmax(absolute=...) or sx.losses.FullSoftmax(absolute=...)"),
        ("reg", 0.1, "sx.losses.NegativeSampling(reg=...), got reg=0.1"),
        ("num_examples", 5, "sx.losses.AugmentReduce(num_examples=...), got num_examples=5"),
        ("eta_rate", 0.5, "sx.losses.AugmentReduce(rate=...), got eta_rate=0.5"),
    ],
)
def test_options_that_moved_name_their_loss(option, value, text):
    with pytest.raises(
        TypeError, match=re.escape(f"SampledClassifier: {option} is an option of the loss: pass loss={text}")
    ):
        sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, **{option: value})


def test_unknown_options_and_losses_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, color=1)
    with pytest.raises(
        ValueError, match=r"loss must be one of sampled_softmax, .* or an object of sx.losses, got 'hinge'"
    ):
        sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, "hinge")
    with pytest.raises(TypeError, match=r"got the class NCE; write NCE\(\.\.\.\)"):
        sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, sx.losses.NCE)
    with pytest.raises(ValueError, match="AugmentReduce: num_examples must be an int of at least 1, got None"):
        sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, "augment_reduce")


def test_what_losses_declare():
    noise = {"excludes_target": False, "weighted_draws": False, "mergeable": False}
    assert sx.losses.SampledSoftmax().needs == Needs()
    assert sx.losses.SampledSoftmax(label_smoothing=0.1).needs == Needs(mergeable=False)
    assert sx.losses.NegativeSampling().needs == Needs(**noise, prior=True)
    assert sx.losses.NegativeSampling(reg=0.1).needs == Needs(**noise, prior=True, target_log_q=True)
    assert sx.losses.NCE().needs == Needs(**noise, target_log_q=True)
    assert sx.losses.OneVsEach().needs == Needs()
    assert sx.losses.AugmentReduce(4).needs == Needs(example_index=True)
    assert not sx.losses.FullSoftmax().needs.draws


def strings_in(path: Path) -> set[str]:
    """String constants of a module, without docstrings."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
    return {node.value for node in constants if isinstance(node.value, str)}


@pytest.mark.parametrize("room", ["heads", "optim", "samplers", "training"])
def test_no_list_of_loss_names_elsewhere(room):
    """What depends on a loss follows from its `needs`; only a default may name one."""
    paths = sorted((PACKAGE / room).rglob("*.py"))
    assert paths
    for path in paths:
        named = strings_in(path) & set(sx.losses.names())
        assert named <= {"sampled_softmax"}, f"{path.name} names {named}"


def test_no_code_asks_which_loss_it_is():
    """Neither by comparing a name nor by the class, outside of the losses and the ops behind them."""
    classes = {sx.losses.by_name(name).__name__ for name in sx.losses.names()}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        if where.parts[0] in ("losses", "ops", "functional", "reference", "reproduce"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            asked = set()
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                asked = {side.value for side in sides if isinstance(side, ast.Constant)} & set(sx.losses.names())
                asked |= {n.attr for side in sides for n in ast.walk(side) if isinstance(n, ast.Attribute)} & classes
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                asked |= {n.attr for n in ast.walk(node.args[1]) if isinstance(n, ast.Attribute)}
                asked &= classes
            found += [f"{where}:{node.lineno}"] if asked else []
    assert found == []


# ------------------------------------------------------------------------------------------------ outside the package
class Hinge(sx.losses.ScoreLoss):
    """Mean over the draws of relu(1 + draw - target): not in the package."""

    name = "hinge"

    def row_loss(self, target, draws, x):
        margin = torch.relu(1.0 + draws - target[:, :1])
        return torch.where(draws.isinf(), 0.0, margin).mean(1)


def eager_hinge(h, weight, bias, y, ids, scale):
    own = scale * ((h * weight[y]).sum(1) + bias[y])
    other = scale * (torch.einsum("bd,bmd->bm", h, weight[ids]) + bias[ids])
    margin = torch.relu(1.0 + other - own[:, None])
    return torch.where(ids == y[:, None], 0.0, margin).mean(1)


def a_batch(step: int):
    g = torch.Generator().manual_seed(step)
    return torch.randn(B, D, generator=g), torch.randint(C, (B,), generator=g)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loss_of_ones_own_has_the_gradients_of_autograd(shared, reduction, dtype):
    torch.manual_seed(0)
    head = sx.SampledClassifier(
        D, C, sx.samplers.Uniform(C), M, Hinge(), shared=shared, reduction=reduction, scale=1.5, dtype=dtype
    )
    h, y = a_batch(0)
    h = h.to(dtype).requires_grad_()
    head(h, y, key=sx.Key(3)).sum().backward()
    exclude = None if shared else y
    ids = head.sampler.sample(h, M, shared=shared, key=sx.Key(3), exclude=exclude).ids
    ids = ids.expand(B, -1) if shared else ids
    exact = [t.detach().double().requires_grad_() for t in (h, head.weight, head.bias)]
    rows = eager_hinge(*exact, y, ids, 1.5)
    (rows.mean() if reduction == "mean" else rows.sum()).backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype != torch.bfloat16 else {"rtol": 0.02, "atol": 0.02}
    got = [h.grad, head.weight.grad.to_dense(), head.bias.grad.to_dense()]
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b.grad, **tolerance)
    assert head.weight.grad.is_coalesced()


@pytest.mark.parametrize("shared", [False, True])
def test_a_loss_of_ones_own_trains_fused_and_unfused(shared):
    results, values = [], []
    for fused in (False, True):
        torch.manual_seed(0)
        head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, Hinge(), shared=shared)
        optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
        if fused:
            head.fuse_optimizer(optimizer)
        values = []
        for step in range(40):
            h, y = a_batch(step % 4)
            loss = head(h, y, key=sx.Key(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(float(loss.detach()))
        results.append(head.weight.detach())
    assert sum(values[-4:]) < 0.6 * sum(values[:4])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_loss_of_ones_own_masks_ignores_and_weighs():
    class Count(sx.losses.ScoreLoss):
        name = "count"

        def row_loss(self, target, draws, x):
            return draws.isfinite().sum(1) + 0.0 * target[:, 0]

    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, Count(), shared=True, reduction="none")
    h, y = a_batch(0)
    y[1] = -100
    ids = head.sampler.sample(None, M, shared=True, key=sx.Key(1)).ids
    y[2] = ids[0]
    known = (torch.tensor([0, 2, 2, 2, 2, 2, 2, 2]), ids[1:3])
    want = torch.full((B,), float(ids.unique().numel() and ids.numel()))
    want[0] -= float(((ids == ids[1]) | (ids == ids[2]) | (ids == y[0])).sum())
    for row in range(1, B):
        want[row] -= float((ids == y[row]).sum())
    want[1] = 0.0
    assert head(h, y, positives=known, key=sx.Key(1)).tolist() == want.tolist()
    weighed = head(h, y, positives=known, key=sx.Key(1), sample_weight=torch.arange(float(B)))
    assert weighed.tolist() == (want * torch.arange(float(B))).tolist()


@pytest.mark.parametrize("target", [-3, C])
@pytest.mark.parametrize("shared", [False, True])
def test_a_loss_of_ones_own_refuses_targets_out_of_range(target, shared):
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, Hinge(), shared=shared, bias=False)
    h, y = a_batch(0)
    y[3] = target
    with pytest.raises(IndexError, match=rf"{target}"):
        head(h, y)
    head.ignore_index = target
    if target < 0:  # then it is an ignored row
        assert torch.isfinite(head(h, y))


class WithOp(sx.losses.Loss):
    """A loss with an op behind it, here the library's own: what `Loss.forward` must return."""

    name = "with_op"

    def forward(self, x, form, need_grad, need_hidden):
        return sx.losses.SampledSoftmax().forward(x, form, need_grad, need_hidden)


def test_a_loss_of_ones_own_may_bring_an_op():
    results = []
    for loss in ("sampled_softmax", WithOp()):
        torch.manual_seed(0)
        head = sx.SampledClassifier(D, C, sx.samplers.LogUniform(C), M, loss)
        head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1))
        h, y = a_batch(1)
        head(h, y, key=sx.Key(2)).backward()
        results.append(head.weight.detach())
    assert torch.equal(*results)


# ------------------------------------------------------------------------------------------------ several ranks
@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body = nn.Linear(D, D)
        self.head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, **options)

    def forward(self, x, y):
        return self.head(self.body(x), y)


@pytest.mark.parametrize("fused", [False, True])
def test_a_sparse_or_fused_head_inside_ddp_is_an_error(one_rank, fused):
    model = Model()
    if fused:
        model.head.fuse_optimizer(sx.optim.RowSGD(model.head.parameters(), lr=0.1))
    before = model.head.weight.detach().clone()
    ddp = nn.parallel.DistributedDataParallel(model)
    how = "a fused optimizer" if fused else "sparse gradients"
    with pytest.raises(
        RuntimeError, match=f"a head with {how} must not be inside DistributedDataParallel.*sparse=False"
    ):
        ddp(*a_batch(0))
    assert torch.equal(model.head.weight, before)


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_sparse_head_inside_ddp_is_an_error(one_rank, inside):
    model = Model()
    if inside:
        model.head.compile(backend="eager")
        ddp = nn.parallel.DistributedDataParallel(model)
    else:
        ddp = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    with pytest.raises(Exception, match="must not be inside DistributedDataParallel"):
        ddp(*a_batch(0))


def test_a_dense_head_inside_ddp_and_a_head_beside_it_work(one_rank):
    dense = nn.parallel.DistributedDataParallel(Model(sparse=False))
    dense(*a_batch(0)).backward()
    assert not dense.module.head.weight.grad.is_sparse
    body = nn.parallel.DistributedDataParallel(nn.Linear(D, D))
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M)
    x, y = a_batch(0)
    head(body(x), y).backward()
    assert head.weight.grad.is_sparse


# ------------------------------------------------------------------------------------------------ the sampler
def test_set_sampler_validates_and_changes_nothing_when_it_refuses():
    first = sx.samplers.Uniform(C)
    head = sx.SampledClassifier(D, C, first, M, "negative_sampling")
    for sampler, text in (
        (sx.samplers.Uniform(C + 1), "sampler must have num_classes = 60, got 61"),
        (nn.Linear(1, 1), "sampler must be a sampler of samplex_cuda.samplers"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            head.set_sampler(sampler)
    with pytest.raises(ValueError, match="num_samples must be an int of at least 1, got 0"):
        head.set_sampler(sx.samplers.LogUniform(C), num_samples=0)
    with pytest.raises(ValueError, match="sampler_update must be None"):
        head.set_sampler(sx.samplers.Quadratic(torch.zeros(C, D)), update="step")
    assert head.sampler is first
    assert head.num_samples == M
    head.loss = "sampled_softmax"
    head.set_sampler(sx.samplers.Quadratic(torch.zeros(C, D)), num_samples=4)
    assert head.sampler_update == "step"
    head(*a_batch(0))
    assert head.staleness().steps == 1


def follower_head():
    torch.manual_seed(0)
    sampler = sx.samplers.Quadratic(torch.zeros(C, D))
    head = sx.SampledClassifier(D, C, sampler, M, bias=False, sampler_update=5)
    head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.5))
    return head


def train(head, first, last):
    for step in range(first, last):
        h, y = a_batch(step)
        head(h, y, key=sx.Key(step)).backward()


def test_state_dict_has_no_side_effect_and_resumes_exactly():
    head, watched = follower_head(), follower_head()
    train(head, 0, 7)
    for step in range(7):
        train(watched, step, step + 1)
        before = watched.sampler.rows.clone(), watched.staleness()
        watched.state_dict()
        assert torch.equal(watched.sampler.rows, before[0])
        assert watched.staleness() == before[1]
    assert torch.equal(head.weight, watched.weight)
    assert head.staleness().steps == 2
    resumed = follower_head()
    resumed.load_state_dict({name: value.clone() for name, value in head.state_dict().items()})
    assert resumed.staleness() == head.staleness()
    train(head, 7, 15)
    train(resumed, 7, 15)
    assert torch.equal(head.weight, resumed.weight)
    assert torch.equal(head.sampler.rows, resumed.sampler.rows)
    head.update_sampler()
    assert "sampler_lag" not in head.state_dict()


def test_a_refit_after_loading_fits_as_before():
    torch.manual_seed(0)
    x, y = torch.randn(300, 6), torch.randint(20, (300,))
    options = {"num_classes": 30, "dim": 3, "reg": 2.5, "whiten": True, "max_rounds": 3, "unseen": False}
    tree = sx.samplers.Tree.fit(x, y, progress=False, **options)
    loaded = sx.samplers.Tree.fit(x[:50], y[:50], num_classes=30, dim=2, progress=False)
    loaded.load_state_dict(tree.state_dict())
    more, labels = torch.randn(200, 6), torch.randint(20, (200,))
    tree.refit(more, labels, progress=False)
    loaded.refit(more, labels, progress=False)
    assert torch.equal(tree.nodes, loaded.nodes)
    assert torch.equal(tree.leaf_class, loaded.leaf_class)
    old = {name: value for name, value in tree.state_dict().items() if name != "fit_options"}
    loaded.load_state_dict(old)  # a checkpoint of 0.1
    assert torch.equal(tree.nodes, loaded.nodes)


def test_a_loss_says_whether_its_parts_join():
    assert sx.losses.SampledSoftmax().joins
    assert not sx.losses.SampledSoftmax(label_smoothing=0.1).joins
    assert not any(sx.losses.by_name(name).joins for name in ("negative_sampling", "nce", "one_vs_each"))
