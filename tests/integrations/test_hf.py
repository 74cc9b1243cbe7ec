"""Language models of transformers, made from configurations, with a sampled output layer."""

from __future__ import annotations

import copy

import pytest
import torch

import samplex_cuda as sx

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
hf = sx.integrations.hf

V = 500


def gpt2(tied: bool = True):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=16, tie_word_embeddings=tied, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )


def bert():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5():
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=V,
            d_model=16,
            d_ff=16,
            d_kv=8,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


MODELS = {"gpt2": gpt2, "gpt2_untied": lambda: gpt2(tied=False), "llama": llama, "bert": bert, "t5": t5}


def tokens(n: int = 3, seed: int = 0):
    return torch.randint(V, (n, 12), generator=torch.Generator().manual_seed(seed))


def labels_of(ids):
    labels = ids.clone()
    labels[:, 2::3] = -100
    return labels


@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_what_it_was(name, tmp_path):
    model = MODELS[name]()
    plain = copy.deepcopy(model).eval()
    head = hf.replace_lm_head(model, sx.samplers.Unigram(torch.ones(V)), 64)
    assert model.get_output_embeddings() is head
    ids = tokens()
    want = plain(input_ids=ids, labels=labels_of(ids))
    model.eval()
    torch.testing.assert_close(model(input_ids=ids, labels=labels_of(ids)).loss, want.loss)
    if name != "t5":
        assert torch.equal(model(input_ids=ids).logits, want.logits)
    if model.can_generate():
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    # A checkpoint is one of the plain model.
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids, labels=labels_of(ids)).loss, want.loss)


@pytest.mark.parametrize("name", MODELS)
def test_sampled_training_approaches_the_exact_gradient(name):
    """With every class drawn many times, the sampled loss is close to the exact one, and so are its gradients."""
    model = MODELS[name]().train()
    plain = copy.deepcopy(model)
    hf.replace_lm_head(model, sx.samplers.Uniform(V), 200_000)
    optimizer = hf.make_optimizer(model)
    ids = tokens()
    losses = [m(input_ids=ids, labels=labels_of(ids)).loss for m in (model, plain)]
    torch.testing.assert_close(*losses, rtol=0, atol=0.01)
    for loss in losses:
        loss.backward()
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is None:
            continue
        grad = p.grad.to_dense() if any(p is t for t in sx.optim.split_parameters(model)[1]) else p.grad
        close = torch.nn.functional.cosine_similarity(grad.flatten(), q.grad.flatten(), dim=0)
        assert close > 0.98 or q.grad.norm() < 1e-6, (key, close)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, plain)]
    torch.testing.assert_close(*norms, rtol=0.1, atol=0.0)
    optimizer.step()


class Zipf(torch.utils.data.Dataset):
    """Sequences with frequent and rare tokens."""

    def __init__(self, n: int) -> None:
        g = torch.Generator().manual_seed(5)
        self.ids = (V ** torch.rand(n, 12, generator=g)).long().clamp(max=V - 1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def trainer(model, folder, steps, **options):
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, seed=3, dataloader_pin_memory=False,
        prediction_loss_only=True, lr_scheduler_type="linear", **options,
    )  # fmt: skip
    optimizer = hf.make_optimizer(model, lr=args.learning_rate)
    return transformers.Trainer(model, args, train_dataset=Zipf(64), eval_dataset=Zipf(8), optimizers=(optimizer, None))


def sampled(tied: bool = True):
    model = gpt2(tied)
    hf.replace_lm_head(model, sx.samplers.LogUniform(V), 32)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_trainer(tied, tmp_path):
    model = sampled(tied)
    run = trainer(model, tmp_path, 20, save_strategy="no", gradient_accumulation_steps=2)
    before = run.evaluate()["eval_loss"]
    run.train()
    after = run.evaluate()["eval_loss"]
    assert after < before - 0.1, (before, after)
    norms = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    assert len(norms) == 20
    assert all(norm > 0 for norm in norms)
    rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert rates[0] > rates[-1]
    assert {float(group["lr"]) for group in run.optimizer.param_groups} == {run.lr_scheduler.get_last_lr()[0]}
    # The exact loss is what a Trainer finds for the plain model.
    plain = gpt2(tied)
    plain.load_state_dict(model.state_dict())
    want = transformers.Trainer(plain, run.args, eval_dataset=run.eval_dataset).evaluate()["eval_loss"]
    assert after == pytest.approx(want, abs=1e-5)


def test_trainer_clips_rows_too(tmp_path):
    model = sampled()
    run = trainer(model, tmp_path, 1, save_strategy="no", max_grad_norm=1e-3)
    seen = []
    run.add_callback(Norms(model, seen))
    run.train()
    assert seen[0] == pytest.approx(1e-3, rel=1e-3)


class Norms(transformers.TrainerCallback):
    def __init__(self, model, seen) -> None:
        self.model, self.seen = model, seen

    def on_pre_optimizer_step(self, *args, **kwargs):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        assert any(isinstance(g, sx.optim.RowGradient) for g in grads)
        self.seen.append(float(torch.stack([g.norm() for g in grads]).norm()))


def test_trainer_resumes(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    whole = sampled()
    trainer(whole, tmp_path / "a", 8, **options).train()
    again = sampled()
    trainer(again, tmp_path / "a", 8, **options).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    for (name, p), q in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_refused():
    model = gpt2()
    with pytest.raises(ValueError, match=f"SampledClassifier: sampler must have num_classes = {V}, got 7"):
        hf.replace_lm_head(model, sx.samplers.Uniform(7), 5)
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    with pytest.raises(TypeError, match="make_optimizer: model must have an LMHead, got Linear"):
        hf.make_optimizer(model)
    with pytest.raises(
        TypeError, match=r"replace_lm_head: model must have an nn.Linear as output embeddings, got None"
    ):
        hf.replace_lm_head(model.transformer, sx.samplers.Uniform(V), 5)
