"""Lightning runs encoder and head with one optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplex_cuda as sx

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning recommends workers, loggers and names of folders
module_of = sx.integrations.lightning.SampledModule

C, D = 50, 8


def made(**options):
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), num_samples=20)
    return module_of(nn.Linear(D, D), head, lr=0.05, **options)


def loader(n=64):
    g = torch.Generator().manual_seed(1)
    y = torch.randint(C, (n,), generator=g)
    x = torch.randn(C, D, generator=g)[y] + 0.1 * torch.randn(n, D, generator=g)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trainer(folder, epochs, **options):
    return lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fit_clips_and_accumulates(tmp_path, precision):
    module = made(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99))
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "precision": precision}
    run = trainer(tmp_path, 8, enable_checkpointing=False, **options)
    [before] = run.validate(module, loader(), verbose=False)
    run.fit(module, loader(), loader())
    [after] = run.validate(module, loader(), verbose=False)
    assert after["val_nll"] < before["val_nll"] - 0.3
    assert after["val_recall@5"] > before["val_recall@5"]
    optimizer = run.optimizers[0]
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.05 * 0.99**32)] * 2


class Watched(module_of):
    """It keeps the largest entry of each gradient after clipping."""

    seen: list

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        assert isinstance(self.head.weight.grad, sx.optim.RowGradient)
        self.seen += [float(p.grad.norm(float("inf"))) for p in self.parameters()]


def test_automatic_optimization_clips_by_value(tmp_path):
    module = Watched(nn.Linear(D, D), made().head)
    module.seen = []
    options = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}
    trainer(tmp_path, 1, enable_checkpointing=False, **options).fit(module, loader())
    assert len(module.seen) == 8 * 4
    assert max(module.seen) == pytest.approx(1e-4)


class Manual(module_of):
    """Its own loop; it keeps the norm after clipping."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.norms = []

    def training_step(self, batch, number):
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(self.head(self(x), y))
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
        assert isinstance(self.head.weight.grad, sx.optim.RowGradient)
        self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))
        optimizer.step()
        optimizer.zero_grad()


def test_manual_optimization(tmp_path):
    module = Manual(nn.Linear(D, D), made().head)
    before = module.head.weight.detach().clone()
    trainer(tmp_path, 1, enable_checkpointing=False).fit(module, loader())
    assert module.norms == [pytest.approx(1e-3, rel=1e-3)] * 8
    assert not torch.equal(before, module.head.weight)


class ManualAccumulation(module_of):
    """Its own loop over three batches per step."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch, number):
        x, y = batch
        self.manual_backward(self.head(self(x), y) / 3)
        if number % 3 == 2 or number == 7:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def plain_loop(module, per_step, epochs=1, clip=None):
    """What a loop of one's own does with the same numbers: unfused."""
    optimizer = module.configure_optimizers()
    torch.manual_seed(9)
    for _ in range(epochs):
        batches = list(loader())
        for number, (x, y) in enumerate(batches):
            (module.head(module.encoder(x), y) / per_step).backward()
            if number % per_step == per_step - 1 or number == len(batches) - 1:
                if clip:
                    sx.optim.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return module


