"""A step that a CUDA graph can hold: no host number in it, no wait for the device, replays that are ordinary steps."""

from __future__ import annotations

import types

import pytest
import torch
from graph_cases import CLASSES, DIM, FOLLOWING, OPTIMIZERS, STEPS, Model, batch, graphs_on_cpu, run  # noqa: F401
from step_recorder import SyncGuard

import samplex_cuda as sx
from samplex_cuda import graphs, rng


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_are_the_steps_of_a_run_without_a_graph(graphs_on_cpu, name, shared):  # noqa: F811
    """Recorded once; then data, key and rates are rewritten in place, and the step count moves on the device."""
    plain, captured = Model(name, capturable=False, shared=shared), Model(name, capturable=True, shared=shared)
    key = sx.Key(7)
    want = run(plain, lambda x, y: plain.step(x, y, key=key))
    step = graphs.capture_step(captured.step, key=sx.Key(7), warmup=2)
    got = run(captured, step)
    assert step.captured
    assert step.key == key
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len({float(loss) for loss in got}) == STEPS
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(captured.tensors(), plain.tensors(), strict=True))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sampler", FOLLOWING)
def test_replays_of_a_sampler_that_follows_the_table(graphs_on_cpu, monkeypatch, sampler, shared):  # noqa: F811
    """The rows of a step wait in one buffer for the next one, whose update is a part of the graph."""
    monkeypatch.setattr("samplex_cuda._device.host_waits", lambda _: True)
    monkeypatch.setattr("samplex_cuda.samplers.midx.REFRESH_AFTER", 1000)  # no graph makes new codes
    plain, captured = (Model(capturable=True, shared=shared, sampler=sampler) for _ in range(2))
    key = sx.Key(7)
    want = run(plain, lambda x, y: plain.step(x, y, key=key))
    step = graphs.capture_step(captured.step, key=sx.Key(7), warmup=2)
    got = run(captured, step)
    assert step.captured
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(captured.tensors(), plain.tensors(), strict=True))
    followed = dict(captured.head.sampler.named_buffers())
    assert followed
    for name, t in plain.head.sampler.named_buffers():
        assert torch.equal(followed[name], t), name
    unchanged = _fresh(Model(capturable=True, shared=shared, sampler=sampler))
    assert any(not torch.equal(followed[name], t) for name, t in unchanged.items())


def _fresh(model):
    return dict(model.head.sampler.named_buffers())


@pytest.mark.parametrize("bad", [None, 5])
@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_replays_under_a_grad_scaler(graphs_on_cpu, name, bad):  # noqa: F811
    """Scale, found_inf and growth are the device's: a replay skips its update by itself and halves the scale."""
    plain, captured = (Model(name, capturable=c, scaler=True) for c in (False, True))
    key = sx.Key(7)
    run(plain, lambda x, y: plain.step(x, y, key=key), bad=bad)
    step = graphs.capture_step(captured.step, key=sx.Key(7), warmup=2)
    run(captured, step, bad=bad)
    assert step.captured
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(captured.tensors(), plain.tensors(), strict=True))
    assert captured.optimizer.state[captured.head.weight]["step"] == STEPS - (bad is not None)
    assert captured.scaler.get_scale() == 256.0 * 2 ** (4 if bad is None else 2)
    assert captured.head.weight.isfinite().all()


def test_a_graph_draws_from_torchs_generator_too(graphs_on_cpu):  # noqa: F811
    plain, captured = Model(capturable=False), Model(capturable=True)
    torch.manual_seed(0)
    run(plain, plain.step)
    torch.manual_seed(0)
    step = graphs.capture_step(captured.step, warmup=1)
    x, y = batch(0)
    step(x, y)
    drawn = torch.get_rng_state()
    step(x, y)
    assert step.captured
    assert not torch.equal(torch.get_rng_state(), drawn)


def test_the_recording_shows_frozen_numbers(graphs_on_cpu):  # noqa: F811
    """Without `capturable` the rate and the step of the recording are repeated: what the tests above exclude."""
    plain, captured = Model(capturable=False), Model(capturable=False)
    key = sx.Key(7)
    run(plain, lambda x, y: plain.step(x, y, key=key))
    run(captured, graphs.capture_step(captured.step, key=sx.Key(7), warmup=2))
    assert not torch.equal(plain.head.weight, captured.head.weight)


