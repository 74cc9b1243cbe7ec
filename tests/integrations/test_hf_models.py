"""Families of transformers that do something of their own around the output layer: the exact loss stays theirs."""

from __future__ import annotations

import copy

import pytest
import torch

import samplex_cuda as sx

transformers = pytest.importorskip("transformers")
hf = sx.integrations.hf
T = transformers

V = 200
SMALL = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MOE = {**SMALL, "num_key_value_heads": 1, "num_local_experts": 2}


def bart():
    return T.BartForConditionalGeneration(
        T.BartConfig(
            vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=1, bos_token_id=0,
            eos_token_id=2, decoder_start_token_id=2,
        )
    )  # fmt: skip


# Model, and options of replace_lm_head.
MODELS = {
    "roberta": (lambda: T.RobertaForMaskedLM(T.RobertaConfig(**SMALL)), {}),
    "opt": (lambda: T.OPTForCausalLM(T.OPTConfig(**{**SMALL, "ffn_dim": 16, "word_embed_proj_dim": 16})), {}),
    "bart": (bart, {}),  # adds final_logits_bias
    "cohere": (lambda: T.CohereForCausalLM(T.CohereConfig(**SMALL, logit_scale=0.25)), {"scale": 0.25}),
    "granite": (lambda: T.GraniteForCausalLM(T.GraniteConfig(**SMALL, logits_scaling=8.0)), {"scale": 1 / 8}),
    "mixtral": (lambda: T.MixtralForCausalLM(T.MixtralConfig(**MOE, output_router_logits=True)), {}),
    "xlnet": (  # labels are not shifted
        lambda: T.XLNetLMHeadModel(T.XLNetConfig(vocab_size=V, d_model=16, n_layer=1, n_head=2, d_inner=16)),
        {},
    ),
}


def made(name, **changed):
    torch.manual_seed(0)
    make, options = MODELS[name]
    model = make().eval()
    plain = copy.deepcopy(model)
    with torch.no_grad():  # logits far from zero, so that what is done with them shows
        for m in (model, plain):
            m.get_output_embeddings().weight.mul_(20)
    hf.replace_lm_head(model, sx.samplers.LogUniform(V), 32, **{**options, **changed})
    return model, plain


def tokens():
    return torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")  # what the models say of their kernels and configurations
@pytest.mark.parametrize("name", MODELS)
def test_the_exact_loss_is_theirs(name):
    model, plain = made(name)
    ids = tokens()
    want = plain(input_ids=ids, labels=ids).loss
    for _ in range(2):  # the first call looks at what the model does with its logits
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, want, rtol=1e-4, atol=1e-5)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.get_output_embeddings().weight.grad.is_sparse
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "factor"), [("cohere", "0.25"), ("granite", "0.125")])
def test_a_factor_of_the_logits_must_be_the_scale(name, factor):
    model, _ = made(name, scale=1.0)
    with pytest.raises(ValueError, match=rf"what the model multiplies its logits by, {factor}, got 1: pass"):
        model(input_ids=tokens(), labels=tokens())


@pytest.mark.filterwarnings("ignore")
def test_other_changes_of_the_logits_are_refused():
    torch.manual_seed(0)
    config = T.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=8, final_logit_softcapping=30.0)
    for dtype in (torch.float32, torch.bfloat16):
        model = T.Gemma2ForCausalLM(config).to(dtype)
        hf.replace_lm_head(model, sx.samplers.LogUniform(V), 32)
        with pytest.raises(
            ValueError, match=r"got a model that transforms them \(for example final_logit_softcapping\)"
        ):
            model(input_ids=tokens(), labels=tokens())
    model = bart()
    model.final_logits_bias[0, 3] = 1.0
    with pytest.raises(ValueError, match="replace_lm_head: model must have a final_logits_bias of zeros"):
        hf.replace_lm_head(model, sx.samplers.LogUniform(V), 32)


def test_transformers_own_optimizer_names_ours(tmp_path):
    """Nobody passed an optimizer: the Trainer makes AdamW, and dies in the gradient norm."""
    pytest.importorskip("accelerate")
    config = T.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = T.GPT2LMHeadModel(config)
    hf.replace_lm_head(model, sx.samplers.LogUniform(V), 32)
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    args = T.TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    with pytest.raises(TypeError, match=rf"got a sparse one \[{V}, 16\] .*sx.optim.Combined"):
        T.Trainer(model, args, train_dataset=rows).train()