def near(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("fused", [False, True])
def test_manual_accumulation(tmp_path, fused):
    """Three backwards per step, the last step has two: one update of the rows each."""
    module = ManualAccumulation(nn.Linear(D, D), made().head, lr=0.05, fused=fused)
    want = plain_loop(copy.deepcopy(module), 3)
    torch.manual_seed(9)
    run = trainer(tmp_path, 1, enable_checkpointing=False)
    run.fit(module, loader())
    near(module, want)
    assert int(run.optimizers[0].state[module.head.weight]["step"]) == 3


# ------------------------------------------------------------------------------------------------ fused
class Grads(lightning.Callback):
    """The table's gradient and whether the table has changed, before each step."""

    def __init__(self) -> None:
        self.grads, self.changed, self.before = [], [], None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.before = module.head.weight.detach().clone()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.grads.append(module.head.weight.grad)
        self.changed.append(not torch.equal(self.before, module.head.weight))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fused_rows_train_as_unfused_ones(tmp_path, accumulate):
    """No gradient of the table is stored; the last step of an epoch has two batches of three."""
    module = made(fused=True)
    want = plain_loop(copy.deepcopy(module), accumulate, epochs=2)
    seen = Grads()
    torch.manual_seed(9)
    options = {"enable_checkpointing": False, "accumulate_grad_batches": accumulate, "callbacks": [seen]}
    run = trainer(tmp_path, 2, **options)
    run.fit(module, loader())
    near(module, want)
    steps = 2 * -(-8 // accumulate)
    assert seen.grads == [None] * steps
    assert seen.changed.count(True) >= 2 * (8 // accumulate)  # in backward, before step(); not in a short last step
    assert module.waits is None
    assert module.head.fused is None  # left as it was
    assert int(run.optimizers[0].state[module.head.weight]["step"]) == steps


def test_fused_rows_follow_an_accumulation_that_changes(tmp_path):
    module = made(fused=True)
    changing = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    run = trainer(tmp_path, 2, enable_checkpointing=False, callbacks=[changing])
    run.fit(module, loader())
    state = run.optimizers[0].state
    assert int(state[module.head.weight]["step"]) == int(state[module.encoder.weight]["step"]) == 8 + 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fused_precision(tmp_path, precision):
    module = made(fused=True)
    run = trainer(tmp_path, 8, enable_checkpointing=False, precision=precision)
    [before] = run.validate(module, loader(), verbose=False)
    run.fit(module, loader(), loader())
    [after] = run.validate(module, loader(), verbose=False)
    assert module.waits is None
    assert after["val_nll"] < before["val_nll"] - 0.3


class Tied(module_of):
    """The encoder reads rows of the class table."""

    def __init__(self, **options) -> None:
        torch.manual_seed(0)
        table = nn.Embedding(C, D, sparse=True)
        super().__init__(nn.Sequential(table, nn.Linear(D, D)), made().head, lr=0.05, **options)
        table.weight = self.head.weight

    def forward(self, x):
        return self.encoder(x.abs().argmax(1))


WAITS = {
    "norm": ({"gradient_clip_val": 0.5}, None, "gradient_clip_val=0.5 needs all gradients first"),
    "value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, None,
        "gradient_clip_val=0.01 needs all gradients first",
    ),
    "tied": ({}, Tied, "tied to another layer"),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS)
def test_fused_rows_wait_for_the_step(case, tmp_path):
    options, kind, why = WAITS[case]
    ends = []
    for fused in (True, False):
        module = kind(fused=fused) if kind else made(fused=fused)
        seen = Grads()
        torch.manual_seed(9)
        trainer(tmp_path, 1, enable_checkpointing=False, callbacks=[seen], **options).fit(module, loader())
        assert all(isinstance(grad, sx.optim.RowGradient) for grad in seen.grads)
        assert not any(seen.changed)
        ends.append(module)
    assert why in ends[0].waits
    assert ends[1].waits is None
    for p, q in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_grad_scaler_has_rows_wait():
    """16-mixed needs a GPU; the decision is made from the Trainer."""
    module = made(fused=True)
    module.trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module.trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    module.on_train_start()
    assert "GradScaler" in module.waits
    module.on_train_batch_start(None, 0)
    assert module.head.fused is None


def test_clipping_fused_rows_by_hand_is_refused(tmp_path):
    module = Manual(nn.Linear(D, D), made().head, fused=True)
    run = trainer(tmp_path, 1, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"clip_gradients: gradient_clip_val must be 0 with fused rows, got 0.001"):
        run.fit(module, loader())
    assert module.head.fused is not None
    module.fused = False  # the message's way out, with the same module
    trainer(tmp_path, 1, enable_checkpointing=False).fit(module, loader())
    assert len(module.norms) == 8


def test_a_head_that_the_caller_fused_is_refused():
    module = made()
    module.head.fuse_optimizer(sx.optim.RowSGD(module.head.parameters()))
    with pytest.raises(ValueError, match=r"SampledModule: head must not be fused by the caller.*pass fused=True"):
        module.configure_optimizers()


# ------------------------------------------------------------------------------------------------ resume
def following():
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, sx.samplers.Quadratic(torch.zeros(C, D)), num_samples=20)
    head.set_sampler(head.sampler, update="step")
    return head


def random_module(sampler="uniform", **options):
    """Dropout and draws: everything that asks a generator."""
    head = following() if sampler == "follows" else made().head
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.3))
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)  # noqa: E731
    return module_of(encoder, head, lr=0.05, scheduler=schedule, **options)


