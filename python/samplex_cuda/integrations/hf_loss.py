"""The forward of a transformers model whose loss is that of its `LMHead`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from samplex_cuda.integrations.hf_head import LMHead

__all__ = ["with_loss"]


@contextlib.contextmanager
def _narrow(model: Any) -> Iterator[None]:
    """Within it, a `final_logits_bias` [1, C] of zeros has the width of the logits that are not made."""
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        model.final_logits_bias = bias[:, :1]
    try:
        yield
    finally:
        if bias is not None:
            model.final_logits_bias = bias


def with_loss(forward: Any, shift: bool) -> Any:
    """The forward of a model class, with the loss of its head.

    Args:
        forward: of the class.
        shift: whether the label of a position is that of the next one.
    """

    @functools.wraps(forward)
    def sampled(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        head: LMHead = self.get_output_embeddings()
        if labels is None:
            return forward(self, *args, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        wanted, kwargs["return_dict"] = kwargs.get("return_dict", True), True
        if self.config.is_encoder_decoder and kwargs.get("decoder_input_ids") is None:
            kwargs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels)
        with head.hidden_states() as seen, _narrow(self):
            found = forward(self, *args, **kwargs)
        head.check_probe(found["logits"])
        [h] = seen
        y = labels.to(h.device)
        if shift:
            h, y = h[..., :-1, :], y[..., 1:]
        valid = y != head.ignore_index
        # Autocast runs the layers before in half precision; the table keeps its own.
        h, y = h[valid].to(head.weight.dtype), y[valid]
        found["loss"] = head(h, y)
        if count is not None:  # tokens of all the batches that make one step
            found["loss"] = found["loss"] * (head.tokens(y) / count)
        if found.get("aux_loss") is not None:  # of the routers of a mixture of experts
            rate = getattr(self, "router_aux_loss_coef", None) or self.config.router_aux_loss_coef
            found["loss"] = found["loss"] + rate * found["aux_loss"].to(found["loss"].device)
        found["logits"] = None
        return found if wanted else found.to_tuple()

    return sampled
