"""`head.fuse_optimizer`: the update inside backward against the same optimizer after it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import samplex_cuda as sx

CLASSES, DIM, BATCH, DRAWS = 60, 12, 7, 9
LOSSES = ["sampled_softmax", "negative_sampling", "nce", "one_vs_each", "augment_reduce"]


def make_head(seed=0, *, loss="sampled_softmax", sampler=None, **options) -> sx.SampledClassifier:
    torch.manual_seed(seed)
    sampler = sampler or sx.samplers.Uniform(CLASSES)
    if loss == "augment_reduce":
        loss = sx.losses.AugmentReduce(BATCH)
    return sx.SampledClassifier(DIM, CLASSES, sampler, DRAWS, loss, **options)


def batch(step: int, device="cpu", dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    h = torch.randn(BATCH, DIM, generator=g).to(device, dtype).requires_grad_()
    return h, torch.randint(CLASSES, (BATCH,), generator=g).to(device)


def train(head, optimizer, fused, *, steps=3, device="cpu", dtype=torch.float32) -> list[torch.Tensor]:
    """Weight, bias and the gradients of h."""
    if fused:
        head.fuse_optimizer(optimizer)
    key, found = sx.Key(5), []
    for step in range(steps):
        h, y = batch(step, device, dtype)
        head(h, y, key=key).backward()
        if fused:
            assert head.weight.grad is None
            assert head.bias is None or head.bias.grad is None
            optimizer.step()  # nothing left to do
        else:
            optimizer.step()
            optimizer.zero_grad()
        found.append(h.grad)
    bias = [] if head.bias is None else [head.bias.detach()]
    return [head.weight.detach(), *bias, *found]


OPTIMIZERS = {
    "sgd": lambda p: sx.optim.RowSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: sx.optim.RowAdagrad(p, lr=0.1, lr_decay=0.1),
    "rowwise": lambda p: sx.optim.RowAdagrad(p, lr=0.1, rowwise=True),
    "adam": lambda p: sx.optim.RowAdam(p, lr=0.1),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_is_unfused(backend, name, shared):
    results = []
    for fused in (False, True):
        head = make_head(shared=shared).to(backend.device)
        results.append(train(head, OPTIMIZERS[name](head.parameters()), fused, device=backend.device))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_loss(loss, reduction):
    results = []
    for fused in (False, True):
        head = make_head(loss=loss, bias=reduction == "mean", reduction=reduction)
        optimizer = OPTIMIZERS["adagrad"](head.parameters())
        if fused:
            head.fuse_optimizer(optimizer)
        for step in range(2):
            h, y = batch(step)
            weight = torch.rand(BATCH, generator=torch.Generator().manual_seed(1))
            index = torch.arange(BATCH) if loss == "augment_reduce" else None
            head(h, y, index=index, key=sx.Key(step), sample_weight=weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([head.weight.detach(), h.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_one_op_updates_from_what_the_forward_kept(monkeypatch, factor, shared):
    """With an upstream gradient of 1 the forward has made that of h; both ways have the same bits."""
    from samplex_cuda.optim import fusion

    calls, update = [], fusion.loss_update_
    monkeypatch.setattr(fusion, "loss_update_", lambda *args: (calls.append(1), update(*args)))
    results = []
    for at_once in (True, False):
        head = make_head(shared=shared)
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        if not at_once:
            monkeypatch.setattr(head.fused, "at_once", False)
        for step in range(2):
            h, y = batch(step)
            loss = head(h, y, key=sx.Key(step))
            (loss if factor is None else factor * loss).backward()
        results.append([head.weight.detach(), head.bias.detach(), h.grad])
    assert len(calls) == (0 if factor == 0.5 else 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_gradient_of_h_is_given_out_once():
    """A graph that is kept answers again, with another tensor: autograd adds to the one it was given."""
    head = make_head()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    h, y = batch(0)
    loss = head(h, y, key=sx.Key(1))
    (first,) = torch.autograd.grad(loss, h, retain_graph=True)
    wanted = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, h, retain_graph=True)
    assert torch.equal(second, wanted)
    before = head.weight.detach().clone()
    loss.backward()
    assert torch.equal(h.grad, wanted)
    assert not torch.equal(head.weight, before)


def test_two_losses_of_one_backward_are_joined():
    results = []
    for at_once in (True, False):
        head = make_head()
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        head.fused.at_once = at_once
        h, y = batch(0)
        (head(h, y, key=sx.Key(1)) + head(h, y, key=sx.Key(2))).backward()
        results.append([head.weight.detach(), head.bias.detach(), h.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_several_targets_and_ignored_rows():
    results = []
    for fused in (False, True):
        head = make_head()
        optimizer = OPTIMIZERS["adam"](head.parameters())
        if fused:
            head.fuse_optimizer(optimizer)
        h, _ = batch(0)
        y = torch.tensor([[1, 2], [3, -100], [-100, -100], [4, 5], [6, 6], [7, -100], [0, 59]])
        head(h, y, key=sx.Key(1)).backward()
        optimizer.step()
        results.append([head.weight.detach(), head.bias.detach(), h.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_and_stochastic_rounding(dtype):
    results = []
    for fused in (False, True):
        head = make_head(bias=False, dtype=dtype)
        optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1, stochastic_rounding=True, key=sx.Key(3))
        results.append(train(head, optimizer, fused, dtype=dtype))
    # Row gradients are rounded to bf16 on the way only where they are stored.
    tolerance = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.02}
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# ------------------------------------------------------------------------------------------------ accumulate
@pytest.mark.parametrize("shared", [False, True])
def test_accumulate_is_one_update_of_the_sum(shared):
    results = []
    for fused in (False, True):
        head = make_head(shared=shared)
        optimizer = OPTIMIZERS["adagrad"](head.parameters())
        if fused:
            head.fuse_optimizer(optimizer, accumulate=3)
        before = head.weight.detach().clone()
        for step in range(6):
            h, y = batch(step)
            if step == 4:
                y = torch.stack([y, y.roll(1)], 1)  # more targets per row than in the others
            head(h, y, key=sx.Key(step)).backward()
            with torch.no_grad():
                h.fill_(9.0)  # the caller's again
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            elif fused and step < 3:
                assert torch.equal(head.weight, before)
        results.append([head.weight.detach(), head.bias.detach()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_two_losses_of_one_backward_are_one_update():
    results = []
    for fused in (False, True):
        head = make_head()
        optimizer = OPTIMIZERS["adagrad"](head.parameters())
        if fused:
            head.fuse_optimizer(optimizer)
        (h, y), (g, z) = batch(0), batch(1)
        (head(h, y, key=sx.Key(1)) + 2 * head(g, z, key=sx.Key(2))).backward()
        optimizer.step()
        assert optimizer.state[head.weight]["step"] == 1
        results.append([head.weight.detach(), head.bias.detach(), h.grad, g.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ mixed precision
def test_grad_scaler_unscales_and_skips():
    results = []
    for fused in (False, True):
        head = make_head()
        optimizer = OPTIMIZERS["adagrad"](head.parameters())
        encoder = torch.nn.Linear(DIM, DIM)
        torch.nn.init.eye_(encoder.weight)
        outer = torch.optim.SGD(encoder.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if fused:
            head.fuse_optimizer(optimizer, grad_scaler=scaler)
        for step in range(3):
            h, y = batch(step)
            loss = head(encoder(h), y, key=sx.Key(step))
            if step == 1:
                loss = loss * torch.inf
            before = head.weight.detach().clone()
            scaler.scale(loss).backward()
            if not fused:
                scaler.step(optimizer)
            scaler.step(outer)
            scaler.update()
            optimizer.zero_grad()
            outer.zero_grad()
            assert torch.equal(head.weight, before) == (step == 1)
        assert scaler.get_scale() == 512.0
        assert optimizer.state[head.weight]["step"] == 2
        results.append([head.weight.detach(), head.bias.detach()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_autocast():
    head = make_head()
    head.fuse_optimizer(OPTIMIZERS["adagrad"](head.parameters()))
    before = head.weight.detach().clone()
    h, y = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(torch.nn.functional.linear(h, torch.eye(DIM)), y)
    loss.backward()
    assert not torch.equal(head.weight, before)


# ------------------------------------------------------------------------------------------------ the rest of torch
def test_schedulers_see_the_updates():
    head = make_head(bias=False)
    optimizer = sx.optim.RowSGD(head.parameters(), lr=1.0)
    head.fuse_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    h, y = batch(0)
    before = head.weight.detach().clone()
    head(h, y).backward()
    after = head.weight.detach().clone()
    assert not torch.equal(before, after)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no word of a step that did not happen
        schedule.step()
    head(h, y).backward()
    assert torch.equal(head.weight, after)


def test_a_compiled_encoder():
    head = make_head()
    head.fuse_optimizer(OPTIMIZERS["adagrad"](head.parameters()))
    encoder = torch.compile(torch.nn.Linear(DIM, DIM), backend="aot_eager")
    before = head.weight.detach().clone()
    h, y = batch(0)
    head(encoder(h), y).backward()
    assert not torch.equal(head.weight, before)
    assert h.grad is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it behind the graph break
def test_a_compiled_model_with_the_head_inside():
    torch._dynamo.reset()
    head = make_head()
    head.fuse_optimizer(OPTIMIZERS["adagrad"](head.parameters()))
    encoder = torch.nn.Linear(DIM, DIM)
    before = head.weight.detach().clone()

    @torch.compile(backend="aot_eager")
    def loss_of(h, y):
        return head(encoder(h), y)

    h, y = batch(0)
    loss_of(h, y).backward()
    assert head.weight.grad is None
    assert not torch.equal(head.weight, before)
    assert encoder.weight.grad is not None


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sampler_that_follows_the_table(accumulate):
    """Before each draw the tree holds the rows the updates have made, those of accumulated ones too."""
    head = make_head(sampler=sx.samplers.Quadratic(torch.zeros(CLASSES, DIM)), bias=False)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.5), accumulate=accumulate)
    for step in range(5):
        seen = head.weight.detach().clone()
        h, y = batch(step)
        loss = head(h, y, key=sx.Key(step))
        torch.testing.assert_close(head.sampler.rows[:, :DIM], seen)
        loss.backward()


def test_a_copy_is_not_fused():
    head = make_head()
    head.fuse_optimizer(OPTIMIZERS["adagrad"](head.parameters()))
    twin = copy.deepcopy(head)
    h, y = batch(0)
    before = head.weight.detach().clone()
    twin(h, y).backward()
    assert twin.weight.grad is not None
    assert torch.equal(head.weight, before)
    head.fuse_optimizer(None)
    head(h, y).backward()
    assert head.weight.grad is not None
    assert torch.equal(head.weight, before)


def test_a_gradient_of_h_alone_updates_nothing():
    head = make_head()
    head.fuse_optimizer(OPTIMIZERS["adagrad"](head.parameters()))
    before = head.weight.detach().clone()
    h, y = batch(0)
    torch.autograd.grad(head(h, y), [h])
    assert torch.equal(head.weight, before)
    (g, z), key = batch(1), sx.Key(1)
    head(g, z, key=key).backward()
    alone = make_head()
    alone.fuse_optimizer(OPTIMIZERS["adagrad"](alone.parameters()))
    alone(*batch(1), key=sx.Key(1)).backward()
    assert torch.equal(head.weight, alone.weight)


# ------------------------------------------------------------------------------------------------ what cannot be
def fused_head(**options):
    head = make_head(**options)
    head.fuse_optimizer(OPTIMIZERS["adagrad"](head.parameters()))
    return head, head.weight.detach().clone()


def test_tied_weights():
    head, before = fused_head()
    h, y = batch(0)
    penalty = (head.weight**2).sum()
    with pytest.raises(RuntimeError, match=r"head\.weight got a gradient that is not from the head's sampled loss"):
        (head(h, y) + penalty).backward()
    assert torch.equal(head.weight, before)
    bias = head.bias.sum()
    with pytest.raises(RuntimeError, match=r"head\.bias got a gradient that is not from"):
        bias.backward()


def test_a_weight_that_changed_since_the_forward():
    head, _ = fused_head()
    losses = [head(*batch(step)) for step in range(2)]
    losses[0].backward()
    after = head.weight.detach().clone()
    with pytest.raises(RuntimeError, match="the weight was changed after this loss was computed"):
        losses[1].backward()
    assert torch.equal(head.weight, after)


def test_create_graph():
    head, before = fused_head()
    with pytest.raises(RuntimeError, match=r"double backward \(create_graph=True\) is not supported"):
        head(*batch(0)).backward(create_graph=True)
    assert torch.equal(head.weight, before)


def test_global_clipping():
    head, _ = fused_head()
    with pytest.raises(ValueError, match="must not belong to a head with a fused optimizer"):
        sx.optim.clip_grad_norm_(head.parameters(), 1.0)


def test_bad_input():
    head = make_head()
    other = torch.nn.Parameter(torch.zeros(3, 2))
    adagrad = OPTIMIZERS["adagrad"]
    fail = [
        (torch.optim.SGD(head.parameters(), lr=0.1), {}, TypeError, "must be one of samplex_cuda.optim, got SGD"),
        (adagrad([head.weight]), {}, ValueError, "optimizer must own head.bias, got one without it"),
        (adagrad([head.bias]), {}, ValueError, "optimizer must own head.weight, got one without it"),
        (adagrad([*head.parameters(), other]), {}, ValueError, "got 1 other parameters, the first [3, 2]"),
        (adagrad(head.parameters()), {"accumulate": 0}, ValueError, "accumulate must be an int of at least 1, got 0"),
        (adagrad(head.parameters()), {"grad_scaler": 3}, TypeError, "must be a GradScaler or None, got int"),
    ]  # fmt: skip
    for optimizer, options, error, text in fail:
        with pytest.raises(error) as caught:
            head.fuse_optimizer(optimizer, **options)
        assert str(caught.value).startswith("fuse_optimizer: ")
        assert text in str(caught.value)
    h, y = batch(0)
    head(h, y).backward()
    with pytest.raises(ValueError, match="gradients must be None when the optimizer is fused"):
        head.fuse_optimizer(adagrad(head.parameters()))
    head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"head\.weight must require a gradient"):
        head.fuse_optimizer(adagrad(head.parameters()))


def test_no_gradient_rows_in_memory():
    """A step allocates no [n, d] tensor, let alone [C, d]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple | list) else [result]:
                if isinstance(t, torch.Tensor) and t._base is None and t.data_ptr() != head.weight.data_ptr():
                    largest = max(largest, t.numel())
            return result

    torch.manual_seed(0)
    classes = 5000
    head = sx.SampledClassifier(32, classes, sx.samplers.Uniform(classes), 40, bias=False)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters()))
    h = torch.randn(16, 32, requires_grad=True)
    with Watch():
        head(h, torch.arange(16)).backward()
    assert largest <= 16 * (32 + 41) + 100  # h and its coefficients: what the forward keeps


