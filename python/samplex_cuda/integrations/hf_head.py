"""The output layer of a transformers model: sampled with labels, `nn.Linear` without."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from samplex_cuda.heads import SampledClassifier
from samplex_cuda.integrations.hf_loss import with_loss
from samplex_cuda.losses import Loss

__all__ = ["LMHead", "replace_lm_head"]

_PROBE = (1.0, 1000.0)  # logits that show a factor, and any change that is not one


class LMHead(SampledClassifier):
    """The output layer that `replace_lm_head` puts in: `nn.Linear` without labels, a `SampledClassifier` with them.

    Its `state_dict` holds weight and bias, not the sampler.
    """

    _hidden: list[Tensor] | None = None
    _probe = True  # the next call with labels looks at what the model does with its logits

    def forward(self, h: Tensor, y: Tensor | None = None, **options: Any) -> Tensor:
        """Logits [*, C] of h [*, d]; with targets y [*], the loss.

        Args:
            h: [*, d].
            y: int64 [*], or None.
            options: as in `SampledClassifier`.
        """
        if y is not None:
            return super().forward(h, y, **options)
        if self._hidden is None:
            return nn.functional.linear(h, self.weight, self.bias)
        self._hidden.append(h)  # the model wants a loss: logits of all tokens are not made
        if self._probe and not torch.compiler.is_compiling():
            return h.new_tensor(_PROBE).expand(*h.shape[:-1], len(_PROBE))
        return h.new_empty(*h.shape[:-1], 0)

    def tokens(self, y: Tensor) -> Any:
        """Of how many tokens the last loss was the mean; on several processes per process, as a Trainer expects it.

        Args:
            y: int64 [*], the targets of this process.
        """
        replica = self._replica if self.training else None
        return y.shape[0] if replica is None else replica.rows / replica.exchange.world

    def check_probe(self, logits: Tensor) -> None:
        """Raises where a model does more with its logits than multiply them by `scale`.

        Args:
            logits: what the model made of the first call with labels.
        """
        if not self._probe or logits.shape[-1:] != (len(_PROBE),):
            return
        low, high = (logits.detach().reshape(-1, len(_PROBE))[0] / logits.new_tensor(_PROBE)).tolist()
        if abs(low - high) > 0.02 * abs(low):
            raise ValueError(
                "replace_lm_head: model must use the logits of its output layer unchanged or times a constant, got a "
                "model that transforms them (for example final_logit_softcapping), which a sampled head does not "
                "support; disable it in the configuration of the model"
            )
        if abs(low - self.scale) > 0.02 * abs(low):
            raise ValueError(
                f"replace_lm_head: scale must be what the model multiplies its logits by, {low:g}, got {self.scale:g}: "
                f"pass scale={low:g}"
            )
        self._probe = False

    @contextlib.contextmanager
    def hidden_states(self) -> Iterator[list[Tensor]]:
        """Within it, calls without targets store `h` in the list it gives and make no logits."""
        found: list[Tensor] = []
        self._hidden = found
        try:
            yield found
        finally:
            self._hidden = None

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Weight and bias."""
        destination = {} if destination is None else destination
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        return destination


def replace_lm_head(
    model: PreTrainedModel,
    sampler: nn.Module,
    m: int,
    *,
    loss: str | Loss = "sampled_softmax",
    shared: bool = True,
    shift: bool | None = None,
    sparse_embedding: bool = True,
    **options: Any,
) -> LMHead:
    """Makes the output layer of a language model a sampled head, in place; the parameters stay the same tensors.

    Args:
        model: a causal, masked or encoder-decoder model with `get_output_embeddings()`. Its vocabulary must have its
            final size.
        sampler: a sampler over the vocabulary, e.g. `sx.samplers.LogUniform(model.config.vocab_size)`.
        m: draws per batch, or per token with `shared=False`.
        loss: as in `SampledClassifier`.
        shared: whether the tokens of a batch share the draws.
        shift: whether the label of a position is that of the next one; by default so for causal models.
        sparse_embedding: give the input embedding sparse gradients too. A tied one always gets them.
        options: further options of `SampledClassifier`; `scale` must be what the model multiplies its logits by.

    Returns:
        The head, which is now `model.get_output_embeddings()`.

    Example:
        >>> import torch, transformers, samplex_cuda as sx
        >>> config = transformers.GPT2Config(vocab_size=1000, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> head = sx.integrations.hf.replace_lm_head(model, sx.samplers.LogUniform(1000), 64)
        >>> ids = torch.randint(1000, (2, 8))
        >>> loss = model(input_ids=ids, labels=ids).loss  # sampled; exact after model.eval()
        >>> model(input_ids=ids).logits.shape
        torch.Size([2, 8, 1000])
    """
    out = model.get_output_embeddings()
    if not isinstance(out, nn.Linear):
        got = "None" if out is None else type(out).__name__
        raise TypeError(f"replace_lm_head: model must have an nn.Linear as output embeddings, got {got}")
    embedding: Any = model.get_input_embeddings()
    tied = getattr(embedding, "weight", None) is out.weight
    if tied and not isinstance(embedding, nn.Embedding):
        raise TypeError(f"replace_lm_head: a tied embedding must be an nn.Embedding, got {type(embedding).__name__}")
    if bool((getattr(model, "final_logits_bias", torch.zeros(())) != 0).any()):
        raise ValueError("replace_lm_head: model must have a final_logits_bias of zeros, got other values")
    head = LMHead(
        out.in_features, out.out_features, sampler, m, loss, out.bias is not None, shared=shared,
        device="meta", dtype=out.weight.dtype, **options,
    )  # fmt: skip
    head.weight = out.weight  # type: ignore[assignment]
    head.bias = out.bias
    sampler.to(out.weight.device)
    if sparse_embedding and isinstance(embedding, nn.Embedding):
        embedding.sparse = True
    for module in model.modules():  # encoder and decoder may have a module each
        if isinstance(module, nn.Embedding) and module.weight is out.weight:
            module.sparse = True
    model.set_output_embeddings(head)
    head.train(model.training)
    if shift is None:  # XLNet's labels are those of the same position
        shift = model.can_generate() and not model.config.is_encoder_decoder and model.config.model_type != "xlnet"
    model.forward = types.MethodType(with_loss(type(model).forward, shift), model)
    return head