RESUMES = {
    "plain": ({}, {}),
    "fused": ({"fused": True}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "fused_accumulated": ({"fused": True}, {"accumulate_grad_batches": 3}),
    "follows": ({"sampler": "follows"}, {}),
    "follows_fused": ({"sampler": "follows", "fused": True}, {}),
    "bf16": ({"fused": True}, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("case", RESUMES)
def test_resumes_with_the_same_bits(case, tmp_path):
    """Two epochs, then two more from the checkpoint, with shuffled data and dropout: the bits of four epochs."""
    of_module, of_trainer = RESUMES[case]

    def data():
        return DataLoader(loader().dataset, batch_size=8, shuffle=True)

    keep = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    whole = random_module(**of_module)
    torch.manual_seed(3)
    trainer(tmp_path, 4, callbacks=[keep], **of_trainer).fit(whole, data(), loader())
    again = random_module(**of_module)
    torch.manual_seed(4)
    run = trainer(tmp_path / "more", 4, enable_checkpointing=False, **of_trainer)
    run.fit(again, data(), loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
    steps = 4 * -(-8 // of_trainer.get("accumulate_grad_batches", 1))
    state = run.optimizers[0].state
    assert int(state[again.head.weight]["step"]) == int(state[again.encoder[0].weight]["step"]) == steps
    mine, theirs = again.state_dict(), whole.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    at_two = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"]["head.weight"]
    assert not torch.equal(at_two, again.head.weight)


class Resumable(DataLoader):
    """Batches in order, from the one after the checkpoint's."""

    start, given = 0, 0

    def __iter__(self):
        start, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given = number + 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.start = state["given"]


def test_resumes_with_the_same_bits_in_the_middle_of_an_epoch(tmp_path):
    """With a loader that knows its place, as Lightning asks for."""

    def data():
        return Resumable(loader().dataset, batch_size=8)

    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3
    )
    whole = random_module(fused=True)
    torch.manual_seed(3)
    trainer(tmp_path, 2, callbacks=[keep]).fit(whole, data())
    again = random_module(fused=True)
    run = trainer(tmp_path / "more", 2, enable_checkpointing=False)
    run.fit(again, data(), ckpt_path=tmp_path / "step=3.ckpt")
    assert int(run.optimizers[0].state[again.head.weight]["step"]) == 16
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_without_random_state_loads(tmp_path):
    """Those of before, and those of a Trainer that has the callback itself."""
    module = made()
    own = sx.integrations.lightning.RandomState()
    run = trainer(tmp_path, 1, callbacks=[own])
    run.fit(module, loader())
    assert sum(isinstance(one, type(own)) for one in run.callbacks) == 1
    [path] = tmp_path.rglob("*.ckpt")
    stored = torch.load(path, weights_only=True)
    [name] = [name for name in stored["callbacks"] if "RandomState" in name]
    del stored["callbacks"][name]
    torch.save(stored, path)
    run = trainer(tmp_path / "more", 2, enable_checkpointing=False)
    run.fit(made(), loader(), ckpt_path=path)
    assert run.global_step == 16
