"""What a diagnosis says: recommendations, warnings, tables, plots, JSON."""

from __future__ import annotations

import json
import math
import os
import warnings

import pytest
import torch
from diagnostics_cases import D, make

import samplex_cuda as sx
from samplex_cuda.diagnostics import Diagnosis, Point, SamplerResult, advice, diagnose, timing


# ------------------------------------------------------------------------------------------------ words
def point(m, bias, ms=None, **more):
    return Point(m, ess=1.0, hit_rate=0.0, bias=bias, bias_leading=bias, std=1.0, step_ms=ms, **more)


def table(*found, norm=1.0, samples=0, full=None, **more):
    return Diagnosis(10**5, 64, 256, "sampled_softmax", False, 0, norm, samples, list(found), full, **more)


def test_recommendation_names_the_cheapest_of_equal_bias():
    uniform = SamplerResult("Uniform", "Uniform", points=[point(32, 0.8, 1.0), point(2000, 0.04, 50.0)])
    tree = SamplerResult("Tree", "Tree", points=[point(32, 0.04, 5.0), point(2000, 0.001, 70.0)])
    assert advice.recommend(table(uniform, tree)) == (
        "Tree with m = 32 gives the bias of Uniform with m = 2,000 (4 % of the gradient) at a tenth of the time "
        "(5 against 50 ms per step)."
    )
    # Half the norm, twice the share.
    assert "(8 % of the gradient)" in advice.recommend(table(uniform, tree, norm=0.5))


def test_recommendation_holds_against_what_the_head_does():
    own = SamplerResult("Unigram", "Unigram", own=True, points=[point(64, 0.05, 9.0), point(128, 0.02, 20.0)])
    uniform = SamplerResult("Uniform", "Uniform", points=[point(64, 0.5, 8.0), point(128, 0.25, 19.0)])
    assert advice.recommend(table(uniform, own, samples=64)) == (
        "Keep Unigram with m = 64: bias 5 % of the gradient; no other setting measured here reaches this in clearly "
        "less time."
    )
    better = SamplerResult("Tree", "Tree", points=[point(16, 0.02, 3.0)])
    text = advice.recommend(table(uniform, own, better, samples=64))
    assert text.startswith(
        "Tree with m = 16 has 0.40 of the bias of Unigram with m = 64 (2 % of the gradient against 5 %)"
    )
    assert "at a third of the time (3 against 9 ms per step)." in text
    assert text.endswith("Uniform would need about m = 1,600 for the same bias.")


def test_recommendation_names_what_is_better_for_the_same_cost():
    uniform = SamplerResult("Uniform", "Uniform", points=[point(16, 0.5, 2.0), point(64, 0.4, 4.0)])
    tree = SamplerResult("Tree", "Tree", points=[point(16, 0.35, 3.0), point(64, 0.1, 4.5), point(256, 0.01, 9.0)])
    text = advice.recommend(table(uniform, tree))
    assert text.startswith("Tree with m = 16 gives the bias of Uniform with m = 64 (35 % of the gradient)")
    assert "At about the same cost as Uniform with m = 64, Tree with m = 64 (4.5 ms) has a bias of 10 %." in text


def test_recommendation_without_times_counts_samples_and_leaves_oracles_out():
    uniform = SamplerResult("Uniform", "Uniform", points=[point(16, 0.5), point(64, 0.125)])
    oracle = SamplerResult("Softmax", "Softmax", points=[point(16, 0.0)])
    tree = SamplerResult("Tree", "Tree", points=[point(16, 0.12)])
    assert "Keep Uniform with m = 64" in advice.recommend(table(uniform, oracle))
    assert (
        "Tree with m = 16 gives the bias of Uniform with m = 64 (12 % of the gradient) with a quarter of the samples"
        in (advice.recommend(table(uniform, oracle, tree)))
    )


