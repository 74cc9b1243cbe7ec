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

from typer.testing import CliRunner

from samplex_cuda import reproduce
from samplex_cuda.cli.app import app
from samplex_cuda.reproduce import report

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the sizes are tiny, and other tests run beside these
    yield
    torch.set_num_threads(threads)


def samplex(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def fake_paper(run):
    module = types.ModuleType("samplex_cuda.reproduce.kernel")
    module.TITLE, module.PAPER, module.run = "A <made-up> paper", "Nobody & No one, 2020", run
    return module


def small_run(r):
    r.claim("sizes", "n | 10", "n = 9", holds=False, note="one less")
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
    with pytest.raises(ValueError, match="full and quick must be given alone"):
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["alchemy"], "NAME must be one of adversarial, kernel, rff, attention, contrastive or all, got 'alchemy'"),
        (["kernel", "--full", "--quick"], "--full and --quick must be given alone, got both"),
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
