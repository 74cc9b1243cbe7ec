"""docs/gpu_model.md is what bench/gpu_model.py writes, and its formulas count what they say."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("gpu_model", ROOT / "bench" / "gpu_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_model"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(model):
    assert (ROOT / "docs" / "gpu_model.md").read_text(encoding="utf-8") == model.page(), "run python bench/gpu_model.py"


def test_the_page_says_that_nothing_was_measured(model):
    assert "**Estimated, not measured.**" in model.page()


def test_a_kernel_takes_the_longer_of_memory_and_arithmetic(model):
    gpu = model.Gpu("x", bandwidth=1e12, fp32=1e12, tensor=1e13, sms=1, clock=1e9, fp64_lanes=2)
    assert model.Work("", 85e9, 0).seconds(gpu) == pytest.approx(0.1)
    assert model.Work("", 85e9, 1.5e12).seconds(gpu) == pytest.approx(2.0)
    assert model.Work("", 85e9, 1.5e12, tensor=True).seconds(gpu) == pytest.approx(0.25)
    step = [model.Work("", 85e9), model.Work("", 85e9, launches=3)]
    assert model.seconds(step, gpu) == pytest.approx(0.2 + 4 * model.GRAPH_LAUNCH)


def test_steps_read_what_they_must(model):
    shape = model.Shape(batch=8, dim=16, classes=1000, samples=5)
    by_name = {work.what: work for work in model.per_row(shape)}
    assert by_name["forward"].bytes == 8 * 6 * 16 * 4 + 3 * 8 * 16 * 4 + 16 * 8 * 6
    assert sum(work.launches for work in model.per_row(shape)) == 9
    assert sum(work.launches for work in model.shared(shape)) == 10
    products = sum(work.flops for work in model.full_softmax(shape) if work.what not in ("log-sum-exp", "softmax"))
    assert products == 4 * 2 * 8 * 1000 * 16
    assert model.chunks(model.Shape(batch=1024)) == 15
    half = model.Shape(batch=8, dim=16, classes=1000, samples=5, size=2)
    assert all(work.tensor for work in model.full_softmax(half) if work.what.startswith(("logits", "gradient")))
    assert sum(work.launches for work in model.shared(half)) == 10


def test_exact_draws_write_no_logits_of_a_16_bit_table(model):
    shape = model.Shape(batch=1024, dim=128, classes=10**6, samples=64)
    wide, half = model.softmax_draws(shape), model.softmax_draws(model.dataclasses.replace(shape, size=2))
    logits = 4 * 1024 * 10**6
    assert sum(work.bytes for work in wide) > 2 * logits > 10 * sum(work.bytes for work in half)
    assert sum(work.launches for work in half) < 10 < sum(work.launches for work in wide)
    gpu = model.Gpu("x", bandwidth=1e12, fp32=1e12, tensor=1e13, sms=1, clock=1e9, fp64_lanes=2)
    assert model.Work("", 0, cached=85e9 * model.L2).seconds(gpu) == pytest.approx(0.1)
    assert model.Work("", 0, 3.5e12, tensor=True, own=True).seconds(gpu) == pytest.approx(0.35 / model.OF_TENSOR_OWN)


def test_distinct_classes_are_those_of_real_draws(model):
    import samplex_cuda as sx

    ids = sx.samplers.LogUniform(1000).sample(None, 200, batch_size=50, key=sx.Key(3)).ids
    found = torch.tensor([len(set(row)) for row in ids.tolist()], dtype=torch.float64)
    assert model.distinct_log_uniform(1000, 200) == pytest.approx(
        float(found.mean()), abs=4 * float(found.std()) / 50**0.5
    )


def test_fp64_bounds_a_draw_where_its_unit_is_narrow(model, monkeypatch):
    monkeypatch.setitem(model.DRAWS, "uniform", (64.0, 4.0))
    consumer = model.Gpu("x", 1e12, 1e12, 1e12, sms=1, clock=1e9, fp64_lanes=2)
    wide = model.Gpu("x", 1e12, 1e12, 1e12, sms=1, clock=1e9, fp64_lanes=64)
    issue, unit = model.draw_seconds("uniform", consumer, batch=1, samples=1)
    assert (issue, unit) == pytest.approx((16e-9, 64e-9))  # four schedulers; 32 lanes over 2
    assert model.draw_seconds("uniform", wide, batch=1, samples=1)[1] == pytest.approx(2e-9)


def test_the_page_on_exact_draws_has_the_same_numbers(model):
    text = (ROOT / "docs" / "samplers" / "exact.md").read_text(encoding="utf-8")
    steps = {name: (function, shape) for name, function, shape in model.STEPS}
    made = [steps[f"exact softmax draws, m = 64{kind}"] for kind in ("", ", bf16")]
    made = [function(shape) for function, shape in made]
    launches = " | ".join(str(sum(work.launches for work in step)) for step in made)
    times = " | ".join(f"{model.seconds(step, model.GPUS[1]) * 1e3:.1f} ms" for step in made)
    assert f"| launches | | | {launches} |" in text
    assert f"| step | | | {times} |" in text
    for name, features in (("kernel tree, m = 64", 128), ("kernel tree, D = 1024", 1024)):
        function, shape = steps[name]
        time = model.micro(model.seconds(function(shape), model.GPUS[1]))
        assert f"{time} with D = {features}" in text
    wide = functools.partial(model.kernel_draws, features=1024)
    for size in (2, 4):
        for other in (model.kernel_draws, wide):
            assert f"{model.even_classes(other, size):,}" in text
