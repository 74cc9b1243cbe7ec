"""Which values a key may have, alone and together with the others."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import TYPE_CHECKING, Any

from samplex_cuda import losses

if TYPE_CHECKING:
    from samplex_cuda.training.config.tables import Config, Head

__all__ = [
    "MIXED",
    "MODELS",
    "SAMPLERS",
    "ConfigError",
    "allowed_values",
    "check_together",
    "check_value",
    "kind_of",
    "shown",
]

MODELS = ("linear", "mlp", "embedding_bag", "lstm", "gru", "two_tower", "sequence")
SAMPLERS = (
    "uniform",
    "log_uniform",
    "unigram",
    "bigram",
    "tree",
    "quadratic",
    "rff",
    "midx",
    "softmax",
    "in_batch",
    "mixture",
)
# Samplers whose distribution may lose classes that the model needs: a fixed one is mixed in (`sampler.base`).
MIXED = ("tree", "rff", "quadratic")
# Keys of [head] that are options of the loss, by their name there.
LOSS_OPTIONS = {"label_smoothing": "label_smoothing", "absolute": "absolute", "reg": "reg", "eta_rate": "rate"}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, table, key, what is wanted and what was found.

    Example:
        >>> from samplex_cuda.training import config
        >>> try:
        ...     config.from_dict({"optimizer": {"lr": "fast"}}, source="run.toml")
        ... except config.ConfigError as error:
        ...     print(error)
        config: run.toml: [optimizer] lr must be a number above 0, got "fast"
    """


