"""The shape of the source tree: who may include what, that no op lacks a part, that versions agree, that no path of a
machine stands in a file. csrc/README.md states the same rules for people.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
STAGES = [path for path in sorted(CSRC.iterdir()) if path.is_dir() and path.name not in ("bindings", "common")]

# Files besides *_op.cpp and *_op.h (glue that two ops share) that may see a tensor or torch's thread pool.
TORCH_FILES = {
    "common/calls.h",
    "common/check_key.h",
    "common/glue.h",
    "common/ids.h",
    "common/logits.h",
    "common/parallel.cpp",
    "bindings/library.cpp",
}
GLUE = {"common/calls.h", "common/check_key.h", "common/glue.h", "common/ids.h", "common/logits.h"}
# What the ops of a stage share: specified, tested and timed through each of them.
SHARED_STEMS = {"fused_loss"}
PARAMS_INCLUDES = {"cstddef", "cstdint"} | {
    f"common/{name}.h" for name in ("dtype", "gather_rows", "launchers", "panel_layout", "philox", "row_keys")
}

# What keeps one source from serving nvcc, the SIMT harness and every backend with the same bits.
DEVICE_FORBIDDEN = {
    r"\basm\b": "inline PTX",
    r"<<<": "launch outside SX_LAUNCH",
    r"extern\s+__shared__": "dynamic shared memory outside SX_DYN_SMEM",
    r"__(?:shfl|ballot|any|all|match|reduce)\w*_sync\b": "collective outside common/warp.cuh",
    r"__(?:exp|log|log2|log10|pow|sin|cos|tan|fdivide|sincos)f\b": "fast-math intrinsic",
    r"use_fast_math": "fast math",
    r"\batomic(?:Add|Exch|CAS|Max|Min)\s*\(\s*(?:reinterpret_cast|static_cast)?\s*<?\s*\(?\s*(?:float|double|Half)": (
        "float atomic"
    ),
    r"cooperative_groups|\bcub::|\bthrust::|\bcurand": "library the harness does not have",
}
DEVICE_FORBIDDEN_INCLUDES = r"^(torch/csrc|ATen|c10/cuda|cub/|thrust/|curand|cooperative_groups|mma\.h|cuda/)"


def strip_comments(text: str) -> str:
    """C++ text without comments and string contents, so that a rule may be named where it is explained."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

    def replace(match: re.Match[str]) -> str:
        found = match.group(0)
        line_start = text.rfind("\n", 0, match.start()) + 1
        is_include = text[line_start : match.start()].lstrip().startswith("#include")
        return found if found.startswith('"') and is_include else ('""' if found.startswith('"') else " ")

    return pattern.sub(replace, text)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def sources(*suffixes: str) -> list[Path]:
    return [path for path in sorted(CSRC.rglob("*")) if path.is_file() and path.name.endswith(suffixes)]


