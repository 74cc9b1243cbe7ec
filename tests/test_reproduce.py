"""`samplex reproduce`: the frame with a made-up paper, then every paper at its smallest size."""

from __future__ import annotations

import html.parser
import json
import sys
import types

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from cli_cases import one_thread, samplex  # noqa: F401  the first is a fixture of every test

from samplex_cuda import reproduce
from samplex_cuda.reproduce import report

PNG = b"\x89PNG\r\n\x1a\n"


def fake_paper(run):
    module = types.ModuleType("samplex_cuda.reproduce.kernel")
    module.TITLE, module.PAPER, module.run = "A <made-up> paper", "Nobody & No one, 2020", run
    return module


def small_run(r):
    r.claim("sizes", "n | 10", "n = 9", holds=False, note="one less", at_any_size=True)
    r.claim("draws", "fair", "fair", holds=True)
    r.claim("weather", "fine", "unknown")
    r.deviation("Eq. 1 is corrected.")
    r.deviation("Eq. 1 is corrected.")
    r.table("Losses", ["method", "loss"], [["a<b", 0.123456], ["c", float("nan")]], note="lower is better")
    r.text("A paragraph with `code`.\n\n- one\n- two")
    r.value("curve", torch.arange(3.0))
    r.value("drawn", float(torch.rand(())))
    with r.progress("work", 2) as step:
        step()
        step(1)
    with r.figure("headline", "A curve", "what it shows") as figure:
        figure.add_subplot().plot([1, 2], [3, 4])


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(sys.modules, "samplex_cuda.reproduce.kernel", fake_paper(small_run))


class Page(html.parser.HTMLParser):
    """Tags of a page; every one that is opened must be closed."""

    VOID = ("meta", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_decl(self, decl):
        assert decl == "doctype html"


def check_page(text):
    page = Page(text)
    for tag, attrs in page.seen:
        # Nothing is fetched: pictures are inside, links of the page itself lead into it.
        assert tag not in ("script", "link", "iframe")
        assert attrs.get("src", "data:").startswith("data:image/png;base64,") or "src" not in attrs
    assert "url(" not in text
    assert any(attrs.get("name") == "viewport" for _, attrs in page.seen)
    return page


# ------------------------------------------------------------------------------------------------ the frame
def test_run_folder(fake, tmp_path):
    result = reproduce.run_paper("kernel", tmp_path, quick=True, seed=3)
    folder = tmp_path / "kernel"
    assert sorted(path.name for path in folder.iterdir()) == ["headline.png", "report.md", "results.json"]
    found = json.loads((folder / "results.json").read_text())
    assert found == result.found
    assert (found["size"], found["seed"]) == ("quick", 3)
    assert found["values"]["curve"] == [0, 1, 2]
    assert [claim["holds"] for claim in found["claims"]] == [False, True, None]
    assert found["deviations"] == ["Eq. 1 is corrected."]
    assert (folder / "headline.png").read_bytes().startswith(PNG)
    text = (folder / "report.md").read_text()
    assert "| sizes | n \\| 10 | n = 9 (one less) | **no** |" in text
    assert "| a<b | 0.1235 |" in text
    assert "| c | \u2013 |" in text
    assert "![A curve](headline.png)" in text
    assert "- Eq. 1 is corrected." in text


def test_seed_fixes_what_is_drawn(fake, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn = [reproduce.run_paper("kernel", tmp_path, seed=s).found["values"]["drawn"] for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(before, torch.get_rng_state())


def test_a_second_run_replaces_the_first(fake, monkeypatch, tmp_path):
    reproduce.run_paper("kernel", tmp_path)

    def other(r):
        with r.figure("other", "Another") as figure:
            figure.add_subplot()

    monkeypatch.setitem(sys.modules, "samplex_cuda.reproduce.kernel", fake_paper(other))
    (tmp_path / "kernel" / "mine.png").write_bytes(PNG)
    reproduce.run_paper("kernel", tmp_path)
    names = sorted(path.name for path in (tmp_path / "kernel").iterdir())
    assert names == ["mine.png", "other.png", "report.md", "results.json"]


def test_a_failed_run_leaves_the_older_one(fake, monkeypatch, tmp_path):
    reproduce.run_paper("kernel", tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "kernel").iterdir()}

    def fails(r):
        small_run(r)
        raise RuntimeError("in the middle")

    monkeypatch.setitem(sys.modules, "samplex_cuda.reproduce.kernel", fake_paper(fails))
    with pytest.raises(RuntimeError, match="in the middle"):
        reproduce.run_paper("kernel", tmp_path, seed=9)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "kernel").iterdir()}


