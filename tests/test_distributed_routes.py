"""The routes of a sharded step: the numbers of one process, the bytes of the model, and which route is taken."""

from __future__ import annotations

import pytest
import torch
from rank_cases import CLASSES
from test_distributed import by_row, compare_with_one_process

import samplex_cuda as sx
from samplex_cuda.distributed.routes import (
    ROUTES,
    Sizes,
    bytes_by_route,
    bytes_sent,
    crossover,
    resolve_route,
)
from samplex_cuda.distributed.samplers import ShardedUnigram

ONLINE = {
    "plain": ("plain", {}),
    "sgd": ("plain", {"rule": "sgd"}),
    "unfused": ("plain", {"fused": False}),
    "spread": ("plain", {"order": "spread"}),
    "no bias": ("no bias", {}),
    "shared": ("shared", {}),
    "absolute": ("absolute", {}),
    "scaled sum": ("scaled sum", {}),
    "bf16": ("bf16", {}),
    "fp64": ("fp64", {}),
    "tree": ("tree", {}),
    "several targets": ("plain", {"targets": 3}),
    "weights": ("plain", {"weights": True}),
    "class weights": ("plain", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}}),
    "unique shared": ("unique shared", {}),
    "mixed negatives": ("mixed negatives", {}),
    "class weights and targets": ("plain", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}, "targets": 3}),
}


@pytest.mark.parametrize("case", ONLINE)
def test_online_softmax_is_that_of_one_process(ranks, case):
    name, options = ONLINE[case]
    for world in (1, 2, 3, 4) if case == "plain" else (1, 3):
        check(ranks.run(world, "train", name, {**options, "route": "online_softmax"}), name, options)


def check(found, name, options):
    """Every rank has the same loss; all of it is what one process has."""
    for rank in found[1:]:
        assert [a.item() for a in rank["losses"]] == [a.item() for a in found[0]["losses"]]
    whole = {**found[0], "grads": []}
    for step in range(4):
        whole["grads"].append((torch.arange(by_row(found, step).shape[0]), by_row(found, step)))
    rows = [rank["rows"] for rank in found]
    for answer in ("topk", "log_prob"):
        parts = [rank[answer] for rank in found]
        whole[answer] = join(parts, rows) if answer == "log_prob" else tuple(
            join([part[i] for part in parts], rows) for i in range(2)
        )  # fmt: skip
    compare_with_one_process(name, options, whole)


def join(parts, rows):
    made = torch.empty(sum(map(len, rows)), *parts[0].shape[1:], dtype=parts[0].dtype)
    for part, own in zip(parts, rows, strict=True):
        made[own] = part
    return made


# ------------------------------------------------------------------------------------------------ rows travel
SHARED = {
    "plain": ("shared", {}),
    "sgd": ("shared", {"rule": "sgd"}),
    "unfused": ("shared", {"fused": False}),
    "spread": ("shared", {"order": "spread"}),
    "no bias": ("no bias", {"head": {"shared": True}}),
    "smoothed": ("smoothed", {"head": {"shared": True}}),
    "nce": ("nce", {"head": {"shared": True}}),
    "one-vs-each": ("one-vs-each", {"head": {"shared": True}}),
    "unique": ("unique shared", {}),
    "bf16": ("bf16", {"head": {"shared": True}}),
    "several targets": ("shared", {"targets": 3}),
    "weights": ("shared", {"weights": True}),
    "class weights": ("shared", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}}),
}


@pytest.mark.parametrize("case", SHARED)
def test_shared_rows_are_those_of_one_process(ranks, case):
    name, options = SHARED[case]
    for world in (1, 2, 3, 4) if case == "plain" else (1, 3):
        check(ranks.run(world, "train", name, {**options, "route": "shared_rows"}), name, options)


