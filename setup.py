"""Build of `fastbert._C`: plain C++17 and, where it is of use, CUDA. Neither torch nor a GPU is needed.

What is compiled follows from the file's place under csrc/:
  bindings/*.cpp        the Python module (pybind11), one file per op
  cpu/<op>_simd.cpp     for AVX2 and for AVX-512, each time with that set's flags and in its own namespace
  cpu/<op>_bf16_simd.cpp  for AVX-512-BF16, likewise
  cpu/*.cpp             the rest, with baseline flags: checks, threads, choice of the instruction set
  cuda/*.cu             for the architectures below, and PTX for those to come

Environment:
  FASTBERT_CUDA         1: CUDA or an error; 0: no CUDA; unset: CUDA if nvcc is found and there is something
                        to compile it for: FASTBERT_CUDA_ARCHS, or a GPU that nvidia-smi lists
  FASTBERT_CUDA_ARCHS   such as "90a" or "80;90a;120"; PTX is always added. Unset: those of the GPUs here;
                        with FASTBERT_CUDA=1 and no GPU all of CUDA_ARCHS
  FASTBERT_WHEEL        pure: no extension, a wheel for every system; cu13: the distribution is called
                        fastbert-kernels-cu13; unset: fastbert-kernels with the extension
  FASTBERT_URL          the repository's address, for the project URLs of a released wheel; unset: none
  CXX, CXXFLAGS, LDFLAGS, CUDA_HOME, MAX_JOBS   as usual
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
]
# GCC 12 finds its own AVX-512 header uninitialised (its bug 105593), hence the last flag.
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISAS = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512bf16"]}
CUDA_ARCHS = ["80", "90a", "100a", "120"]
# A comment, or a text that may look like one
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
FEATURES = {"90": "90a", "100": "100a"}  # devices whose own instructions our kernels use
WHEEL = os.environ.get("FASTBERT_WHEEL", "")
PTX_ARCH = "80"  # the oldest: every later device can compile it
NVCC_FLAGS = [
    *("-std=c++17", "-O3", "--threads", "4"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"),
    *("-Xptxas", "--warn-on-spills"),
]


def isas_of(source: Path) -> list[str]:
    """The instruction sets for which a source under csrc/cpu is compiled; none if it has baseline flags."""
    if source.stem.endswith("_bf16_simd"):
        return ["avx512_bf16"]
    return ["avx2", "avx512"] if source.stem.endswith("_simd") else []


def find_nvcc() -> str | None:
    """Path of nvcc, or None if CUDA is not to be built. Raises if FASTBERT_CUDA=1 and there is none."""
    wanted = os.environ.get("FASTBERT_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SetupError(f"FASTBERT_CUDA: expected 0, 1 or nothing, got {wanted!r}")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None and wanted == "1":
        where = f"CUDA_HOME={home}" if home else "PATH"
        raise SetupError(
            f"FASTBERT_CUDA=1, but there is no nvcc under {where}: install the CUDA toolkit or set "
            "CUDA_HOME, or build without CUDA (FASTBERT_CUDA=0)"
        )
    return nvcc


def find_ninja() -> str:
    """Path of ninja, from its Python package or from PATH."""
    try:
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR)
    except ImportError:
        found = None
    found = found or shutil.which("ninja")
    if found is None:
        raise SetupError("ninja is needed to build fastbert: pip install ninja")
    return found


def archs_here() -> list[str]:
    """The architectures of the GPUs that nvidia-smi lists; none where there is no driver."""
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        listing = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = dict.fromkeys(line.strip().replace(".", "") for line in listing.splitlines())
    return [FEATURES.get(arch, arch) for arch in found if arch.isdigit()]


def cuda_archs(nvcc: str) -> list[str]:
    """The architectures to build for: those asked for, or those of the GPUs here that nvcc knows.

    None of either: those of CUDA_ARCHS if FASTBERT_CUDA=1, else no CUDA.
    """
    listing = subprocess.run(
        [nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True
    ).stdout.split()
    known = [code.removeprefix("sm_") for code in listing]
    asked = os.environ.get("FASTBERT_CUDA_ARCHS", "").replace(",", " ").replace(";", " ").split()
    # nvcc lists 90, not 90a
    wanted = asked or archs_here()
    if not wanted and os.environ.get("FASTBERT_CUDA") == "1":
        wanted = CUDA_ARCHS
    if not wanted:
        print(
            "fastbert: no CUDA kernels are compiled, because there is no GPU here; "
            'FASTBERT_CUDA_ARCHS="80;90a" compiles them for those'
        )
    unknown = [arch for arch in wanted if arch.rstrip("af") not in known]
    if asked and unknown:
        raise SetupError(
            f"FASTBERT_CUDA_ARCHS: {nvcc} knows {', '.join(known)}, and not {', '.join(unknown)}"
        )
    for arch in unknown:
        print(f"fastbert: {nvcc} is too old for sm_{arch}: left out")
    return [arch for arch in wanted if arch not in unknown]


def cuda_sources(folder: Path = CSRC / "cuda") -> dict[str, str]:
    """Hash of the code of each family of CUDA kernels, such as `attention*.cu` and all that they include.

    Comments and white space do not count. The hash of `encoder_layers` is that of all sources, because it
    runs kernels of all of them.

    The extension keeps them: by them an installed wheel knows what was proven of its kernels.
    """
    found = {}
    for family in ("attention", "encoder_layers", "layer_norm", "linear"):
        files, left = set(), sorted(folder.glob("*.cu" if family == "encoder_layers" else f"{family}*.cu"))
        while left:
            path = left.pop().resolve()
            if path not in files and path.is_file():
                files.add(path)
                left += [path.parent / name for name in re.findall(r'#include "(.+)"', path.read_text())]
        digest = hashlib.sha256()
        for path in sorted(files):
            code = COMMENT.sub(lambda m: m[0] if m[0].startswith('"') else " ", path.read_text())
            digest.update(f"{path.name}\0{' '.join(code.split())}\0".encode())
        found[family] = digest.hexdigest()
    return found


def release_of(nvcc: str) -> str:
    """Major and minor version of an nvcc, such as "13.0"."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else "unknown"


