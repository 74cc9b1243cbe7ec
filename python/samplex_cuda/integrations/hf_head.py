"""The output layer of a transformers model: sampled with labels, `nn.Linear` without."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from samplex_cuda.heads import SampledClassifier
from samplex_cuda.losses import Loss

__all__ = ["LMHead", "replace_lm_head"]


class LMHead(SampledClassifier):
    """The output layer that `replace_lm_head` puts in: `nn.Linear` without labels, a `SampledClassifier` with them.

    Its `state_dict` holds weight and bias, not the sampler.
    """

    _hidden: list[Tensor] | None = None

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
        return h.new_empty(*h.shape[:-1], 0)

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
        options: further options of `SampledClassifier`.

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
    head = LMHead(
        out.in_features, out.out_features, sampler, m, loss, out.bias is not None, shared=shared,
        device="meta", dtype=out.weight.dtype, **options,
    )  # fmt: skip
    head.weight = out.weight  # type: ignore[assignment]
    head.bias = out.bias
    sampler.to(out.weight.device)
    if tied or (sparse_embedding and isinstance(embedding, nn.Embedding)):
        embedding.sparse = True
    model.set_output_embeddings(head)
    head.train(model.training)
    shifts = model.can_generate() and not model.config.is_encoder_decoder if shift is None else shift
    model.forward = types.MethodType(_with_loss(type(model).forward, shifts), model)
    return head


def _with_loss(forward: Any, shift: bool) -> Any:
    """The forward of a model class, with the loss of its head."""

    @functools.wraps(forward)
    def sampled(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        head: LMHead = self.get_output_embeddings()
        if labels is None:
            return forward(self, *args, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        wanted, kwargs["return_dict"] = kwargs.get("return_dict", True), True
        if self.config.is_encoder_decoder and kwargs.get("decoder_input_ids") is None:
            kwargs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels)
        with head.hidden_states() as seen:
            found = forward(self, *args, **kwargs)
        [h] = seen
        y = labels.to(h.device)
        if shift:
            h, y = h[..., :-1, :], y[..., 1:]
        valid = y != head.ignore_index
        # Autocast runs the layers before in half precision; the table keeps its own.
        h, y = h[valid].to(head.weight.dtype), y[valid]
        found["loss"] = head(h, y)
        if count is not None:  # tokens of all the batches that make one step
            found["loss"] = found["loss"] * (y.shape[0] / count)
        found["logits"] = None
        return found if wanted else found.to_tuple()

    return sampled
