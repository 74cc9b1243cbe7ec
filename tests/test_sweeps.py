"""Sweeps of scripts/: what is done is not run again, and what the emulated runtime warns of fails a file."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from test_packaging import ROOT
from test_packaging import script as load


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    module = load("emulated_sweep")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "sweep")
    return module


PASSING = "....\n4 passed, 2 deselected in 3.21s\n"
WARNED = "..WARNING: read of uninitialised shared memory at offset 4\n  kernel k\n..\n4 passed in 3.21s\n"
RACED = "..RACE (write-after-write) on shared memory\n.F\n1 failed, 3 passed, 1 error in 3.21s\n"


@pytest.mark.parametrize(
    ("text", "want"), [(PASSING, (4, 0, 0)), (WARNED, (4, 0, 1)), (RACED, (3, 2, 1)), ("", (0, 0, 0))]
)
def test_what_a_log_says(script, text, want):
    assert script.file_sweep.read_log(text) == want


def test_a_sweep_goes_on_where_it_stopped(script, monkeypatch, tmp_path, capsys):
    library, files = tmp_path / "lib.so", ["a.py", "b.py"]
    library.write_text("one")
    for length, file in enumerate(files, 1):
        (tmp_path / file).write_text("x" * length)
    ran, bad = [], {("b.py", 2)}

    def run_file(run, file, setting, source, log, on_cuda):
        seed = int(setting.split()[-1])
        ran.append((file, seed))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return script.Result(source, 0, 4, 0, int((file, seed) in bad), 1.0, str(log))

    monkeypatch.setattr(script, "run_file", run_file)
    with pytest.raises(KeyboardInterrupt):
        script.sweep(None, library, files, [1, 2], False)
    assert ran == [("a.py", 1), ("b.py", 1), ("a.py", 2)]
    assert not script.sweep(None, library, files, [1, 2], False)
    assert ran[3:] == [("a.py", 2), ("b.py", 2)]
    table = (tmp_path / "sweep" / "cpu" / "summary.md").read_text()
    assert "| b.py | 4 passed (1 s) | 4 passed, 1 findings (1 s) |" in table
    bad.clear()
    assert script.sweep(None, library, files, [1, 2], False)
    assert ran[5:] == [("b.py", 2)]  # a finding is examined again
    (tmp_path / "a.py").write_text("changed")
    assert script.sweep(None, library, files, [1, 2], False)
    assert sorted(ran[6:]) == [("a.py", 1), ("a.py", 2)]
    library.write_text("two")
    assert script.sweep(None, library, files, [1], False)
    assert sorted(ran[8:]) == [("a.py", 1), ("b.py", 1)]
    assert "seed 1 b.py: 4 passed (1 s)" in capsys.readouterr().out


def test_a_crash_is_no_success(script):
    good = script.Result("", script.file_sweep.PASSED, 4, 0, 0, 1.0, "")
    assert good.good
    assert not dataclasses.replace(good, status=-11).good
    assert "exit status -11" in dataclasses.replace(good, status=-11).cell()
    assert dataclasses.replace(good, status=script.file_sweep.NO_TESTS, passed=0).good


def test_every_setting_of_a_processor_is_swept(monkeypatch, tmp_path):
    settings = load("settings_sweep")
    values = {}
    for setting in settings.SETTINGS.values():
        for name, value in setting.items():
            values.setdefault(name, set()).add(value)
    assert values["ATEN_CPU_CAPABILITY"] == {"avx2", "default"}
    assert values["MKL_CBWR"] == {"COMPATIBLE"}
    assert values["SAMPLEX_SIMD_LEVEL"] == {"avx2", "scalar"}
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    test = "import os\n\ndef test():\n    assert os.environ['SAMPLEX_SIMD_LEVEL'] == 'avx2'\n"
    (tmp_path / "test_level.py").write_text(test)
    passed = settings.run_file("test_level.py", "avx2", "", tmp_path / "avx2.log")
    assert (passed.good, passed.passed) == (True, 1)
    failed = settings.run_file("test_level.py", "scalar", "", tmp_path / "scalar.log")
    assert (failed.good, failed.failed) == (False, 1)