def test_recommendation_full_softmax_and_large_bias():
    uniform = SamplerResult("Uniform", "Uniform", points=[point(16, 0.5, 2.0), point(64, 0.4, 4.0)])
    text = advice.recommend(table(uniform, full=1.5))
    assert text.startswith("The full softmax takes 1.5 ms per step here")
    assert "full softmax" not in advice.recommend(table(uniform, full=40.0))
    assert "The bias is still large; the lowest measured is 40 %, Uniform with m = 64." in text


def test_a_noisy_bias_is_no_recommendation():
    uniform = SamplerResult("Uniform", "Uniform", points=[point(64, 0.05, 4.0)])
    lucky = SamplerResult("Tree", "Tree", points=[point(8, 0.0, 1.0, bias_error=0.01, measured=1.0)])
    assert "Keep Uniform" in advice.recommend(table(uniform, lucky))
    assert advice.recommend(table()) == "Nothing was measured."


def test_warnings():
    uniform = SamplerResult("Uniform", "Uniform", points=[point(16, 0.4), point(64, 0.2)])
    bad = SamplerResult("Tree", "Tree", points=[point(16, 0.5), point(64, 0.45)])
    assert advice.warn(table(uniform, bad)) == [
        "Tree: worse than Uniform at every m (bias 45 % of the gradient against 20 % at m = 64)."
    ]
    late = SamplerResult("Tree", "Tree", points=[point(16, 0.1), point(64, 0.45)])
    assert "at m = 64 (" in advice.warn(table(uniform, late))[0]
    good = SamplerResult("Tree", "Tree", points=[point(16, 0.1), point(64, 0.05)])
    assert advice.warn(table(uniform, good)) == []
    gaps = SamplerResult("Unigram", "Unigram", missing=0.125, points=[])
    assert "it never draws classes that hold 12 % of the softmax" in advice.warn(table(uniform, gaps))[0]
    old = SamplerResult("Quadratic", "Quadratic", own=True, drift=0.2, stale_rows=0.5, stale_steps=7)
    assert "stale, 7 training steps behind: 50 % of its class rows" in advice.warn(table(uniform, old))[0]
    assert "head.update_sampler()" in advice.warn(table(uniform, old))[0]
    few = table(uniform)
    few.rows = 8
    assert advice.warn(few) == ["Only 8 rows were examined; use a few hundred for reliable results."]