OWN = {
    "plain": ("plain", {}),
    "sgd": ("plain", {"rule": "sgd"}),
    "unfused": ("plain", {"fused": False}),
    "spread": ("plain", {"order": "spread"}),
    "no bias": ("no bias", {}),
    "smoothed": ("smoothed", {}),
    "scaled sum": ("scaled sum", {}),
    "negative sampling": ("negative sampling", {}),
    "nce": ("nce", {}),
    "one-vs-each": ("one-vs-each", {}),
    "bf16": ("bf16", {}),
    "fp64": ("fp64", {}),
    "tree": ("tree", {}),
    "unique": ("unique", {}),
    "several targets": ("plain", {"targets": 3}),
    "weights": ("plain", {"weights": True}),
    "class weights": ("plain", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}}),
}


@pytest.mark.parametrize("case", OWN)
def test_rows_to_queries_are_those_of_one_process(ranks, case):
    """Each rank draws for its own rows alone, what one process would draw for them."""
    name, options = OWN[case]
    for world in (1, 2, 3, 4) if case == "plain" else (1, 3):
        check(ranks.run(world, "train", name, {**options, "route": "rows_to_queries"}), name, options)


# ------------------------------------------------------------------------------------------------ bytes
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("route", "shared"), [("rows_to_queries", False), ("shared_rows", True)])
def test_bytes_of_the_rows_are_those_of_the_model(ranks, route, shared, world):
    """The mean of the ranks: how many of its classes per rank holds itself is a matter of chance."""
    found = ranks.run(world, "route_cases:sent", route, shared, 5000, 64, 100, 128)
    models = [bytes_sent(route, Sizes(world, 128, 100, 64, unique)) for _, unique in found]
    assert sum(sent for sent, _ in found) == pytest.approx(sum(models), rel=0.05)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("route", ["summed_logits", "online_softmax"])
def test_bytes_of_the_queries_are_those_of_the_model(ranks, route, world):
    for sent, _ in ranks.run(world, "route_cases:sent", route, False, 5000, 64, 100, 32):
        assert sent == pytest.approx(bytes_sent(route, Sizes(world, 32, 100, 64)), rel=0.05)