def test_sizes_and_data(tmp_path):
    (tmp_path / "eurlex4k").mkdir()
    r = reproduce.Run("kernel", tmp_path, data=tmp_path)
    assert [r.scale(quick=1, default=2, full=3), r.folder("eurlex4k")] == [2, tmp_path / "eurlex4k"]
    assert r.deviations == []
    assert r.folder("imdb") is None
    assert r.deviations == ["The part on imdb was left out: the folder of --data has no imdb/."]
    with pytest.raises(ValueError, match="full and quick must not both be True"):
        reproduce.Run("kernel", tmp_path, full=True, quick=True)
    with pytest.raises(ValueError, match="every row must have 2 cells"):
        r.table("t", ["a", "b"], [[1, 2], [3]])


def test_index(fake, tmp_path):
    reproduce.run_paper("kernel", tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text("[1, 2")  # of something else: left out
    text = reproduce.write_index(tmp_path).read_text()
    page = check_page(text)
    assert "A &lt;made-up&gt; paper" in text
    assert "a&lt;b" in text
    assert "1 of 2 statements hold here" in text
    assert sum(tag == "img" for tag, _ in page.seen) == 1
    assert [tag for tag, _ in page.seen].count("section") == 1
    assert "<li>one</li>" in text


# ------------------------------------------------------------------------------------------------ the command
def test_command(fake, tmp_path):
    found = json.loads(samplex("reproduce", "kernel", "--out", tmp_path, "--quick", "--json").stdout)
    assert (found["status"], found["exit_code"]) == ("finished", 0)
    assert found["papers"]["kernel"]["claims"][0]["measured"] == "n = 9"
    assert (tmp_path / "index.html").is_file()
    said = samplex("reproduce", "kernel", "--out", tmp_path, "--quick").output
    assert "the paper says" in said
    assert "report.md" in said
    assert "This is a toy size (--quick)" in " ".join(said.split())
    assert found["papers"]["kernel"]["size"] == "quick"
    assert "toy size" in (tmp_path / "index.html").read_text()
    assert "toy size" in (tmp_path / "kernel" / "report.md").read_text()
    said = samplex("reproduce", "kernel", "--out", tmp_path).output
    assert "toy" not in said


def test_a_toy_size_refutes_nothing(tmp_path):
    for quick in (True, False):
        r = reproduce.Run("kernel", tmp_path, quick=quick)
        r.claim("a", "x", "y", holds=False, note="n")
        r.claim("b", "x", "y", holds=True)
        assert [c["holds"] for c in r.claims] == [None if quick else False, True]
        assert r.claims[0]["note"] == ("n; not at this toy size" if quick else "n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["alchemy"], "NAME must be one of adversarial, kernel, rff, attention, contrastive or all, got 'alchemy'"),
        (["kernel", "--full", "--quick"], "--full and --quick must not be combined, got both"),
        (["kernel", "--data", "nowhere"], "--data must be a folder, got nowhere"),
    ],
)
def test_wrong_use(fake, tmp_path, words, message):
    result = samplex("reproduce", *words, "--out", tmp_path / "new", code=1)
    assert f"samplex reproduce: {message}" in result.output
    assert not (tmp_path / "new").exists()


def test_a_paper_that_is_not_in_the_build(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "samplex_cuda.reproduce.kernel", None)  # import_module: not found
    monkeypatch.delattr(reproduce, "kernel", raising=False)
    result = samplex("reproduce", "kernel", "--out", tmp_path / "new", code=1)
    assert "kernel is not in this build of samplex-cuda" in result.output
    assert not (tmp_path / "new").exists()