def test_a_sampler_worse_than_uniform_is_told():
    """End to end: a distribution that avoids what the softmax likes, and one that never draws it."""
    head, _, _ = make(classes=200, bias=True)
    with torch.no_grad():
        head.weight.mul_(0.1)
        head.bias.copy_(torch.linspace(3, -3, 200))
    h = torch.randn(64, D)
    wrong = sx.samplers.Unigram(head.bias.detach().neg().exp())
    never = sx.samplers.Unigram(torch.arange(200).clamp(max=20) // 20)
    found = diagnose(head, h, candidates={"wrong": wrong, "never": never}, num_samples=(64, 256), timed=False)
    text = "\n".join(found.warnings)
    assert "wrong: worse than Uniform at every m" in text
    assert "never: it never draws classes that hold" in text
    assert math.isinf(found.samplers[2].kl)
    assert "warning: wrong" in found.table()


def test_noise_is_not_worse_than_uniform():
    """The same sampler under another name, where the bias is measured: they differ by noise, often by 5 %."""
    different, twin = 0, {"twin": sx.samplers.Unigram(torch.ones(2000))}
    for seed in range(3):
        torch.manual_seed(seed)
        head = sx.SampledClassifier(8, 2000, sx.samplers.Uniform(2000), num_samples=32)
        with torch.no_grad():
            head.weight.mul_(8)
        found = diagnose(head, torch.randn(128, 8), candidates=twin, num_samples=(256, 1024), timed=False, seed=seed)
        for a, b in zip(found.samplers[1].points, found.samplers[0].points, strict=True):
            assert a.measured > 0.2
            assert abs(a.excess) < 4 * a.excess_error
            different += a.bias > 1.05 * b.bias
        assert not any("worse" in text for text in found.warnings), found.warnings
    assert different > 0


def test_excess_is_the_bias_beyond_uniform_in_the_same_rows():
    head, _, _ = make(classes=200, spread=0.7)
    other = {"other": sx.samplers.LogUniform(200), "Uniform": sx.samplers.Uniform(200)}
    found = diagnose(head, torch.randn(48, D), candidates=other, num_samples=(2048, 4096), timed=False)
    for a, b in zip(found.samplers[0].points, found.samplers[1].points, strict=True):
        assert (a.measured, b.measured) == (0, 0)
        assert a.excess == pytest.approx(a.bias**2 - b.bias**2, rel=1e-9)
        assert a.excess_error == 0
        assert b.excess is None


def test_strata_are_told():
    flat = SamplerResult("Uniform", "Uniform", points=[point(16, 0.4)])
    tree = SamplerResult("Tree", "Tree", stratified=True, points=[point(16, 0.3)])
    assert advice.warn(table(flat, tree)) == [
        "Tree: draws are stratified; bias and std are those of independent draws."
    ]


def test_a_head_that_draws_in_strata():
    torch.manual_seed(0)
    x, y = torch.randn(300, D), torch.randint(40, (300,))
    tree = sx.samplers.Tree.fit(x, y, num_classes=40, dim=3, progress=False)
    calls = []
    sample = tree.sample
    tree.sample = lambda *a, **k: calls.append((k.get("shared", False), k.get("stratified", False))) or sample(*a, **k)
    head = sx.SampledClassifier(D, 40, tree, 8, shared=True, stratified=True)
    found = diagnose(head, x[:40], y=y[:40], num_samples=(8,))
    assert [(law.name, law.stratified) for law in found.samplers[:2]] == [("Uniform", False), ("Tree", True)]
    assert (True, True) in calls  # what is timed is what the head does
    assert any(text.startswith("Tree: draws are stratified") for text in found.warnings)
    head.stratified = False
    calls.clear()
    found = diagnose(head, x[:40], y=y[:40], num_samples=(8,))
    assert [law.name for law in found.samplers if law.stratified] == [
        "Tree, stratified"
    ]  # offered, not what the head does
    assert not any(
        law.stratified for law in diagnose(head, x[:40], y=y[:40], candidates=[tree], num_samples=(8,)).samplers
    )


def test_the_first_round_does_not_count(monkeypatch):
    """Also a long one: what torch does once in a process is no part of a step."""
    now, found = [0.0], {}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "_used", lambda: None)

    def job(name, *seconds):
        runs = []

        def run():
            now[0] += seconds[min(len(runs), len(seconds) - 1)]
            runs.append(1)

        return timing.Job(run, lambda median, error: found.update({name: (median, error, len(runs))}), 2.0)

    assert timing.measure([job("a", 9.0, 0.2, 0.1, 0.3), job("b", 9.0, 3.0)], torch.device("cpu")) is None
    assert found["a"] == (pytest.approx(400), pytest.approx(200), 4)  # three that count: enough where they are long
    assert found["b"] == (pytest.approx(6000), 0.0, 4)
    found.clear()
    timing.measure([job("a", 0.001)], torch.device("cpu"))
    assert found["a"][2] == 16


def test_medians_do_not_follow_a_busy_moment():
    assert timing.spread([1.0, 1.1, 0.9, 1.0, 30.0]) == (1.0, pytest.approx(0.05, abs=0.06))
    assert timing.spread([2.0]) == (2.0, 0.0)


def test_other_processes_are_counted(monkeypatch):
    cores = os.cpu_count()
    used, now = iter([(100.0, 5.0), (100.0 + 10.0 * cores, 15.0)]), iter([0.0, 10.0])
    monkeypatch.setattr(timing, "_used", lambda: next(used))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: cores)
    # All cores are used, one of them by us: the others lack for our threads.
    assert timing.Load().lacking() == pytest.approx(cores - 1)