# ------------------------------------------------------------------------------------------------ sizes that are fixed
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("route", "name"), [("rows_to_queries", "plain"), ("shared_rows", "shared")])
def test_fixed_sizes_give_the_same_step(ranks, route, name, world):
    """The way of a GPU, on CPU tensors: losses and tables as with sizes that are counted."""
    for counted, fixed in ranks.run(world, "route_cases:fixed_and_counted", route, name):
        for mine, other in zip(fixed, counted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_too_many_rows_for_the_room_give_a_nan_and_no_update(ranks):
    for loss, same in ranks.run(2, "route_cases:overflowing"):
        assert loss.isnan()
        assert same


# ------------------------------------------------------------------------------------------------ the choice
def head_of(draws=6, dim=8, **options):
    return sx.SampledClassifier(dim, 100, sx.samplers.Uniform(100), draws, **options)


def test_auto_takes_what_sends_least():
    assert resolve_route("auto", head_of(draws=8), 4, 32) == "summed_logits"
    assert resolve_route("auto", head_of(draws=9), 4, 32) == "online_softmax"
    assert resolve_route("auto", head_of(draws=9), 1, 32) == "summed_logits"
    assert resolve_route("auto", head_of(draws=6), 4, 32) == "rows_to_queries"
    smoothed = head_of(draws=9, loss=sx.losses.SampledSoftmax(label_smoothing=0.1))
    assert resolve_route("auto", smoothed, 4, 32) == "summed_logits"
    assert resolve_route("auto", head_of(draws=9, loss="nce"), 4, 32) == "summed_logits"
    # Few draws and many ranks: rows travel. Few shared draws and many queries, too.
    assert resolve_route("auto", head_of(draws=5), 64, 32) == "rows_to_queries"
    assert resolve_route("auto", head_of(draws=5), 64, 32, balanced=False) == "summed_logits"
    assert resolve_route("auto", head_of(draws=5, shared=True), 64, 32) == "shared_rows"
    assert resolve_route("auto", head_of(draws=5, shared=True), 64, None) == "summed_logits"
    shared = head_of(draws=40, dim=128, shared=True)
    for world in (2, 3, 4, 16):
        for batch in (1, 8, 64):
            sizes = Sizes(world, batch, 40, 128)
            others = [bytes_sent(name, sizes) for name in ("summed_logits", "shared_rows")]
            wanted = "summed_logits" if others[0] <= others[1] else "shared_rows"
            assert resolve_route("auto", shared, world, batch) == wanted


# Where a route begins to send fewer bytes than another, by hand from the formulas of docs/scale.md.
CROSSOVERS = [
    ("online_softmax", "summed_logits", "draws", {}, 2),  # 24 < 8 + 8 (m + 1)
    ("summed_logits", "replicate", "draws", {}, 130),  # 8 d + 8 + 8 (m + 1) < 4 d + 12 (m + 1)
    ("online_softmax", "replicate", "draws", {}, 44),  # 8 d + 24 < 4 d + 12 (m + 1)
    ("replicate", "summed_logits", "dim", {}, 64),  # the same the other way round: d > m - 1
    # (m + 1) (8 d + 8) / (8 d + 8 + 8 (m + 1)) = 5160 / 1072 = 4.8
    ("rows_to_queries", "summed_logits", "world", {"draws": 4}, 5),
    ("rows_to_queries", "summed_logits", "world", {}, 44),  # 67080 / 1552 = 43.2
    ("rows_to_queries", "online_softmax", "world", {}, 65),  # 67080 / 1048 = 64.01
    ("rows_to_queries", "online_softmax", "world", {"unique": 0.5}, 33),
    ("rows_to_queries", "replicate", "world", {}, 52),  # 67080 / 1292 = 51.9
    ("shared_rows", "summed_logits", "batch", {"world": 4}, 26),  # 16 m d / 4 = 32768 < (1552 - 258) B
    ("shared_rows", "online_softmax", "batch", {"world": 4}, 42),  # (1048 - 258) B
    ("shared_rows", "replicate", "batch", {"world": 4}, 32),  # (1292 - 258) B
    ("shared_rows", "summed_logits", "world", {"batch": 8}, 12),  # (16 m d + 1032 B) / (1552 B) = 11.2
]


@pytest.mark.parametrize(("route", "other", "field", "given", "wanted"), CROSSOVERS)
def test_where_a_route_begins_to_send_less(route, other, field, given, wanted):
    sizes = Sizes(world=4, batch=64, draws=64, dim=128)._replace(**given)
    found = crossover(route, other, sizes, field)
    rest = {name: value for name, value in sizes._asdict().items() if name != field}
    print(f"{route} sends less than {other} from {field} = {found} on ({rest})")
    assert found == wanted
    for value, less in ((found, True), (found - 1, False)):
        at = sizes._replace(**{field: value})
        assert (bytes_sent(route, at) < bytes_sent(other, at)) == less
        assert list(bytes_by_route(at)).index(route) < list(bytes_by_route(at)).index(other) or not less


def test_bytes_of_tables_that_fit_everywhere():
    """What `replicate` sends is compared, too, though no sharded head can take it."""
    few = bytes_by_route(Sizes(world=8, batch=256, draws=10, dim=128))
    assert few["replicate"] == 7 * 256 * (4 * 128 + 12 * 11)
    assert few["replicate"] < min(few["summed_logits"], few["online_softmax"], few["rows_to_queries"])
    assert list(few.values()) == sorted(few.values())
    many = bytes_by_route(Sizes(world=8, batch=256, draws=500, dim=128))
    assert many["replicate"] > many["online_softmax"]
    assert crossover("online_softmax", "online_softmax", Sizes(8, 256, 500, 128), "batch") is None
    with pytest.raises(ValueError, match=r"bytes_sent: route must be one of summed_logits, .*replicate"):
        bytes_sent("shortest", Sizes(8, 256, 500, 128))


def test_a_route_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="loss must be SampledSoftmax without label smoothing, got NCE"):
        resolve_route("online_softmax", head_of(loss="nce"), 4, 32)
    with pytest.raises(ValueError, match="loss must not keep a number per example"):
        resolve_route("rows_to_queries", head_of(loss=sx.losses.AugmentReduce(num_examples=9)), 4, 32)
    with pytest.raises(ValueError, match="head must have normalize=False and a corrected loss"):
        resolve_route("online_softmax", head_of(normalize=True), 4, 32)
    with pytest.raises(ValueError, match="head must have normalize=False and a corrected loss"):
        resolve_route("rows_to_queries", head_of(loss=sx.losses.SampledSoftmax(corrected=False)), 4, 32)
    with pytest.raises(ValueError, match="learn_scale must be False, got True"):
        resolve_route("rows_to_queries", head_of(learn_scale=True), 4, 32)
    in_batch = sx.SampledClassifier(8, 100, sx.samplers.InBatch(100), shared=True)
    with pytest.raises(ValueError, match="sampler must draw without the targets of the batch, got InBatch"):
        resolve_route("shared_rows", in_batch, 4, 32)
    assert resolve_route("online_softmax", in_batch, 4, 32) == "online_softmax"
    with pytest.raises(ValueError, match="shared must be True, got False"):
        resolve_route("shared_rows", head_of(), 4, 32)
    with pytest.raises(ValueError, match='order must be "spread" on a GPU'):
        resolve_route("rows_to_queries", head_of(), 4, 32, balanced=False)
    with pytest.raises(ValueError, match="route must be one of auto, summed_logits"):
        resolve_route("shortest", head_of(), 4, 32)
    assert list(ROUTES) == ["summed_logits", "online_softmax", "rows_to_queries", "shared_rows"]