def relative(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def sees_tensors(path: Path) -> bool:
    return path.name.endswith(("_op.cpp", "_op.h")) or relative(path) in TORCH_FILES


def op_header(path: Path) -> bool:
    """Whether a file that is not glue includes the glue of an op."""
    return not sees_tensors(path) and any(name.endswith("_op.h") for name in includes(path))


def stems() -> list[tuple[str, str]]:
    """(stage/folder, stem) of every op."""
    return [(relative(path.parent), path.name.removesuffix("_op.cpp")) for path in sources("_op.cpp")]


def roles() -> list[str]:
    """The roles of csrc/README.md's table, as suffixes of a stem: `_params.h`, `_op.cpp`, `.h` …"""
    table = (CSRC / "README.md").read_text().split("## The roles")[1].split("\n## ")[0]
    return re.findall(r"^\| `<stem>(\S+)` \|", table, re.MULTILINE)


def role_fault(name: str, folder: str) -> str | None:
    """Why a file `name` in an op's folder is not one of the table's, or None."""
    stem, role = next(
        ((name.removesuffix(role), role) for role in sorted(roles(), key=len, reverse=True) if name.endswith(role)),
        (name, ""),
    )
    if not role:
        return "no role of the table"
    if not (stem == folder or stem.startswith(f"{folder}_")):
        return f"must begin with {folder}"
    # Whatever ends in .h or .cpp has the last two roles of the table, so these are for the folder's own name alone.
    if role in (".h", ".cpp") and stem != folder:
        return "no role of the table"
    return None


def foreign_includes(name: str, included: list[str]) -> list[str]:
    """What a file `stage/…` may not include: headers of another stage."""
    stage = name.split("/")[0]
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    return [other for other in included if other.split("/")[0] in folders - {stage, "common"}]


def loss_words(text: str) -> list[str]:
    """Names of a loss in code, not in comments or strings."""
    return re.findall(r"\w*loss\w*", strip_comments(text), re.IGNORECASE)


def device_faults(text: str) -> list[str]:
    code = strip_comments(text)
    return [why for pattern, why in DEVICE_FORBIDDEN.items() if re.search(pattern, code)]


# ------------------------------------------------------------------------------------------------ include rules
def test_only_glue_sees_torch():
    wrong = [
        f"{relative(path)}: {name}"
        for path in sources(".h", ".cpp", ".cuh", ".cu")
        for name in includes(path)
        if re.match(r"torch/csrc|torch/(?!headeronly)|ATen|c10/", name) and not sees_tensors(path)
    ]
    assert wrong == [], "only *_op.cpp and common/glue.h may include torch; kernels take raw pointers"


def test_only_ops_include_the_glue():
    wrong = [
        relative(path)
        for path in sources(".h", ".cpp", ".cuh", ".cu")
        if GLUE & set(includes(path)) and not sees_tensors(path)
    ]
    assert wrong == []
    assert [relative(path) for path in sources(".cpp", ".cu", ".cuh") if op_header(path)] == []


@pytest.mark.parametrize(
    "path", [p for p in sources(".h", ".cpp", ".cuh", ".cu") if "bindings" not in p.parts], ids=relative
)
def test_a_stage_includes_itself_and_common_only(path):
    assert foreign_includes(relative(path), includes(path)) == [], "call the other stage's op: common/calls.h"


def test_common_holds_no_loss_code():
    wrong = {relative(path): loss_words(path.read_text()) for path in (CSRC / "common").iterdir()}
    assert {name: words for name, words in wrong.items() if words} == {}
    assert [path.name for path in (CSRC / "common").iterdir() if "loss" in path.name] == []


def test_op_errors_have_a_code():
    """`op_error` of samplex_cuda/_checks.py goes by the code that check_index, check_type and check_value write."""
    wrong = [
        relative(path)
        for path in sources("_op.h", "_op.cpp")
        if re.search(r"\bfail\(|\bthrow\b|STD_TORCH_CHECK", strip_comments(path.read_text()))
    ]
    assert wrong == []


def test_torch_is_used_through_the_stable_abi():
    wrong = [
        f"{relative(path)}: {name}"
        for path in sources(".h", ".cpp", ".cuh", ".cu")
        for name in includes(path)
        if name.startswith("torch/") and not name.startswith(("torch/csrc/stable/", "torch/headeronly/"))
    ]
    assert wrong == [], "anything else of torch ties the binary to one torch version"


@pytest.mark.parametrize("path", sources("_params.h"), ids=relative)
def test_params_are_plain(path):
    # A params header of the same stage may be shared: the backward of an op reuses the forward's struct.
    extra = {
        name
        for name in includes(path)
        if name not in PARAMS_INCLUDES
        and not re.fullmatch(r"(common|" + path.parents[1].name + r")/(\w+/)?\w+_params\.h", name)
    }
    assert extra == set(), "a params header is a POD that nvcc, g++ and glue all read"
    assert not re.search(r"\b(std::vector|std::string|virtual|Tensor)\b", strip_comments(path.read_text()))


@pytest.mark.parametrize("path", sources("_device.cuh", "_kernel.cuh", "_cuda.cu"), ids=relative)
def test_device_code_serves_nvcc_and_the_harness(path):
    assert device_faults(path.read_text()) == []
    assert [name for name in includes(path) if re.match(DEVICE_FORBIDDEN_INCLUDES, name)] == []


@pytest.mark.parametrize("path", sources("_kernel.cuh"), ids=relative)
def test_kernels_state_their_block_size(path):
    code = strip_comments(path.read_text())
    kernels = len(re.findall(r"\b__global__\b", code))
    assert kernels == len(re.findall(r"\b__launch_bounds__\b", code)), "every kernel needs __launch_bounds__"


@pytest.mark.parametrize("path", [p for p in sources(".cpp") if "_cpu" in p.name], ids=relative)
def test_cpu_kernels_see_no_gpu(path):
    assert [name for name in includes(path) if "cuda" in name or name.endswith(".cuh")] == []


@pytest.mark.parametrize("path", sources(".cpp", ".h"), ids=relative)
def test_isa_intrinsics_stay_in_isa_files(path):
    """A baseline file with an AVX include would crash on the first machine without AVX."""
    isa_header = path.name.endswith(".h")  # included by ISA units only; which is what the inline namespace is for
    isa_unit = re.search(r"_cpu_avx(2|512)\.cpp$", path.name) is not None
    if "immintrin.h" in includes(path):
        assert isa_unit or (isa_header and re.search(r"__AVX2__|__AVX512F__", path.read_text()))
    if isa_unit:
        others = {name for name in includes(path) if not name.endswith(".h") or name.startswith("torch")}
        assert others <= {"immintrin.h", "cstdint", "cstddef"}, (
            "the standard library's inline code must not be compiled for one ISA"
        )


def test_one_idiom_chooses_the_simd_level():
    """SX_SIMD_BODY of common/simd.h. One place asks for a level, because another algorithm is faster without SIMD."""
    asks = [path for path in sources(".cpp", ".h") if "SimdLevel::k" in strip_comments(path.read_text())]
    asks = [relative(path) for path in asks if not relative(path).startswith("common/simd.")]
    assert asks == ["loss/fused/fused_loss_cpu.cpp"]
    bodies = [path for path in sources(".cpp") if path.name.endswith("_cpu.cpp") and is_vectorized(path)]
    assert len(bodies) > 8
    assert [relative(path) for path in bodies if "SX_SIMD_BODY" not in path.read_text()] == []


def is_vectorized(path: Path) -> bool:
    """Whether the CPU unit has others beside it for single instruction sets."""
    return path.with_name(path.name.replace("_cpu.cpp", "_cpu_avx2.cpp")).exists()


def test_no_file_is_much_longer_than_600_lines():
    found = {}
    for top in ("csrc", "python", "tests", "bench", "scripts", "examples"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh") and "build" not in path.parts:
                lines = path.read_text().count("\n")
                if lines > 660:
                    found[str(path.relative_to(ROOT))] = lines
    assert found == {}


# ------------------------------------------------------------------------------------------------ an op is whole
def test_every_file_has_a_role_and_a_folder():
    assert len(roles()) == len(set(roles())) > 10
    wrong = []
    for stage in STAGES:
        for path in sorted(stage.rglob("*")):
            if path.is_dir():
                continue
            in_folder = path.parent.parent == stage
            fault = role_fault(path.name, path.parent.name) if in_folder else "must be in the folder of an op"
            if fault:
                wrong.append(f"{relative(path)}: {fault}")
    assert wrong == [], "csrc/README.md has the table of roles"


@pytest.mark.parametrize(("folder", "stem"), stems())
def test_op_has_every_part(folder, stem):
    wanted = [f"csrc/{folder}/{stem}_{part}" for part in ("params.h", "op.cpp", "cpu.cpp", "kernel.cuh", "cuda.cu")]
    wanted += [f"python/samplex_cuda/ops/{stem}.py"]
    if stem not in SHARED_STEMS:
        wanted += [
            f"python/samplex_cuda/reference/{stem}.py",
            f"tests/ops/test_{stem}.py",
            f"bench/bench_{stem}.py",
        ]
    assert [name for name in wanted if not (ROOT / name).is_file()] == []


def test_no_part_without_an_op():
    suffixes = ("_params.h", "_cpu.cpp", "_cpu_avx2.cpp", "_cpu_avx512.cpp", "_kernel.cuh", "_cuda.cu")
    known = set(stems())
    orphans = [
        relative(path)
        for stage in STAGES
        for path in sorted(stage.rglob("*"))
        for suffix in suffixes
        if path.name.endswith(suffix) and (relative(path.parent), path.name.removesuffix(suffix)) not in known
    ]
    assert orphans == []


def test_every_source_is_in_the_build():
    listed = re.findall(r"csrc/\S+?\.(?:cpp|cu)\b", (ROOT / "CMakeLists.txt").read_text())
    present = [path.relative_to(ROOT).as_posix() for path in sources(".cpp", ".cu")]
    assert sorted(set(listed)) == present
    # build_info.cpp and module.cpp stand once more, for their own properties and target.
    op_sources = [name for name in listed if re.match(r"csrc/(?!common|bindings)", name)]
    assert len(op_sources) == len(set(op_sources))


def test_the_harness_runs_every_cuda_source():
    text = "\n".join(path.read_text() for path in (ROOT / "tests" / "simt").rglob("CMakeLists.txt"))
    if "SAMPLEX_CUDA_SOURCES" in text:
        return  # the harness takes the build's own list, which the test above has checked
    missing = [relative(path) for path in sources("_cuda.cu") if relative(path) not in text]
    assert missing == []


# ------------------------------------------------------------------------------------------------ versions, texts
def test_versions_agree():
    import samplex_cuda
    from samplex_cuda import _native

    cmake = re.search(r"project\(samplex_cuda VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    changelog = re.search(r"^## \[([0-9.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cmake is not None
    assert changelog is not None
    assert samplex_cuda.__version__ == cmake.group(1) == changelog.group(1) == _native.build_info()["version"]


def text_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        names = [name for name in listed.stdout.split("\0") if name]
    else:  # an unpacked source distribution
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        names = [str(path) for path in found if not any(map(made_here, path.parts[:-1]))]
    paths = [ROOT / name for name in names]
    binary = (".png", ".npz", ".whl", ".so", ".pyc", ".pt")
    return [path for path in paths if path.is_file() and not path.name.endswith(binary)]


def made_here(directory: str) -> bool:
    """Whether a directory is no source: built, cached, an environment."""
    if directory.startswith("."):
        return directory not in (".ci", ".github")
    return directory in ("build", "dist", "__pycache__")


# In pieces, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:" + "|".join(["ho" + "me/", "ro" + "ot/", "Us" + "ers/", "wo" + "rk/"]) + r")\w"
)
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-" + r"url|PIP_(?:EXTRA_)?INDEX_" + r"URL|--find-" + r"links")


def test_no_machine_paths():
    wrong = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []


def test_downloads_use_pips_own_configuration():
    wrong = [str(path.relative_to(ROOT)) for path in text_files() if PACKAGE_INDEX.search(path.read_text("utf-8"))]
    assert wrong == []


def test_python_package_is_importable_by_name_only():
    """No test or example reaches into the package by a path, and the package imports itself by its full name."""
    wrong = []
    for path in sorted((ROOT / "python" / "samplex_cuda").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"\s*from \.", line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []


# ------------------------------------------------------------------------------------------------ the rules themselves
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('asm volatile("mov.u32 %0, 1;" : "=r"(x));', "inline PTX"),
        ("kernel<<<1, 32>>>(p);", "launch outside SX_LAUNCH"),
        ("extern __shared__ float s[];", "dynamic shared memory outside SX_DYN_SMEM"),
        ("x += __shfl_xor_sync(0xffffffffu, x, 1);", "collective outside common/warp.cuh"),
        ("y = __expf(x);", "fast-math intrinsic"),
        ("y = __fdividef(x, z);", "fast-math intrinsic"),
        ("cub::BlockReduce<float, 128> r;", "library the harness does not have"),
        ("atomicAdd((float*)p, x);", "float atomic"),
    ],
)
def test_a_broken_rule_is_seen(code, why):
    assert device_faults(f"// fine\nvoid f() {{ {code} }}") == [why]
    assert device_faults(f"// {code}\nvoid f() {{}}") == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("tree_math.h", None),
        ("tree_cpu_avx512.cpp", None),
        ("tree.cpp", None),
        ("tree_law.h", "no role of the table"),
        ("tree_cpu_impl.h", "no role of the table"),
        ("tree_logit.cuh", "no role of the table"),
        ("subset_params.h", "must begin with tree"),
    ],
)
def test_a_file_without_a_role_is_seen(name, fault):
    assert role_fault(name, "tree") == fault