def timed(m, bias, ms, error=0.0):
    return point(m, bias, ms, step_error=error)


def test_no_recommendation_inside_the_noise():
    own = SamplerResult("Unigram", "Unigram", own=True, points=[timed(64, 0.3, 10.0, 1.0)])
    near = SamplerResult("Tree", "Tree", points=[timed(64, 0.3, 8.0, 1.0)])
    sure = SamplerResult("Tree", "Tree", points=[timed(64, 0.3, 3.0, 1.0)])
    found = table(own, near)
    found.head_samples = 64
    assert advice.recommend(found).startswith("Keep Unigram with m = 64")
    found = table(own, sure)
    found.head_samples = 64
    assert advice.recommend(found).startswith("Tree with m = 64 gives the bias of Unigram")
    found.lacking = 1.2
    said = advice.recommend(found)
    assert said.startswith("No recommendation: 1.2 cores were missing")
    assert "Tree" not in said
    assert any("1.2 cores were missing" in text for text in advice.warn(found))


def test_what_the_times_do_not_tell_apart_is_told_by_bias():
    own = SamplerResult("Unigram", "Unigram", own=True, points=[timed(64, 0.3, 50.0, 1.0)])
    for fast, slow in ((3.0, 3.5), (3.5, 3.0)):  # noise that swaps them
        a = SamplerResult("A", "Tree", points=[timed(64, 0.2, fast, 0.4)])
        b = SamplerResult("B", "Tree", points=[timed(64, 0.1, slow, 0.4)])
        found = table(own, a, b)
        found.head_samples = 64
        assert advice.recommend(found).startswith("B with m = 64")


def test_shared_draws_are_proposed_where_they_are_many_enough():
    own = SamplerResult("Unigram", "Unigram", own=True, points=[timed(64, 0.3, 50.0, 1.0)])
    few = SamplerResult("Unigram, shared", "Unigram", shared=True, points=[timed(64, 0.3, 1.0)])
    many = SamplerResult("Unigram, shared", "Unigram", shared=True, points=[timed(64, 0.3, 1.0), timed(1024, 0.1, 5.0)])
    found = table(own, few)
    found.head_samples = 64
    assert advice.recommend(found).startswith("Keep Unigram")
    found = table(own, many)
    found.head_samples = 64
    assert advice.recommend(found).startswith(
        "Unigram, shared with m = 1,024 has a third of the bias of Unigram with m"
    )


def test_candidates_are_drawn_from_in_other_ways_too():
    torch.manual_seed(0)
    x, y = torch.randn(300, D), torch.randint(40, (300,))
    tree = sx.samplers.Tree.fit(x, y, num_classes=40, dim=3, progress=False)
    head = sx.SampledClassifier(D, 40, tree, 8)
    found = diagnose(head, x[:40], y=y[:40], num_samples=(8,), class_counts=torch.arange(40))
    laws = {law.name: law for law in found.samplers}
    assert {"Tree, shared", "Tree, stratified", "Unigram, shared"} <= set(laws)
    assert [p.num_samples for p in laws["Unigram, shared"].points] == [128]
    assert (laws["Tree"].shared, laws["Tree, shared"].shared, laws["Tree, stratified"].stratified) == (
        False,
        True,
        True,
    )
    assert all(p.step_ms > 0 for law in found.samplers for p in law.points)
    assert [law.name for law in found.samplers if law.own] == ["Tree"]
    # The numbers of a way are those of a head that draws so.
    other = sx.SampledClassifier(D, 40, tree, 8, shared=True)
    other.load_state_dict(head.state_dict())
    same = diagnose(other, x[:40], y=y[:40], num_samples=(128,), class_counts=torch.arange(40), timed=False)
    here = next(law for law in same.samplers if law.name == "Unigram").points[0]
    assert laws["Unigram, shared"].points[0].bias == pytest.approx(here.bias)
    assert "Unigram, per row" in [law.name for law in same.samplers]


