"""Builds of the C++ sources for tests: under sanitizers, and small libraries of single parts.

Results are kept in build/tests, so that a second run compiles only what changed.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "tests" / "cpu" / "cpp"
FLAGS = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
FLAGS += [f"-I{ROOT / 'csrc'}", f"-I{CPP}"]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# set in processes whose extension is sanitized (sanitized.py): the sanitizers
SANITIZERS = "FASTBERT_SANITIZERS"
ISA_FLAGS = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512bf16"]}


def isas_of(source: Path) -> list[str]:
    """As in setup.py: the instruction sets for which a source under csrc/cpu is compiled."""
    if source.stem.endswith("_bf16_simd"):
        return ["avx512_bf16"]
    return ["avx2", "avx512"] if source.stem.endswith("_simd") else []


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = shutil.which("c++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def ninja_build(name: str, objects: dict[str, tuple[Path, list[str]]], output: str, link: list[str]) -> Path:
    """Compile `objects` (name -> source, flags) and link them to build/tests/<name>/<output>.

    Skips where a tool or a sanitizer's library is missing; fails where the sources do not compile.
    """
    cxx = compiler()
    probe = subprocess.run(
        [cxx, "-x", "c++", "-", "-o", "/dev/null", *[f for f in link if f.startswith("-fsanitize")]],
        input="int main() { return 0; }",
        text=True,
        capture_output=True,
    )
    if probe.returncode:
        pytest.skip(f"{cxx} cannot link {' '.join(link)}: {probe.stderr.strip()[-200:]}")
    lines = compile_lines(objects, [cxx, *FLAGS], ["-x", "c++"])
    lines += ["rule link", f"  command = {shlex.join([cxx, *link])} $in -o $out"]
    lines += [f"build {output}: link {' '.join(f'{stem}.o' for stem in objects)}"]
    return run_ninja(name, lines) / output


def compile_lines(objects: dict[str, tuple[Path, list[str]]], first: list[str], last: list[str]) -> list[str]:
    """Lines of a build.ninja that compile each of `objects` (name -> source, flags) to <name>.o."""
    lines = []
    for stem, (source, flags) in objects.items():
        rule = stem.replace(".", "_")
        command = shlex.join([*first, *flags, *last]).replace("$", "$$")
        lines += [f"rule {rule}", f"  command = {command} -MD -MF $out.d -c $in -o $out", "  deps = gcc"]
        lines += ["  depfile = $out.d", f"build {stem}.o: {rule} {source}"]
    return lines


def run_ninja(name: str, lines: list[str]) -> Path:
    """Run these lines of a build.ninja in build/tests/<name>, which is returned; fails where they fail."""
    ninja = pytest.importorskip("ninja")
    folder = ROOT / "build" / "tests" / name
    program = shutil.which("ninja", path=ninja.BIN_DIR) or "ninja"
    run_alone(folder, [program, "-C", str(folder)], "\n".join(lines) + "\n")
    return folder


def run_alone(folder: Path, command: list[str], lines: str = "", **options) -> None:
    """Run a build in its folder, after the `lines` of its build.ninja are written; fails where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # two test processes may want the same build
        fcntl.flock(lock, fcntl.LOCK_EX)
        if lines:
            (folder / "build.ninja").write_text(lines)
        run = subprocess.run(command, text=True, capture_output=True, **options)
    assert run.returncode == 0, run.stdout + run.stderr


def cpu_objects(flags: list[str]) -> dict[str, tuple[Path, list[str]]]:
    """Everything under csrc/cpu but the kernels."""
    sources = (ROOT / "csrc" / "cpu").glob("*.cpp")
    return {p.stem: (p, [*flags, "-DFASTBERT_X86=0"]) for p in sorted(sources) if not isas_of(p)}


def host_objects(archs: str) -> dict[str, tuple[Path, list[str]]]:
    """What `_C` consists of besides CUDA kernels for `archs`: its bindings, and csrc/cpu without kernels."""
    pybind11 = pytest.importorskip("pybind11")
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    flags = ["-O1", "-fvisibility=hidden"]
    module = [*flags, "-DFASTBERT_X86=0", "-DFASTBERT_CUDA=1", f'-DFASTBERT_CUDA_ARCHS="{archs}"']
    module += ['-DFASTBERT_CUDA_SOURCES=""', '-DFASTBERT_NVCC=""']
    module += [flag for path in includes for flag in ("-isystem", path)]
    objects = {f"bind_{p.stem}": (p, module) for p in sorted((ROOT / "csrc" / "bindings").glob("*.cpp"))}
    return objects | cpu_objects(flags)


