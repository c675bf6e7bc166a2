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


@pytest.mark.sweep
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
    # All but those whose classes are the hub's own code
    known = {prefix for prefix in prefixes if hasattr(transformers, f"{prefix}Model")}
    ours = {name for name in ours if re.split("For|Model", name)[0] in known}
    # DeBERTa-v3's discriminator, which transformers does not have
    ours.remove("DebertaV2ForReplacedTokens")
    theirs = {
        name
        for prefix in known
        for name in dir(transformers)
        if re.fullmatch(rf"{prefix}(Model|For(?!CausalLM)\w+)", name)
    }
    assert ours == theirs


def test_version_is_the_packages():
    stated = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert fastbert.__version__ == stated


def test_import_is_light_and_help_is_short(tmp_path):
    """The help also after classes were used; pydoc would print all their methods.

    The unrelated project of this name is named once.
    """
    folder = tmp_path / "fastbert-0.2.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fastbert\nVersion: 0.2.2\n")
    done = run(
        "import fastbert, pydoc, sys\n"
        "text = pydoc.render_doc(fastbert)\n"
        "assert not {'torch', 'numpy', 'transformers', 'triton'} & set(sys.modules)\n"
        "assert 'AutoModelFor…' in text and text.count('\\n') < 100\n"
        "fastbert.BertForMaskedLM, fastbert.explain\n"
        "assert not {'transformers', 'triton'} & set(sys.modules)\n"
        "import fastbert\n"
        "assert pydoc.render_doc(fastbert).count('\\n') == text.count('\\n')\n"
        "print(*dir(fastbert))",
        tmp_path,
    )
    # Python 3.13 adds the line of code
    assert done.stderr.count("Warning:") == done.stderr.count("'fastbert' 0.2.2, an unrelated project") == 1
    assert str(tmp_path) in done.stderr
    listed = {name for name in done.stdout.split() if not name.startswith("__")}
    assert listed == set(fastbert.__all__) - {"__version__"}
