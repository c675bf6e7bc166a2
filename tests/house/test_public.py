"""What `import fastbert` provides, and what it loads."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest
import transformers

import fastbert
from fastbert import models
from fastbert.models.families import FAMILIES

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(code: str, *paths: pathlib.Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)


def test_import_is_light_and_silent():
    loaded = run(
        "import fastbert, sys; assert not {'torch', 'numpy', 'transformers', 'triton'} & set(sys.modules)"
    )
    assert loaded.stdout == loaded.stderr == ""
    used = run(
        "import fastbert, sys; fastbert.BertForMaskedLM; "
        "assert not {'transformers', 'triton'} & set(sys.modules)"
    )
    assert used.stdout == used.stderr == ""


def test_every_public_name_resolves():
    for name in fastbert.__all__:
        value = getattr(fastbert, name)
        if inspect.isclass(value) and name != "BertConfig":
            assert value.__name__ == name
    assert set(fastbert.__all__) <= set(dir(fastbert))
    assert fastbert.BertConfig is fastbert.EncoderConfig
    with pytest.raises(AttributeError, match="no attribute 'BertForCausalLM'"):
        fastbert.BertForCausalLM
    with pytest.raises(ImportError):
        exec("from fastbert import nothing_of_this_name")


def test_every_model_class_is_public_and_named_as_transformers_names_it():
    prefixes = {family.class_prefix for family in FAMILIES.values()}
    paths = pkgutil.walk_packages(models.__path__, "fastbert.models.")
    ours = {
        name
        for module in [importlib.import_module(path.name) for path in paths]
        for name, value in vars(module).items()
        if inspect.isclass(value) and re.split("For|Model", name)[0] in prefixes
    }
    public = {n for n in fastbert.__all__ if re.split("For|Model", n)[0] in prefixes}
    assert ours == public
    theirs = {
        name
        for prefix in prefixes
        for name in dir(transformers)
        if re.fullmatch(rf"{prefix}(Model|For(?!CausalLM)\w+)", name)
    }
    assert ours == theirs


def test_version_is_the_packages():
    stated = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert fastbert.__version__ == stated


def test_the_unrelated_project_of_this_name_is_named_once(tmp_path):
    folder = tmp_path / "fastbert-0.2.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fastbert\nVersion: 0.2.2\n")
    done = run("import fastbert; fastbert.BertModel; import fastbert", tmp_path)
    assert done.stdout == ""
    assert done.stderr.count("'fastbert' 0.2.2, an unrelated project") == 1
    assert str(tmp_path) in done.stderr


def test_help_is_short_and_loads_nothing():
    """Also after classes were used; pydoc would print all their methods."""
    code = "import fastbert, pydoc, sys\n{}text = pydoc.render_doc(fastbert)\n"
    code += "print('torch' in sys.modules, text)"
    loaded, text = run(code.format("")).stdout.split(" ", 1)
    assert loaded == "False"
    assert len(text.splitlines()) < 100
    assert "AutoModelFor…" in text
    used = run(code.format("fastbert.BertModel, fastbert.explain\n")).stdout
    assert len(used.splitlines()) == len(text.splitlines())
    listed = run("import fastbert; fastbert.BertModel; print(*dir(fastbert))").stdout.split()
    assert {name for name in listed if not name.startswith("__")} == set(fastbert.__all__) - {"__version__"}