def test_a_cross_stage_include_is_seen():
    other = "update/row_reduce/row_reduce_op.h"
    assert foreign_includes("loss/fused/fused_loss_op.h", ["cstdint", "common/glue.h", other]) == [other]
    assert foreign_includes("common/rows.h", ["loss/fused/fused_loss_math.h", "common/vec.h"]) == [
        "loss/fused/fused_loss_math.h"
    ]
    assert foreign_includes("update/row_rules/row_rules_op.cpp", [other, "torch/csrc/stable/ops.h"]) == []


def test_loss_code_is_seen():
    assert loss_words('struct LossMeanParams {};  // of a loss\nfail("loss");') == ["LossMeanParams"]


def test_comment_stripping_keeps_includes():
    stripped = strip_comments('#include "common/warp.cuh"  // the <<< is here\nauto t = "a <<< b"; /* asm */ int x;')
    assert '"common/warp.cuh"' in stripped
    assert "<<<" not in stripped
    assert "asm" not in stripped
    assert "int x;" in stripped


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("/" + "home/someone/x", True),
        ('open("/' + 'root/x")', True),
        ("see docs/home/page", False),
        ("network/rooted", False),
        ("/ho" + "me", False),
    ],
)
def test_machine_paths_are_seen(line, found):
    assert bool(MACHINE_PATH.search(line)) == found