def test_warnings_of_samplers_are_kept():
    head, _, _ = make(classes=300, spread=2.0, bias=False)
    sharp = sx.samplers.RandomFourier(head.weight.detach(), num_features=16, nu=4.0, key=sx.Key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = diagnose(head, torch.randn(40, D), candidates=[sharp], num_samples=(4,), timed=False)
    assert any("kernel mass is negative" in text for text in found.warnings)


# ------------------------------------------------------------------------------------------------ output
def test_json_round_trip(tmp_path):
    head, h, _ = make(classes=60)
    never = sx.samplers.Unigram(torch.arange(60) // 20)  # an infinite KL
    found = diagnose(head, h, candidates=[never], num_samples=(4, 8))
    text = json.dumps(found.as_dict(), allow_nan=False)
    again = Diagnosis.from_dict(json.loads(text))
    assert again == found
    assert math.isinf(again.samplers[1].kl)
    found.save(tmp_path / "d.json")
    assert Diagnosis.load(tmp_path / "d.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]


def test_table_and_show(capsys, monkeypatch):
    head, h, _ = make(classes=60)
    found = diagnose(head, h, num_samples=(4, 8), timed=False)
    text = found.table()
    assert text.startswith("60 classes, 3 features, 5 rows; targets excluded")
    for name in ("Uniform (head)", "Quadratic", "RandomFourier", "bias %", "KL", found.recommendation):
        assert name in text
    assert "step ms" not in text
    assert max(len(line) for line in text.splitlines()[:12]) < 120
    found.show()
    assert "Quadratic" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    found.show()
    assert capsys.readouterr().out == text + "\n"


def test_plot(tmp_path, monkeypatch):
    head, h, _ = make(classes=60)
    for timed in (False, True):
        found = diagnose(head, h, num_samples=(4, 8), timed=timed)
        path = tmp_path / f"{timed}.png"
        found.plot(path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["False.png", "True.png"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib must be installed, e.g. pip install 'samplex-cuda\[demo\]'"):
        found.plot(tmp_path / "x.png")


def test_labels_of_the_plot_are_numbers():
    label = sx.diagnostics.report._between
    assert [label(30)(value, None) for value in (0.2, 30.0, 50.0)] == ["0.2", "", "50"]
    assert [label(3)(value, None) for value in (0.2, 30.0)] == ["0.2", "30"]
    assert label(1000)(20.0, None) == ""


def test_progress_is_told():
    head, h, _ = make(classes=60)
    lines = []
    diagnose(head, h, num_samples=(4,), on_progress=lines.append)
    assert lines[0] == "softmax of 5 rows over 60 classes"
    assert lines[-1] == "times"


def test_logits_of_thousands_stay_numbers():
    """The target and all draws of a row have probability 0 in float64; their shares are still defined."""
    torch.manual_seed(0)
    head = sx.SampledClassifier(8, 50, sx.samplers.Uniform(50), num_samples=4)
    h, y = 3 * torch.randn(32, 8), torch.arange(32)
    with torch.no_grad():
        head.weight.mul_(1000.0)
    found = diagnose(head, h, y=y, num_samples=(4,), timed=False)
    for law in found.samplers:
        (point,) = law.points
        assert 0 <= point.bias <= 1, law.name
        assert 0 <= point.std <= 1, law.name
        assert 0 <= point.bias_error < 0.1, law.name
    (uniform,) = found.samplers[0].points  # of the 49 classes besides the target one has all of the softmax
    assert uniform.ess == pytest.approx(4 / 49, rel=1e-6)
    assert uniform.leak == pytest.approx(1 - 4 / 49, rel=1e-6)
    json.dumps(found.as_dict(), allow_nan=False)