def shown(value: Any) -> str:
    """A value as a message shows it: as TOML would have it where that is possible."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def allowed_values(field: dataclasses.Field[Any]) -> str:
    """What a key may be, in words."""
    rules, kind = field.metadata, kind_of(field)
    if rules["choices"]:
        return "one of " + ", ".join(f'"{c}"' for c in rules["choices"])
    word = {"int": "an int", "float": "a number", "bool": "true or false", "str": "a string"}.get(kind, "")
    if kind == "list[str]":
        return "a list of strings"
    if kind == "list[float]":
        return "a list of numbers"
    if kind == "dict":
        return "a table"
    bounds = [
        f"{text} {rules[name]:g}"
        for name, text in (("above", "above"), ("least", "at least"), ("below", "below"), ("most", "at most"))
        if rules[name] is not None
    ]
    return " or ".join([" ".join([word, " and ".join(bounds)]).strip(), *(f'"{w}"' for w in rules["also"])])


def kind_of(field: dataclasses.Field[Any]) -> str:
    """The type of a key, without the words it may be instead."""
    return str(field.type).split(" | ")[0].replace("dict[str, Any]", "dict")


def check_value(source: str, table: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """The value, in the type of the key; `ConfigError` if it is invalid."""
    rules, kind = field.metadata, kind_of(field)
    good = False
    if isinstance(value, str) and value in rules["also"]:
        return value
    if kind == "bool":
        good = isinstance(value, bool)
    elif kind == "int":
        good = isinstance(value, int) and not isinstance(value, bool)
    elif kind == "float":
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if good else value
    elif kind == "str":
        good = isinstance(value, str) and (rules["choices"] is None or value in rules["choices"])
    elif kind == "list[str]":
        good = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
    elif kind == "list[float]":
        good = isinstance(value, list | tuple) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in value
        )
    elif kind == "dict":
        good = isinstance(value, dict)
    if good and kind in ("int", "float"):
        good = (
            (rules["least"] is None or value >= rules["least"])
            and (rules["above"] is None or value > rules["above"])
            and (rules["most"] is None or value <= rules["most"])
            and (rules["below"] is None or value < rules["below"])
        )
    if not good:
        raise ConfigError(
            f"config: {source}: [{table}] {field.name} must be {allowed_values(field)}, got {shown(value)}"
        )
    return list(value) if isinstance(value, tuple) else value


def make_loss(head: Head, num_examples: int) -> losses.Loss:
    """The loss of `[head]`, with the options of that table that it has.

    Args:
        head: the table.
        num_examples: how many training examples there are, for a loss that keeps a number for each.

    Example:
        >>> from samplex_cuda.training.config import Head
        >>> from samplex_cuda.training.config.checks import make_loss
        >>> make_loss(Head(loss="augment_reduce"), 100)
        AugmentReduce(num_examples=100)
    """
    kind = losses.by_name(head.loss)
    given = {option: getattr(head, key) for key, option in LOSS_OPTIONS.items()} | {"num_examples": num_examples}
    numbers = (head.margin_m1, head.margin_m2, head.margin_m3)
    given |= {"margin": losses.Margin(*numbers) if numbers != (1.0, 0.0, 0.0) else None, "corrected": head.corrected}
    return kind(**{option: value for option, value in given.items() if option in kind.options()})


def check_together(source: str, c: Config) -> None:
    """Raises `ConfigError` for keys that contradict each other."""
    c = c.resolved()

    def fail(table: str, name: str, wanted: str, got: Any) -> None:
        raise ConfigError(f"config: {source}: [{table}] {name} must be {wanted}, got {shown(got)}")

    if c.model.name not in MODELS and not re.fullmatch(r"[\w.]+:\w+", c.model.name):
        fail("model", "name", "one of " + ", ".join(MODELS) + ', or "package.module:Class"', c.model.name)
    if c.model.options and c.model.name in MODELS:
        fail("model", "options", "empty where the model has no import path", c.model.options)
    if c.model.tied and c.model.name not in ("lstm", "gru", "sequence", "two_tower"):
        fail("model", "tied", f"false with the model {c.model.name}", True)
    if c.model.pca and c.model.name not in ("linear", "mlp"):
        fail("model", "pca", f"0 with the model {c.model.name}", c.model.pca)
    loss = make_loss(c.head, num_examples=1)
    needs, named = loss.needs, f'loss = "{c.head.loss}"'
    if c.head.normalize and not loss.normalizes:
        fail("head", "normalize", f"false with {named}", True)
    if c.head.learn_scale and (not c.head.scale > 0 or c.training.shard != "none"):
        fail("head", "learn_scale", "false with scale <= 0 or training.shard", True)
    if c.head.table == "host" and (c.model.tied or c.training.shard != "none"):
        fail("head", "table", "device with model.tied or training.shard", c.head.table)
    for key, off in (("margin_m1", 1.0), ("margin_m2", 0.0), ("margin_m3", 0.0)):
        if getattr(c.head, key) != off and not (c.head.normalize and loss.compares_angles):
            fail("head", key, f"{off:g} unless normalize = true and the loss is sampled_softmax", getattr(c.head, key))
    if not c.head.corrected and "corrected" not in loss.options():
        fail("head", "corrected", f"true with {named}", False)
    if c.optimizer.fused is True:
        for bad, why in (
            (not needs.draws, f"head.{named}"),
            (c.model.tied, "model.tied = true"),
            (c.training.clip_head, "training.clip_head = true"),
        ):
            if bad:
                fail("optimizer", "fused", f'false or "auto" with {why}', True)
    if c.training.clip_head and not c.training.clip_norm:
        fail("training", "clip_norm", "above 0 with clip_head", c.training.clip_norm)
    if c.sampler.choose_every:
        plain = needs.draws and loss.joins and not loss.absolute
        plain = (
            plain and c.head.corrected and not (c.head.normalize or c.head.unique or c.head.hard or c.head.learn_scale)
        )
        if not plain or c.data.negatives or c.head.table == "host":
            fail("sampler", "choose_every", "0 unless the loss is a plain sampled_softmax", c.sampler.choose_every)
        if c.sampler.name != "unigram" or not c.head.shared or c.head.num_samples != 1024:
            wanted = '"auto" with sampler.choose_every, and head.shared and head.num_samples too'
            fail("sampler", "name", wanted, c.sampler.name)
        if (
            c.training.shard != "none"
            or c.sampler.refit_every not in (0, "auto")
            or c.sampler.refit_steps
            or c.sampler.path
        ):
            fail(
                "sampler", "choose_every", "0 with training.shard, refits or a tree from a file", c.sampler.choose_every
            )
        kinds = ("unigram", "tree", "midx", "rff")
        if "unigram" not in c.sampler.candidates or any(n not in kinds for n in c.sampler.candidates):
            fail("sampler", "candidates", f"unigram and others of {', '.join(kinds)}", c.sampler.candidates)
    if c.sampler.name == "in_batch":
        if not c.head.shared:
            fail("head", "shared", 'true or "auto" with the sampler in_batch', c.head.shared)
        if not (needs.draws and needs.excludes_target) or needs.target_log_q or needs.prior:
            fail("head", "loss", "one that masks targets among the draws with the sampler in_batch", c.head.loss)
    if c.sampler.name == "mixture":
        single = [n for n in SAMPLERS if n not in ("mixture", "in_batch")]
        if len(c.sampler.components) < 2 or any(n not in single for n in c.sampler.components):
            wanted = "two or more of " + ", ".join(single)
            fail("sampler", "components", f"{wanted} for a mixture", c.sampler.components)
        if len(c.sampler.weights) != len(c.sampler.components) or any(w <= 0 for w in c.sampler.weights):
            wanted = f"{len(c.sampler.components)} numbers above 0, one for each component"
            fail("sampler", "weights", wanted, c.sampler.weights)
    elif c.sampler.components or c.sampler.weights:
        fail(
            "sampler", "components", "empty unless the sampler is a mixture", c.sampler.components or c.sampler.weights
        )
    if c.sampler.base != "none" and c.sampler.name not in (*MIXED, "in_batch"):
        based = ", ".join(MIXED)
        fail("sampler", "base", f'"auto" or "none" unless the sampler is {based} or in_batch', c.sampler.base)
    inside = c.sampler.name == "tree" and c.sampler.base in ("unigram", "uniform")
    if c.sampler.base != "none" and c.head.stratified and not inside:
        fail("sampler", "base", '"unigram", "uniform" or "none" with head.stratified', c.sampler.base)
    names = c.sampler.components or [c.sampler.name]
    for key in ("refit_every", "refit_steps"):
        value = getattr(c.sampler, key)
        value = 0 if value == "auto" else value  # which never is what this refuses
        if value and "tree" not in names:
            fail("sampler", key, "0 unless the sampler is a tree", value)
        if value and needs.prior:
            fail("sampler", key, f"0 with {named}, whose sampler must stay fixed", value)
        if value and c.sampler.path and c.sampler.features != "hidden":
            fail("sampler", key, '0 with a tree from a file, unless features = "hidden"', value)
    if c.sampler.path and "tree" not in names:
        fail("sampler", "path", "empty unless the sampler is a tree", c.sampler.path)
    per_row = [n for n in names if n in ("bigram", "tree", "quadratic", "rff", "midx", "softmax")]
    if c.head.shared and per_row and needs.prior:
        wanted = f"false with {named} and the sampler {per_row[0]}, whose distribution differs per row"
        fail("head", "shared", wanted, True)
    if c.head.stratified and not (c.head.shared and c.sampler.name in ("tree", "midx") and needs.weighted_draws):
        wanted = f"false with {named}, shared = {shown(c.head.shared)} and the sampler {c.sampler.name}"
        fail(
            "head",
            "stratified",
            f"{wanted}: it requires shared draws of a tree or of midx and a loss over weighted draws",
            True,
        )
    if c.head.unique:
        if c.sampler.name not in ("auto", "uniform", "log_uniform", "unigram", "bigram"):
            wanted = f"false with the sampler {c.sampler.name}: uniform, log_uniform, unigram and bigram have them"
            fail("head", "unique", wanted, c.head.unique)
        if not needs.weighted_draws or needs.target_log_q or not needs.draws:
            fail("head", "unique", f"false with {named}", c.head.unique)
    if c.head.hard:
        if not loss.joins:
            fail("head", "hard", f"0 with {named} (sampled_softmax without smoothing takes them)", c.head.hard)
        if c.head.hard_source == "tree" and c.sampler.name != "tree":
            wanted = f"pool or exact with the sampler {c.sampler.name}, which is not a tree"
            fail("head", "hard_source", wanted, c.head.hard_source)
        if c.head.hard_source in ("tree", "index") and c.training.shard != "none":
            wanted = f"pool or exact with training.shard = {shown(c.training.shard)}"
            fail("head", "hard_source", wanted, c.head.hard_source)
    if c.head.mask_known and not (needs.draws and needs.excludes_target):
        fail("head", "mask_known", f"false with {named}", True)
    if c.data.negatives and (not (needs.draws and needs.excludes_target) or needs.target_log_q or needs.prior):
        fail("data", "negatives", f"empty with {named}", c.data.negatives)
    if c.data.negatives_log_q and not c.data.negatives:
        fail("data", "negatives_log_q", "empty without data.negatives", c.data.negatives_log_q)
    for key, option in LOSS_OPTIONS.items():
        # A key whose default is not "off" may stay in a file whose loss has no use for it.
        default, value = type(c.head)().__dict__[key], getattr(c.head, key)
        if option not in loss.options() and not default and value:
            fail("head", key, f"{shown(default)} with {named}", value)
    if needs.prior and c.sampler.update != "auto":
        fail("sampler", "update", f'"auto" with {named}, whose sampler must stay fixed', c.sampler.update)
    if needs.prior and "bigram" in names:
        wanted = "another with the sampler bigram, whose distribution prediction would need for every context"
        fail("head", "loss", wanted, c.head.loss)
    if c.optimizer.momentum and c.optimizer.name != "sgd":
        fail("optimizer", "momentum", f"0 with {c.optimizer.name}", c.optimizer.momentum)
    if c.optimizer.rowwise and c.optimizer.name != "adagrad":
        fail("optimizer", "rowwise", f"false with {c.optimizer.name}", True)
    if c.training.shard != "none":
        with_shard = f"with training.shard = {shown(c.training.shard)}"
        if c.model.tied:
            why = "the encoder would need rows of the class table that other ranks hold; untie it, or train one process"
            fail("model", "tied", f"false {with_shard}: {why}", True)
    if c.training.average_head and c.training.average == "none":
        fail("training", "average_head", 'false with average = "none"', True)