def some_tree(classes: int, features: int) -> sx.samplers.Tree:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, features, generator=g), torch.randint(classes, (200,), generator=g)
    return sx.samplers.Tree.fit(x, y, num_classes=classes, dim=4, progress=False)


SAMPLERS = {
    "rows": lambda: (sx.samplers.LogUniform(300), {}),
    "shared": lambda: (sx.samplers.LogUniform(300), {"shared": True}),
    "tree": lambda: (some_tree(300, 9), {"shared": True}),
    "stratified": lambda: (some_tree(300, 9), {"shared": True, "stratified": True}),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_head_has_the_bits_of_sampler_and_function(backend, bias, reduction, sampler):
    """One step, one path: draw by hand, call the function on the fused weight, and get what the head gives."""

    def steps(by_hand: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        made, options = SAMPLERS[sampler]()
        head = sx.SampledClassifier(9, 300, made, 7, bias=bias, reduction=reduction, scale=2.0, **options)
        head = head.to(backend.device)
        optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
        head.fuse_optimizer(optimizer)
        key, out = sx.Key(5), []
        for step in range(3):
            h = torch.randn(6, 9).to(backend.device).requires_grad_(step < 2)
            y = torch.randint(300, (6,)).to(backend.device)
            y[2] = -100
            if by_hand:
                exclude = None if "shared" in options else y.clamp(min=-1)
                draw = made.sample(h.detach(), 7, key=key, exclude=exclude, **options)
                if draw.repeats():
                    draw = draw.merged()
                loss = sx.functional.sampled_softmax(
                    h, head.weight, y, draw.ids, draw.log_q, head.bias, scale=2.0, reduction=reduction
                )
            else:
                loss = head(h, y, key=key)
            loss.sum().backward()
            out += [loss.detach(), *([h.grad] if step < 2 else [])]
        return [*out, *head.parameters(), *(optimizer.state[p]["sum"] for p in head.parameters())]

    for got, want in zip(steps(True), steps(False), strict=True):
        assert torch.equal(got, want)


def test_ids_out_of_range_raise_before_anything_changes():
    head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=5)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    before = head.weight.detach().clone()
    h = torch.randn(3, 4)
    for shared in (False, True):
        head.shared = shared
        with pytest.raises(IndexError, match="50"):
            head(h, torch.tensor([1, 2, 50]))
    assert torch.equal(head.weight, before)


def test_a_sampler_of_ones_own_is_asked():
    class Last(sx.samplers.Uniform):
        def sample(self, h, num_samples, **options):
            ids = torch.full((h.shape[0], num_samples), self.num_classes - 1)
            return sx.Draw(ids, torch.zeros(ids.shape))

    head = sx.SampledClassifier(4, 50, Last(50), num_samples=5)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    before = head.weight.detach().clone()
    head(torch.randn(3, 4), torch.tensor([1, 2, 3])).backward()
    changed = (head.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2, 3, 49]


def test_a_weight_outside_the_parameter_table():
    """Pruning and parametrizations move it."""
    head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5, bias=False)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    head.__dict__["weight"] = head._parameters.pop("weight")
    before = head.weight.detach().clone()
    head(torch.randn(4, 8), torch.arange(4), key=sx.Key(1)).backward()
    assert not torch.equal(head.weight, before)


def test_a_fused_head_and_its_table_are_freed():
    """Nothing global keeps a fused table alive."""
    import gc
    import weakref

    head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    head(torch.randn(4, 8), torch.arange(4)).backward()
    watched = weakref.ref(head.weight)
    del head
    gc.collect()
    assert watched() is None


def test_a_changed_accumulate_counts_from_the_next_backward():
    torch.manual_seed(0)
    head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
    head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1))
    head.fused.accumulate = 2
    before = head.weight.detach().clone()
    for number, same in ((1, True), (0, False)):
        head(torch.randn(4, 8), torch.arange(4)).backward()
        assert (head.fused.pending, torch.equal(head.weight, before)) == (number, same)
    head.fused.accumulate = 1
    before = head.weight.detach().clone()
    head(torch.randn(4, 8), torch.arange(4)).backward()
    assert not torch.equal(head.weight, before)
    with pytest.raises(ValueError, match="accumulate must be an int of at least 1, got 0"):
        head.fused.accumulate = 0