def test_all_goes_on_after_a_failure(monkeypatch, tmp_path):
    def fails(r):
        raise RuntimeError("broken")

    for name in report.NAMES:
        module = fake_paper(fails if name == "rff" else small_run)
        monkeypatch.setitem(sys.modules, f"samplex_cuda.reproduce.{name}", module)
    found = json.loads(samplex("reproduce", "all", "--out", tmp_path, "--quick", "--json", code=1).stdout)
    assert found["failed"] == {"rff": "RuntimeError: broken"}
    assert set(found["papers"]) == set(report.NAMES) - {"rff"}
    page = check_page((tmp_path / "index.html").read_text())
    assert [attrs["id"] for tag, attrs in page.seen if tag == "section"] == [n for n in report.NAMES if n != "rff"]


# ------------------------------------------------------------------------------------------------ the papers
def present():
    """Papers that this build has."""
    found = []
    for name in report.NAMES:
        try:
            reproduce.load(name)
        except ImportError:
            continue
        found.append(name)
    return found


def check_run(folder, name, size):
    found = json.loads((folder / name / "results.json").read_text())
    assert found["size"] == size
    text = (folder / name / "report.md").read_text()
    assert len(found["claims"]) >= 3
    assert len(found["deviations"]) >= 2
    for claim in found["claims"]:
        assert claim["paper"]
        assert claim["measured"]
        assert "nan" not in claim["measured"]
        assert claim["name"].replace("|", "\\|") in text
    figures = [part["file"] for part in found["parts"] if part["kind"] == "figure"]
    assert "headline.png" in figures
    for file in figures:
        assert (folder / name / file).read_bytes().startswith(PNG)
        assert f"]({file})" in text
    return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """name -> folder of its quick run, made by the command when it is first asked for."""
    made = {}

    def folder_of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            words = ("reproduce", name, "--quick", "--seed", 1, "--out", made[name], "--json")
            assert set(json.loads(samplex(*words).stdout)["papers"]) == {name}
        return made[name]

    return folder_of


@pytest.mark.parametrize("name", present())
def test_every_paper_runs_quickly(name, quick):
    folder = quick(name)
    check_run(folder, name, "quick")
    page = check_page((folder / "index.html").read_text())
    assert [attrs["id"] for tag, attrs in page.seen if tag == "section"] == [name]


def claims_of(folder, name):
    found = check_run(folder, name, "quick")
    return found, {claim["name"]: claim for claim in found["claims"]}


def test_adversarial_theory_holds(quick):
    found, claims = claims_of(quick("adversarial"), "adversarial")
    assert claims["Theorem 2, six classes, enumerated"]["holds"]
    assert claims["Theorem 2 on the built-in data"]["holds"]
    curves = found["values"]["built_in"]
    assert list(curves) == ["adversarial", "uniform", "frequency", "NCE", "A&R", "OVE", "full softmax"]
    for name in ("adversarial", "NCE"):  # time starts with the fit of the tree
        assert curves[name]["curve"][0]["seconds"] > curves[name]["setup_seconds"] > 0
    # At zero scores sum(alpha) is 1/2 for every noise; it then falls, least for the noise nearest to the data.
    last = {name: curves[name]["curve"][-1]["alpha"] for name in ("adversarial", "frequency", "uniform")}
    assert last["adversarial"] > last["uniform"]
    assert any("eurlex4k was left out" in text for text in found["deviations"])


def test_kernel_theory_holds(quick):
    found, claims = claims_of(quick("kernel"), "kernel")
    assert claims["Theorem 1.1, enumerated"]["holds"]
    value = found["values"]["theorem_1_1"]
    assert value["softmax"][0] < 1e-12
    assert value["softmax_with_hits"][0] > 0.01
    assert set(found["values"]["made-up text"]) >= {"uniform", "unigram", "bigram", "quadratic", "quartic", "softmax"}