def test_capture_step_without_a_gpu_runs_the_step():
    plain, captured = Model(capturable=True), Model(capturable=True)
    key = sx.Key(7)
    want = run(plain, lambda x, y: plain.step(x, y, key=key))
    step = graphs.capture_step(captured.step, key=sx.Key(7), warmup=1)
    assert all(torch.equal(a, b) for a, b in zip(run(captured, step), want, strict=True))
    assert not step.captured


def test_capture_step_refuses():
    step = graphs.capture_step(lambda x: x.sum(), warmup=1)
    step(torch.ones(3))
    with pytest.raises(
        ValueError, match=r"capture_step: input 0 must be \[3\] float32 on cpu as in the first call, got \[2\]"
    ):
        step(torch.ones(2))
    with pytest.raises(ValueError, match="capture_step: inputs must be 1 tensors as in the first call, got 2"):
        step(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match="capture_step: input 0 must be a Tensor, got float"):
        step(1.0)
    with pytest.raises(TypeError, match="capture_step: step must be callable, got int"):
        graphs.capture_step(3)
    with pytest.raises(TypeError, match="capture_step: key must be a Key or None, got int"):
        graphs.capture_step(step, key=3)
    with pytest.raises(ValueError, match="capture_step: warmup must be"):
        graphs.capture_step(step, warmup=0)


def test_warmup_runs_on_a_stream_of_its_own(monkeypatch):
    """As torch asks before a capture: both waits, and the step in between."""
    log = []

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    class Entered:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            log.append(f"on {self.stream.name}")

        def __exit__(self, *_):
            log.append("back")

    monkeypatch.setattr(graphs, "_on_gpu", lambda inputs: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream("now"))
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    graphs.capture_step(lambda x: log.append("step"), warmup=1)(torch.ones(2))
    assert log == ["side waits for now", "on side", "step", "back", "now waits for side"]


# ------------------------------------------------------------------------------------------------ no wait in a step
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adagrad", {"capturable": False}),
        ("adam", {"capturable": False}),
        ("adam", {"capturable": True}),
        ("adam", {"capturable": True, "stochastic_rounding": True}),
        ("adagrad", {"capturable": False, "scaler": True}),
        ("adam", {"capturable": True, "scaler": True, "bias": False}),
    ],
)
def test_a_fused_step_never_waits_for_the_device(name, options, shared):
    model = Model(name, shared=shared, **options)
    model.step(*batch(0), key=sx.Key(1))
    with SyncGuard() as guard:
        for number in range(1, 4):
            model.step(*batch(number, overflow=options.get("scaler", False) and number == 2), key=sx.Key(number))
            model.end()
    assert guard.found == []
    assert guard.ops.count("samplex::row_update_") == 3


def test_accumulated_steps_never_wait():
    model = Model(capturable=True, scaler=True)
    model.head.fuse_optimizer(model.optimizer, accumulate=2, grad_scaler=model.scaler)
    with SyncGuard() as guard:
        for number in range(4):
            model.step(*batch(number))
    assert guard.found == []
    assert guard.ops.count("samplex::row_update_") == 2


def test_a_scaled_step_launches_as_a_plain_one():
    """Scale and found_inf ride in launches that are made anyway; one fill and the scaler's own ops are left."""
    counts = []
    for scaler in (False, True):
        model = Model(capturable=True, scaler=scaler)
        model.step(*batch(0), key=sx.Key(1))
        with SyncGuard() as guard:
            loss = model.head(model.encoder(batch(1)[0]), batch(1)[1], key=sx.Key(2))
            (model.scaler.scale(loss) if scaler else loss).backward()
        counts.append([name for name in guard.ops if name != "aten::detach"])
    extra = list(counts[1])
    for name in counts[0]:
        extra.remove(name)
    assert sorted(extra) == ["aten::mul", "aten::mul", "aten::zeros"]  # the loss, its gradient, found_inf