class Ninja:
    """Writes and runs a build.ninja: one rule per kind of object; the compiler reports the dependencies."""

    def __init__(self, folder: Path):
        self.folder, self.lines, self.objects = folder, ["ninja_required_version = 1.5"], []

    @staticmethod
    def path(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def rule(self, name: str, command: list[str], tail: str, deps: bool) -> None:
        text = " ".join(shlex.quote(part).replace("$", "$$") for part in command)
        self.lines += [f"rule {name}", f"  command = {text} {tail}", f"  description = {name} $out"]
        self.lines += ["  deps = gcc", "  depfile = $out.d"] if deps else []

    def compile_rule(self, name: str, command: list[str]) -> None:
        self.rule(name, command, "-MD -MF $out.d -c $in -o $out", True)

    def compile(self, rule: str, source: Path, suffix: str = "") -> None:
        # The suffix of the source stays in the object's name: x.cpp and x.cu have different objects.
        out = self.folder / "obj" / source.relative_to(CSRC).parent / f"{source.name}{suffix}.o"
        self.objects.append(out)
        self.lines.append(f"build {self.path(out)}: {rule} {self.path(source)}")

    def link(self, command: list[str], tail: str, out: Path) -> None:
        self.rule("link", command, f"-o $out $in {tail}", False)
        inputs = " ".join(map(self.path, self.objects))
        self.lines += [f"build {self.path(out)}: link {inputs}", f"default {self.path(out)}"]

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "build.ninja").write_text("\n".join(self.lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        result = subprocess.run([find_ninja(), "-C", str(self.folder), *jobs])
        if result.returncode:
            raise CompileError(
                f"the build of fastbert._C failed: see above, or run ninja -v -C {self.folder}"
            )


class BuildExtension(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        cxx = shlex.split(os.environ.get("CXX") or "c++")
        if shutil.which(cxx[0]) is None:
            raise SetupError(
                f"{cxx[0]}: no C++ compiler of this name; install g++ (>= 10) or clang++, or set CXX"
            )
        extra, link_extra = (shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS"))
        target = subprocess.run([*cxx, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
        isas = ISAS if target.startswith("x86_64") else {}
        nvcc = find_nvcc()
        archs = cuda_archs(nvcc) if nvcc else []
        nvcc = nvcc if archs else None

        x86 = f"-DFASTBERT_X86={int(bool(isas))}"
        includes = [pybind11.get_include(), sysconfig.get_path("include")]
        module = [x86, f"-DFASTBERT_CUDA={int(bool(nvcc))}", f'-DFASTBERT_CUDA_ARCHS="{";".join(archs)}"']
        module += [flag for path in includes for flag in ("-isystem", path)]
        base = [*cxx, *CXX_FLAGS, *extra]

        # An editable install builds in a temporary folder, and its objects would be lost
        temp = Path(f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}")
        temp = ROOT / temp if self.editable_mode else Path(self.build_temp)
        ninja = Ninja(temp.resolve() / "fastbert")
        ninja.compile_rule("bindings", [*base, *module])
        # apart, so that an edit of a kernel compiles no other binding anew
        sources = ";".join(f"{name}={digest}" for name, digest in cuda_sources().items()) if nvcc else ""
        release = release_of(nvcc) if nvcc else ""
        facts = [f'-DFASTBERT_CUDA_SOURCES="{sources}"', f'-DFASTBERT_NVCC="{release}"']
        ninja.compile_rule("module", [*base, *module, *facts])
        # Bindings alone depend on Python: all Pythons share the other objects
        tag = f".{sys.implementation.cache_tag}"
        for source in sorted((CSRC / "bindings").glob("*.cpp")):
            ninja.compile("module" if source.stem == "module" else "bindings", source, tag)
        ninja.compile_rule("cpu", [*base, x86])
        for isa, flags in isas.items():
            ninja.compile_rule(isa, [*base, *flags, f"-DFASTBERT_ISA={isa}"])
        for source in sorted((CSRC / "cpu").glob("*.cpp")):
            wanted = isas_of(source)
            if not wanted:
                ninja.compile("cpu", source)
            for isa in filter(isas.__contains__, wanted):
                ninja.compile(isa, source, f".{isa}")
        if nvcc:
            codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
            codes.append(f"-gencode=arch=compute_{PTX_ARCH},code=compute_{PTX_ARCH}")
            host = ["-ccbin", cxx[0]] if os.environ.get("CXX") else []
            ninja.compile_rule("cuda", [nvcc, *NVCC_FLAGS, *host, *codes])
            for source in sorted((CSRC / "cuda").glob("*.cu")):
                ninja.compile("cuda", source)

        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        # cudart is linked in and not exported, so that another copy in the process does not use ours.
        libraries = ["-Wl,--exclude-libs,ALL", *link_extra]
        if nvcc:
            command = [nvcc, "-shared", "-cudart", "static", "--no-device-link", *host]
            libraries = [part for flag in libraries for part in ("-Xcompiler", flag.replace(",", "\\,"))]
        else:
            command = [*cxx, "-shared"]
        ninja.link(command, shlex.join(libraries).replace("$", "$$"), out)
        ninja.run()


class Named(Distribution):
    """Adds what pyproject.toml cannot know: the name of the CUDA wheel, and the repository's address."""

    def parse_config_files(self, *args, **kwargs) -> None:
        super().parse_config_files(*args, **kwargs)
        if WHEEL == "cu13":
            self.metadata.name = "fastbert-kernels-cu13"
        if url := os.environ.get("FASTBERT_URL", "").rstrip("/"):
            pages = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
            self.metadata.project_urls = {name: url + path for name, path in pages.items()}


class Editable(editable_wheel):
    """Puts `.editable` on the path, a folder with nothing but a link to fastbert/.

    Type checkers read path files, but not the finder that setuptools would install. The root itself must not
    be on the path: `import kernels`, `bench` and `tests` would find its folders.
    """

    def finalize_options(self) -> None:
        link = ROOT / ".editable" / "fastbert"
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path("..", "fastbert"), target_is_directory=True)
        self.distribution.package_dir = {"": link.parent.name}
        super().finalize_options()


if WHEEL not in ("", "pure", "cu13"):
    raise SetupError(f"FASTBERT_WHEEL: expected pure, cu13 or nothing, got {WHEEL!r}")
setup(
    distclass=Named,
    ext_modules=[] if WHEEL == "pure" else [Extension("fastbert._C", sources=["csrc/bindings/module.cpp"])],
    cmdclass={"build_ext": BuildExtension, "editable_wheel": Editable},
)
