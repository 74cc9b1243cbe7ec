"""`FusedRows`: the callback that owns the optimizer of a model in transformers' Trainer."""

from __future__ import annotations

import copy

import pytest
import torch

import samplex_cuda as sx

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
hf = sx.integrations.hf

V, LENGTH, EXAMPLES = 300, 8, 44  # 11 batches of 4: the last step of an epoch of 3 batches each has two


def model_of(tied=False, sampler=None):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH, tie_word_embeddings=tied, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    hf.replace_lm_head(model, sx.samplers.LogUniform(V) if sampler is None else sampler, 32)
    return model


class Zipf(torch.utils.data.Dataset):
    """Sequences with frequent and rare tokens."""

    def __init__(self, n=EXAMPLES):
        g = torch.Generator().manual_seed(5)
        self.ids = (V ** torch.rand(n, LENGTH, generator=g)).long().clamp(max=V - 1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Watch(transformers.TrainerCallback):
    """What the class table and its gradient are before each step."""

    def __init__(self, head):
        self.head, self.grads, self.changed, self.before = head, [], [], head.weight.detach().clone()

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.grads.append(self.head.weight.grad)
        self.changed.append(not torch.equal(self.before, self.head.weight))

    def on_step_end(self, *args, **kwargs):
        self.before = self.head.weight.detach().clone()


def trainer(model, folder, rows=None, **options):
    """With the callback; without it (rows=False), the optimizer alone."""
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
        logging_steps=1, dataloader_pin_memory=False, prediction_loss_only=True,
        **{"num_train_epochs": 2, "save_strategy": "no", "max_grad_norm": 0.0, **options},
    )  # fmt: skip
    fused = hf.FusedRows(model, lr=1e-2) if rows is None else rows
    optimizer = fused.optimizer if fused else hf.make_optimizer(model, lr=1e-2)
    made = transformers.Trainer(
        model, args, train_dataset=Zipf(), eval_dataset=Zipf(8), optimizers=(optimizer, None),
        callbacks=[fused] if fused else [],
    )  # fmt: skip
    return made, fused


def equal(a, b, **close):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        if close:
            torch.testing.assert_close(p, q, msg=name, **close)
        else:
            assert torch.equal(p, q), name


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fused_rows_train_as_unfused_ones(accumulate, tmp_path):
    """No gradient of the table is stored; scheduler, accumulation and a short last step are those of the Trainer."""
    one, two = model_of(), model_of()
    run, fused = trainer(one, tmp_path, gradient_accumulation_steps=accumulate)
    watch = Watch(one.get_output_embeddings())
    run.add_callback(watch)
    run.train()
    assert fused.waits is None
    steps = 2 * -(-11 // accumulate)
    assert watch.grads == [None] * steps
    # In the last batch of a step, before step(); a short last step is made by the callback, which runs before `watch`.
    assert watch.changed[:-1] == [True] * (steps - 1)
    assert one.get_output_embeddings().fused is None  # left as it was
    other, _ = trainer(two, tmp_path, rows=False, gradient_accumulation_steps=accumulate)
    other.train()
    equal(one, two, rtol=1e-4, atol=1e-5)
    assert {float(g["lr"]) for g in run.optimizer.param_groups} == {run.lr_scheduler.get_last_lr()[0]}
    state = fused.optimizer.rows.state[one.lm_head.weight]
    assert int(state["step"]) == steps


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_resumes_with_the_same_bits(accumulate, clip, tied, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": accumulate, "max_steps": 7}
    options["max_grad_norm"] = clip
    whole = model_of(tied)
    trainer(whole, tmp_path, **options)[0].train()
    again = model_of(tied)
    run, fused = trainer(again, tmp_path, **options)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (fused.waits is None) == (not clip and not tied)
    equal(whole, again)
    assert run.lr_scheduler.last_epoch == 7


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_sampler_that_follows_the_table_resumes(clip, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 7, "max_grad_norm": clip}
    models = [model_of(sampler=sx.samplers.Quadratic(torch.zeros(V, 16))) for _ in range(2)]
    for model in models:
        head = model.get_output_embeddings()
        head.set_sampler(head.sampler, update="step")
    trainer(models[0], tmp_path, **options)[0].train()
    trainer(models[1], tmp_path, **options)[0].train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    equal(*models)
    samplers = [model.get_output_embeddings().sampler.state_dict() for model in models]
    assert samplers[0].keys() == samplers[1].keys()
    for name, value in samplers[0].items():
        assert torch.equal(value, samplers[1][name]), name


WAITS = {
    "clip": ({"max_grad_norm": 1.0}, False, "max_grad_norm=1 needs the norm of all gradients first"),
    "default": ({"max_grad_norm": None}, False, "max_grad_norm=1 needs"),
    "tied": ({}, True, "tied to the embedding"),
}


@pytest.mark.parametrize("case", WAITS)
def test_rows_wait_for_the_step(case, tmp_path):
    options, tied, why = WAITS[case]
    options = {"max_steps": 3, **options}
    one, two = model_of(tied), model_of(tied)
    if options.get("max_grad_norm", 0) is None:  # what a Trainer does when nobody says anything
        options["max_grad_norm"] = transformers.TrainingArguments(str(tmp_path)).max_grad_norm
    run, fused = trainer(one, tmp_path, **options)
    watch = Watch(one.get_output_embeddings())
    run.add_callback(watch)
    run.train()
    assert why in fused.waits
    assert all(isinstance(grad, sx.optim.RowGradient) for grad in watch.grads)
    assert watch.changed == [False] * 3
    trainer(two, tmp_path, rows=False, **options)[0].train()
    equal(one, two)


def test_a_grad_scaler_has_rows_wait(tmp_path):
    """fp16 needs a GPU in a Trainer; the decision is made from its arguments."""
    model = model_of()
    fused = hf.FusedRows(model)
    args = transformers.TrainingArguments(str(tmp_path), max_grad_norm=0.0, use_cpu=True, report_to=[])
    args.fp16 = True
    fused.on_train_begin(args, None, None, optimizer=fused.optimizer)
    assert "GradScaler" in fused.waits
    assert model.get_output_embeddings().fused is None


def test_evaluates_exactly_and_generates_as_before(tmp_path):
    model = model_of()
    run, _ = trainer(model, tmp_path)
    before = run.evaluate()["eval_loss"]
    run.train()
    after = run.evaluate()["eval_loss"]
    assert after < before
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(copy.deepcopy(model.config))
    plain.load_state_dict(model.state_dict())
    want = transformers.Trainer(plain, run.args, eval_dataset=run.eval_dataset).evaluate()["eval_loss"]
    assert after == pytest.approx(want, abs=1e-5)
    prompt = torch.tensor([[4, 1, 7]])
    for options in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 3}):
        found = []
        for m in (model.eval(), plain.eval()):
            torch.manual_seed(1)
            found.append(m.generate(prompt, max_new_tokens=4, pad_token_id=0, **options))
        assert torch.equal(*found), options


def test_refused(tmp_path):
    model = model_of()
    fused = hf.FusedRows(model)
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    run = transformers.Trainer(model, args, train_dataset=Zipf(), optimizers=(other, None), callbacks=[fused])
    with pytest.raises(ValueError, match=r"FusedRows: the Trainer must have optimizers=\(callback.optimizer, None\)"):
        run.train()
    assert model.get_output_embeddings().fused is None