def test_the_guard_finds_what_waits():
    head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), num_samples=5, bias=False)
    with SyncGuard() as guard:
        head(*batch(0)).backward()  # a sparse gradient: the number of its rows
        x = torch.ones(3)
        x[x > 0] = 1.0
        assert bool(x.sum() > 0)
        x.nonzero()
    assert guard.found == [
        "aten::_local_scalar_dense", "aten::index_put_", "aten::_local_scalar_dense", "aten::nonzero"
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ keys
@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1, 2**64 - 5])
@pytest.mark.parametrize("offset", [0, 3, -(2**63), 2**63 - 1])
def test_a_key_is_made_on_the_device_by_one_launch(seed, offset):
    key, device = sx.Key(seed, offset), torch.device("cpu")
    want = sx.Key(seed, offset).reserve()
    assert torch.equal(rng._pair_on_device(key.seed, key.offset, device), want)
    out = torch.zeros(2, dtype=torch.int64)
    with SyncGuard() as guard:
        assert rng._pair_on_device(key.seed, key.offset, device, out) is out
    assert torch.equal(out, want)
    assert [name for name in guard.ops if name not in ("aten::lift_fresh", "aten::detach")] == ["aten::add"]


def test_a_reserved_key_is_rewritten_in_place():
    key = sx.Key(5)
    pair = key.reserve()
    assert key.reserve(out=pair) is pair
    assert pair.tolist() == [5, 1]
    assert key.offset == 2


def test_a_key_is_not_reserved_inside_a_graph(monkeypatch):
    monkeypatch.setattr(rng, "is_capturing", lambda device: True)
    key = sx.Key(5)
    with pytest.raises(RuntimeError, match=r"Key\.reserve: a key must be reserved outside of a CUDA graph"):
        key.reserve()
    assert key.offset == 0


# ------------------------------------------------------------------------------------------------ streams
class FakeStream:
    """Keeps who waited for whom."""

    def __init__(self, name):
        self.name, self.waited = name, []

    def wait_stream(self, other):
        self.waited.append(other.name)


def test_the_update_waits_for_the_streams_of_its_losses(monkeypatch):
    """Two losses on two streams, the weight's hook on a third: an event of each, and memory kept until then."""
    from samplex_cuda.optim import fusion

    model = Model(capturable=True)
    a, b, hook = FakeStream("a"), FakeStream("b"), FakeStream("hook")
    turns = iter([a, b, hook])
    monkeypatch.setattr(fusion, "_stream_of", lambda t: next(turns))
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: kept.append((t.data_ptr(), stream)))
    order, update = [], fusion.row_update_
    monkeypatch.setattr(fusion, "row_update_", lambda *args: (order.append(list(hook.waited)), update(*args)))
    x, y = batch(0)
    (model.head(x, y, key=sx.Key(1)) + model.head(2 * x, y, key=sx.Key(2))).backward()
    assert sorted(order[0]) == ["a", "b"]  # before the update
    assert a.waited == b.waited == []
    assert x.data_ptr() in {pointer for pointer, _ in kept}
    assert {stream for _, stream in kept} == {hook}


def test_accumulated_losses_are_ordered_as_well(monkeypatch):
    """Kept copies were made on the hook's stream of their own backward."""
    from samplex_cuda.optim import fusion

    model = Model(capturable=True)
    model.head.fuse_optimizer(model.optimizer, accumulate=2)
    a, first, last = FakeStream("a"), FakeStream("first"), FakeStream("last")
    turns = iter([a, first, last, last])
    monkeypatch.setattr(fusion, "_stream_of", lambda t: next(turns))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: None)
    for number in range(2):
        model.head(*batch(number), key=sx.Key(number)).backward()
    assert first.waited == ["a"]
    assert last.waited == ["first"]


def test_one_stream_waits_for_nothing(monkeypatch):
    from samplex_cuda.optim import fusion

    model, only = Model(capturable=True), FakeStream("only")
    monkeypatch.setattr(fusion, "_stream_of", lambda t: only)
    model.head(*batch(0)).backward()
    assert only.waited == []


def test_the_stream_of_a_tensor_is_the_current_one_of_its_device(monkeypatch):
    from samplex_cuda.optim.fusion import _stream_of

    assert _stream_of(torch.ones(1)) is None
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert _stream_of(types.SimpleNamespace(is_cuda=True, device="cuda:1")) == "stream of cuda:1"
