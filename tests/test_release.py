"""What surrounds a release: wheels that say what they have, progress of a build, version and citation in step."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_packaging import ROOT, script

import samplex_cuda
from samplex_cuda import _native

VERSION = re.search(r"project\(samplex_cuda VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def test_device_code_is_found_in_the_library():
    library = Path(_native.__file__).parent / "libsamplex.so"
    sections = script("wheel_info").elf_sections(library.read_bytes())
    assert {".text", ".dynsym"} <= set(sections)
    assert (".nv_fatbin" in sections) == _native.build_info()["cuda"]


def test_a_wheel_must_have_what_its_tag_says(tmp_path, monkeypatch, capsys):
    wheel_info, make_wheel = script("wheel_info"), script("make_wheel")
    library = Path(_native.__file__).parent / "libsamplex.so"
    cuda = _native.build_info()["cuda"]
    right, wrong = ("1cuda", "0cpu") if cuda else ("0cpu", "1cuda")
    for tag in (right, wrong):
        wheel = tmp_path / f"samplex_cuda-{VERSION}-{tag}-cp311-cp311-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(library, "samplex_cuda/libsamplex.so")
        monkeypatch.setattr(sys, "argv", ["wheel_info.py", str(wheel), "--expect", tag[1:]])
        assert wheel_info.main() == (tag != right)
    make_wheel.check_contents(wheel, cuda=cuda)
    with pytest.raises(SystemExit, match="must match its tag"):
        make_wheel.check_contents(wheel, cuda=not cuda)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("samplex_cuda/libtorch_cpu.so", b"")
    with pytest.raises(SystemExit, match=r"must have the package only, got .*libtorch_cpu"):
        make_wheel.check_contents(wheel, cuda=cuda)
    assert capsys.readouterr().out.count("\n") == 2


def test_other_files_are_refused():
    with pytest.raises(ValueError, match="must be a 64-bit little-endian ELF file"):
        script("wheel_info").elf_sections(b"PK" * 100)


def test_steps_of_ninja_are_shortened():
    step_of = script("progress").step_of
    line = "[12/187] Building CXX object CMakeFiles/samplex.dir/csrc/sampler/static_sample/static_sample_cpu.cpp.o\n"
    assert step_of(line) == "[12/187] static_sample_cpu.cpp"
    assert step_of("  [3/4] Linking CXX shared library libsamplex.so") == "[3/4] libsamplex.so"
    assert step_of("WARNING: an index of pip") is None


BUILD = """
import sys, time
print("WARNING: an index of pip", flush=True)
for i in (1, 2, 3):
    print(f"[{i}/3] Building CXX object a/b/file{i}.cpp.o", flush=True)
    time.sleep(0.15)
print("error: no such header", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_progress_shows_steps_and_the_end_of_a_failure(status, tmp_path, monkeypatch, capfd):
    progress = script("progress")
    monkeypatch.setattr(progress, "LOG", tmp_path / "build.log")
    assert progress.run([sys.executable, "-c", BUILD, str(status)], seconds=0.1) == status
    shown = capfd.readouterr()
    assert re.search(r"^   \[\d/3\] file\d.cpp  \(\d+ s\)$", shown.out, re.MULTILINE)
    assert "index of pip" not in shown.out
    assert ("no such header" in shown.err) == (status != 0)
    assert "[3/3]" in (tmp_path / "build.log").read_text()


def test_version_is_the_same_everywhere():
    assert samplex_cuda.__version__ == VERSION
    assert f"version: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"Version {VERSION}" in (ROOT / "README.md").read_text()


def test_workflows_that_nobody_ran_say_so():
    for name in ("ci.yml", "docs.yml", "wheels.yml"):
        assert (ROOT / ".github" / "workflows" / name).read_text().startswith("# UNVERIFIED"), name


def test_ci_builds_the_documentation():
    text = (ROOT / ".ci" / "run").read_text()
    assert "docs) make docs ;;" in text
    assert "tests) make test ;;" in text
    assert "set -- lint build tests docs gate" in text


def test_ci_refuses_an_unknown_group():
    done = subprocess.run([ROOT / ".ci" / "run", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "GROUP must be lint, build, tests, docs, gate, examples or integrations" in done.stderr