def test_kernel_counts_samples():
    from samplex_cuda.reproduce.kernel import needed

    uniform = {10: 8.0, 100: 6.0, 1000: 5.0}
    assert needed(uniform, 9.0) == (10.0, True)
    assert needed(uniform, 7.0)[0] == pytest.approx(10**1.5)
    assert needed(uniform, 5.0) == (pytest.approx(1000.0), True)
    assert needed(uniform, 4.9) == (1000.0, False)
    assert needed({10: 8.0, 100: 8.5, 1000: 5.0}, 8.2) == (10.0, True)


@pytest.mark.parametrize("kind", ["softmax", "quartic"])
def test_flat_sampler_has_the_law_of_the_library(kind):
    import samplex_cuda as sx
    from samplex_cuda.reproduce.kernel import Flat

    torch.manual_seed(0)
    weight, h, y = torch.randn(30, 4), torch.randn(5, 4), torch.randint(30, (5,))
    law = sx.samplers.Softmax(weight) if kind == "softmax" else sx.samplers.Quartic(weight)
    draw = Flat(weight, kind).sample(h, 200, exclude=y)
    assert not (draw.ids == y[:, None]).any()
    torch.testing.assert_close(draw.log_q, law.log_prob(h, draw.ids, exclude=y), atol=2e-5, rtol=0)


def test_rff_theory_holds(quick):
    found, claims = claims_of(quick("rff"), "rff")
    assert claims["Estimate of the kernel (Eq. 49-51)"]["holds"]
    assert claims["Theorem 1: bounds on the bias"]["holds"] is False  # as printed
    assert claims["Lemma 3: E[1/W]"]["holds"] is False
    bounds = found["values"]["theorem_1"]
    assert all(v == 0 for signs in bounds.values() for k, v in signs.items() if "corrected" in k)
    assert bounds["worst"]["upper, printed"] > 0.1
    assert all(v == 0 for v in bounds["at least 0"].values())
    wrong = found["values"]["ratio_with_printed_normaliser"]
    assert wrong["1"] < 0.9  # the printed normalizer is off where nu is not tau,
    assert wrong["11.1"] == pytest.approx(1.0)  # and right where it is


def test_gradient_bias_is_measured():
    from samplex_cuda.reproduce import rff_estimates as estimates

    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(40, 6), dim=1)
    s = estimates.Sphere(rows, torch.nn.functional.normalize(rows[:4] + 0.3 * torch.randn(4, 6)), torch.arange(4), 6.0)
    soft = (s.tau * s.cosine).exp() * s.others
    bias, noise = estimates.gradient_bias(s, soft / soft.sum(1, keepdim=True), 5, 20_000, 0)
    assert bias < 3 * noise  # none
    flat = s.others / s.others.sum(1, keepdim=True)
    few, noise = estimates.gradient_bias(s, flat.double(), 5, 20_000, 0)
    many, _ = estimates.gradient_bias(s, flat.double(), 20, 20_000, 0)
    assert few > 5 * noise
    assert 2.0 < few / many < 8.0  # about 1/m


def test_posterior_of_the_built_in_data():
    from samplex_cuda.reproduce.adversarial_data import built_in

    data = built_in(40, 4000, 4, 1.2, held_out=4000)
    x, y = data.test
    p = data.log_posterior(x).exp()
    best = p.gather(1, y[:, None]).mean()
    # Calibrated: the mean probability of the label is the mean of sum p^2, and no other distribution has a better
    # likelihood.
    assert float(best) == pytest.approx(float(p.square().sum(1).mean()), abs=0.02)
    nll = -data.log_posterior(x).gather(1, y[:, None]).mean()
    for factor in (0.8, 1.25):
        other = (factor * data.log_posterior(x)).log_softmax(1)
        assert nll < -other.gather(1, y[:, None]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", present())
def test_every_paper_at_its_default_size(name, tmp_path):
    result = reproduce.run_paper(name, tmp_path)
    check_run(tmp_path, name, "default")
    assert result.found["processor_seconds"] < 600


@pytest.mark.slow
def test_kernel_claims_at_the_default_size(tmp_path):
    result = reproduce.run_paper("kernel", tmp_path)
    held = {claim["name"].split(",")[0] for claim in result.claims if claim["holds"]}
    assert {"Theorem 1.1", "Softmax sampling", "Fewer samples than uniform"} <= held