def test_known_positives_need_the_reference(ranks):
    positives = (torch.arange(13), torch.arange(12))
    for message in ranks.run(2, "route_cases:message", {"route": "online_softmax"}, {"positives": positives}):
        assert 'positives must be None with route="online_softmax"' in message
    own = sx.Negatives(torch.arange(5))
    for message in ranks.run(2, "route_cases:message", {"route": "rows_to_queries"}, {"negatives": own}):
        assert 'negatives must be None with route="rows_to_queries"' in message
    for message in ranks.run(2, "route_cases:message", {"route": "online_softmax"}, {"target_weight": torch.ones(12)}):
        assert 'target_weight must be None with route="online_softmax"' in message


def test_hard_negatives_need_the_reference(ranks):
    hard = torch.arange(12).unsqueeze(1)
    for message in ranks.run(2, "route_cases:message", {"route": "online_softmax"}, {"hard": hard}):
        assert 'hard must be None with route="online_softmax"' in message


def test_a_loss_that_is_changed_must_fit_the_route(ranks):
    for message in ranks.run(2, "route_cases:message", {"route": "online_softmax"}, {"loss": "nce"}):
        assert "loss must be SampledSoftmax without label smoothing, got NCE" in message


@pytest.mark.parametrize("route", ["rows_to_queries", "shared_rows"])
def test_sharded_samplers_need_a_route_on_which_all_ranks_draw(route):
    """Where each rank draws for its own rows, a sampler spread over the ranks would wait for the others."""
    shared = route == "shared_rows"
    head = sx.SampledClassifier(8, 100, sx.samplers.Unigram(torch.ones(100)), num_samples=4, shared=shared)
    spread = object.__new__(ShardedUnigram)
    assert resolve_route(route, head, 4, 64) == route
    with pytest.raises(ValueError, match="sampler must be replicated, got ShardedUnigram"):
        resolve_route(route, head, 4, 64, sampler=spread)
    assert resolve_route("auto", head, 4, 64, sampler=spread) == "summed_logits"
