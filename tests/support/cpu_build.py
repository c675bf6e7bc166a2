"""Builds of the C++ sources for tests: under sanitizers, and small libraries of single parts.

Results are kept in build/tests, so that a second run compiles only what changed.
"""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from fastbert.runtime import loader

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "tests" / "cpu" / "cpp"
FLAGS = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
FLAGS += [f"-I{ROOT / 'csrc'}", f"-I{CPP}"]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
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
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # two test processes may want the same build
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        run = subprocess.run(
            [shutil.which("ninja", path=ninja.BIN_DIR) or "ninja", "-C", str(folder)],
            text=True,
            capture_output=True,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def cpu_objects(flags: list[str], isas: bool) -> dict[str, tuple[Path, list[str]]]:
    """Everything under csrc/cpu; with `isas` also the kernels, for each of their instruction sets."""
    csrc = ROOT / "csrc" / "cpu"
    objects = {}
    for source in sorted(csrc.glob("*.cpp")):
        wanted = isas_of(source)
        if not wanted:
            objects[source.stem] = (source, [*flags, f"-DFASTBERT_X86={int(isas)}"])
        for isa in wanted if isas else ():
            defined = [*flags, *ISA_FLAGS[isa], f"-DFASTBERT_ISA={isa}"]
            objects[f"{source.stem}.{isa}"] = (source, defined)
    return objects


def host_objects(archs: str) -> dict[str, tuple[Path, list[str]]]:
    """What `_C` consists of besides CUDA kernels for `archs`: its bindings, and csrc/cpu without kernels."""
    pybind11 = pytest.importorskip("pybind11")
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    flags = ["-O1", "-fvisibility=hidden"]
    module = [*flags, "-DFASTBERT_X86=0", "-DFASTBERT_CUDA=1", f'-DFASTBERT_CUDA_ARCHS="{archs}"']
    module += ['-DFASTBERT_CUDA_SOURCES=""', '-DFASTBERT_NVCC=""']
    module += [flag for path in includes for flag in ("-isystem", path)]
    objects = {f"bind_{p.stem}": (p, module) for p in sorted((ROOT / "csrc" / "bindings").glob("*.cpp"))}
    return objects | cpu_objects(flags, isas=False)


def extension_name() -> str:
    """The file name of an extension `_C`."""
    return "_C" + sysconfig.get_config_var("EXT_SUFFIX")


def sanitized(op: str, sanitizers: str) -> Path:
    """tests/cpu/cpp/sanitize_<op>.cpp, built with -fsanitize=<sanitizers>. The ops share their objects.

    Kernels that this processor cannot run are compiled without: that takes an eighth of the time.
    """
    checks = ["-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    objects, sets = cpu_objects(["-O1", *checks], isas=True), [*ISA_FLAGS]
    unrunnable = sets[["none", *sets].index(loader.extension.best_cpu_isa()) :]
    for stem, (source, flags) in objects.items():
        if stem.endswith((*unrunnable,)):
            objects[stem] = source, [flag for flag in flags if flag not in checks]
    name = "-".join(["sanitized", *sanitizers.split(",")])
    if op == "parallel":  # needs no kernels
        objects, name = {"parallel": objects["parallel"]}, f"{name}-parallel"
    objects[f"driver_{op}"] = (CPP / f"sanitize_{op}.cpp", ["-O1", *checks])
    return ninja_build(name, objects, op, [f"-fsanitize={sanitizers}", "-pthread"])


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
    objects = {name: (csrc / f"{name}.cpp", flags) for name in ("isa", "parallel")}
    objects["linear_int8_pairs"] = (CPP / "linear_int8_pairs.cpp", flags)
    for isa in isas_of(csrc / "linear_int8_simd.cpp"):
        objects[f"linear_int8_simd.{isa}"] = (
            csrc / "linear_int8_simd.cpp",
            [*flags, *ISA_FLAGS[isa], f"-DFASTBERT_ISA={isa}"],
        )
    return ninja_build("int8_pairs", objects, "libint8_pairs.so", ["-shared"])
