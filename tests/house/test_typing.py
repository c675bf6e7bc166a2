"""What type checkers see of the package, where it is installed in editable mode."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import typing
import venv
import zipfile
from pathlib import Path

import pytest

import fastbert
from fastbert.models import calls
from fastbert.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "typing"
SITE_PACKAGES = Path(pytest.__file__).resolve().parents[1]

# A compiler and linker that write empty files.
COMPILER = """#!/bin/sh
case "$*" in *-dumpmachine*) echo x86_64-linux-gnu; exit;; esac
while [ $# -gt 0 ]; do case "$1" in -o|-MF) : > "$2";; esac; shift; done
"""


@pytest.fixture(scope="module")
def editable(tmp_path_factory):
    """(a Python with a copy of this tree, installed as `pip install -e` does it; the copy)."""
    folder = tmp_path_factory.mktemp("editable")
    copy, wheels, environment = folder / "copy", folder / "wheels", folder / "venv"
    copy.mkdir(), wheels.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("csrc", "kernels", "fastbert", "bench", "tests"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    compiler = folder / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    code = f"from setuptools import build_meta as b; b.build_editable({str(wheels)!r})"
    settings = {"CXX": str(compiler), "FASTBERT_CUDA": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=copy, env=settings, check=True, capture_output=True)
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(wheels.iterdir())) as archive:
        archive.extractall(site)
    (site / "requirements.pth").write_text(f"{SITE_PACKAGES}\n")  # torch
    return environment / "bin" / "python", copy


def test_an_editable_install_shows_fastbert_and_nothing_beside_it(editable, tmp_path):
    python, copy = editable
    code = (
        "import importlib.util, pathlib, fastbert\n"
        "print(pathlib.Path(fastbert.__file__).resolve())\n"
        "for name in ('kernels', 'bench', 'csrc', 'tests'):\n"
        "    spec = importlib.util.find_spec(name)\n"
        f"    assert spec is None or {str(copy)!r} not in str(spec), spec\n"
        "print(importlib.util.find_spec('fastbert.kernels.layer_norm').has_location)\n"
    )
    command = [python, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(copy / "fastbert" / "__init__.py"), "True"]
    (path_file,) = python.parents[1].glob("lib/python*/site-packages/__editable__*.pth")
    shown = Path(path_file.read_text().strip())
    assert [entry.name for entry in shown.iterdir()] == ["fastbert"]


def marked(script: Path) -> set[tuple[str, int]]:
    """(file, line) of the lines that say they are wrong."""
    lines = script.read_text().splitlines()
    return {(script.name, n) for n, line in enumerate(lines, 1) if line.endswith("  # error")}


def pyright(python: Path, folder: Path) -> dict[tuple[str, int], str]:
    """basedpyright by pyright's own strict rules; it is pyright with all that it needs in the wheel."""
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python, "-p", folder]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return {
        (Path(found["file"]).name, found["range"]["start"]["line"] + 1): found["message"]
        for found in json.loads(done.stdout)["generalDiagnostics"]
        if found["severity"] == "error"
    }


# Parts of torch that the scripts do not use: without them mypy takes 6 seconds instead of 13.
UNREAD = """
    _decomp _dynamo _export _functorch _higher_order_ops _inductor _prims _prims_common _refs _subclasses ao
    distributed export func fx onnx profiler sparse testing
"""


def mypy(python: Path, folder: Path) -> dict[tuple[str, int], str]:
    """mypy, by its strict rules."""
    unread = ",".join(f"torch.{part}.*" for part in UNREAD.split())
    (folder / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\n[mypy-{unread},sympy.*]\nfollow_imports = skip\n"
    )
    cache = ["--cache-dir", ROOT / ".mypy_cache"]  # what it knows of torch
    command = [sys.executable, "-m", "mypy", "--python-executable", python, *cache, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.stderr == ""
    found = re.findall(r"^(\S+\.py):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return {(name, int(line)): message for name, line, message in found}


@pytest.mark.sweep
@pytest.mark.parametrize("checker", (pyright, mypy), ids=("pyright", "mypy"))
def test_type_checkers_pass_what_is_right_and_flag_what_is_wrong(checker, editable, tmp_path):
    for name in ("user.py", "mistakes.py"):
        shutil.copy(SCRIPTS / name, tmp_path / name)
    found = checker(editable[0], tmp_path)
    wrong = marked(SCRIPTS / "mistakes.py")
    assert len(wrong) > 35
    assert marked(SCRIPTS / "user.py") == set()
    assert {place: message for place, message in found.items() if place not in wrong} == {}
    assert wrong - set(found) == set()


def test_every_family_has_each_class_that_berts_classes_say_it_has():
    for base in (
        fastbert.BertModel,
        *(getattr(fastbert, name) for name in fastbert.__all__ if name.startswith("BertFor")),
    ):
        for model_type in getattr(base, "model_types", FAMILIES):
            family = FAMILIES[model_type]
            name = family.class_prefix + family.class_names.get(base.task, base.task)
            made = getattr(fastbert, name)
            assert made.__name__ == made.__qualname__ == name
            home = "heads." if made is base and base.task != "Model" else family.module
            assert made.__module__.startswith(f"fastbert.models.{home}")
            assert issubclass(made, base)
            assert made is base or made.model_type == model_type


@pytest.mark.parametrize(
    ("model", "call"),
    (
        (fastbert.BertModel, calls.EncoderCall),
        (fastbert.BertForNextSentencePrediction, calls.LabelsCall),
        (fastbert.BertForMultipleChoice, calls.ChoicesCall),
        (fastbert.BertForMaskedLM, calls.MaskedLMCall),
        (fastbert.BertForPreTraining, calls.PreTrainingCall),
        (fastbert.AlbertForPreTraining, calls.AlbertPreTrainingCall),
        (fastbert.BertForQuestionAnswering, calls.SpanCall),
    ),
    ids=lambda x: x.__name__,
)
def test_calls_are_typed_as_forward_is(model, call):
    declared = next(
        vars(c)["__annotations__"]["__call__"] for c in model.__mro__ if "__call__" in c.__annotations__
    )
    assert declared == call.__name__
    refused = {"encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache", "packed"}
    refused.add("more")
    forward, typed = inspect.signature(model.forward), inspect.signature(call.__call__)
    given = {name: p for name, p in forward.parameters.items() if name not in refused}
    *places, options = typed.parameters.values()
    (keys,) = typing.get_args(typing.get_type_hints(call.__call__)[options.name])
    annotations = {name: key.__forward_arg__ for name, key in keys.__annotations__.items()}
    assert list(given) == [p.name for p in places] + list(annotations)
    for p in places:
        assert (p.kind, p.default) == (given[p.name].kind, given[p.name].default)
    for name in annotations:
        assert given[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert not given[name].default
    annotations |= {p.name: p.annotation for p in places if p.name != "self"}
    for name, annotation in annotations.items():
        assert annotation in ("Any", given[name].annotation)
    assert forward.return_annotation == f"{typed.return_annotation} | tuple[Any, ...]"
    assert typing.get_type_hints(call.__call__)["return"] is not None