def extension_name() -> str:
    """The file name of an extension `_C`."""
    return "_C" + sysconfig.get_config_var("EXT_SUFFIX")


def checks(sanitizers: str) -> list[str]:
    """Flags of the compiler for these sanitizers, such as "address,undefined"."""
    return ["-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def sanitized_extension(sanitizers: str) -> Path:
    """`_C` with all CPU kernels and no CUDA, built by setup.py with -fsanitize=<sanitizers>."""
    compiler()
    folder = ROOT / "build" / "tests" / "-".join(["sanitized", *sanitizers.split(",")])
    flags = {"CXXFLAGS": shlex.join([*checks(sanitizers), "-Werror"]), "LDFLAGS": checks(sanitizers)[2]}
    places = "--build-lib", folder / "lib", "--build-temp", folder / "objects"
    command = [sys.executable, "setup.py", "build_ext", *map(str, places)]
    run_alone(folder, command, cwd=ROOT, env=os.environ | flags | {"FASTBERT_CUDA": "0"})
    return folder / "lib" / "fastbert" / extension_name()


def sanitized_parallel(sanitizers: str) -> Path:
    """tests/cpu/cpp/sanitize_parallel.cpp, built with -fsanitize=<sanitizers>."""
    flags = checks(sanitizers)
    sources = {"parallel": ROOT / "csrc" / "cpu" / "parallel.cpp", "driver": CPP / "sanitize_parallel.cpp"}
    objects = {name: (source, flags) for name, source in sources.items()}
    name = "-".join(["parallel", *sanitizers.split(",")])
    return ninja_build(name, objects, "parallel", [flags[2], "-pthread"])


def team() -> Path:
    """Shared library of tests/cpu/cpp/team.cpp: threads that the thread sanitizer knows."""
    flags = checks("thread")
    return ninja_build("team", {"team": (CPP / "team.cpp", flags)}, "libteam.so", ["-shared", flags[2]])


def exponential() -> Path:
    """Shared library of tests/cpu/cpp/exponential.cpp: exp of csrc/cpu/exp.h for each instruction set."""
    source = CPP / "exponential.cpp"
    objects = {
        f"exponential.{isa}": (source, ["-O2", *flags, f"-DFASTBERT_ISA={isa}"])
        for isa, flags in ISA_FLAGS.items()
    }
    return ninja_build("exponential", objects, "libexponential.so", ["-shared"])


def pace() -> Path:
    """Shared library of tests/cpu/cpp/pace.cpp: what the tiles of a product prefetch."""
    return ninja_build(
        "pace", {"pace": (CPP / "pace.cpp", ["-O1", "-DFASTBERT_ISA=avx512"])}, "libpace.so", ["-shared"]
    )


def faked_isa() -> Path:
    """Shared library of isa_faked.cpp: the choice of the instruction set on other processors."""
    objects = {"isa_faked": (CPP / "isa_faked.cpp", ["-O1", "-DFASTBERT_X86=1"])}
    return ninja_build("isa_faked", objects, "libisa_faked.so", ["-shared"])


def int8_pairs() -> Path:
    """Shared library of tests/cpu/cpp/linear_int8_pairs.cpp: linear_int8 with AVX-512 but without VNNI."""
    csrc, flags = ROOT / "csrc" / "cpu", ["-O2", "-DFASTBERT_X86=1"]
    name, link = "int8_pairs", ["-shared"]
    if sanitizers := os.environ.get(SANITIZERS):
        flags += checks(sanitizers)
        name, link = "-".join([name, *sanitizers.split(",")]), [*link, flags[4]]
    objects = {name: (csrc / f"{name}.cpp", flags) for name in ("isa", "parallel")}
    objects["linear_int8_pairs"] = (CPP / "linear_int8_pairs.cpp", flags)
    for isa in isas_of(csrc / "linear_int8_simd.cpp"):
        objects[f"linear_int8_simd.{isa}"] = (
            csrc / "linear_int8_simd.cpp",
            [*flags, *ISA_FLAGS[isa], f"-DFASTBERT_ISA={isa}"],
        )
    return ninja_build(name, objects, "libint8_pairs.so", link)
