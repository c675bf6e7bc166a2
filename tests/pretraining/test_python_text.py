"""examples/python_text.py: the docstrings of a folder's modules, the language reference, the licence."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "python_text.py"
if not SCRIPT.is_file():
    pytest.skip("no examples here", allow_module_level=True)

CLASS = 'class A:\n    """Of a class."""\n    def f(self):\n        """Of a\n        method."""\n'
LONG = "A sentence of a docstring that says what its function does. " * 5


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("python_text", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library(tmp_path, script, monkeypatch):
    """A standard library of five files."""
    folder = tmp_path / "library"
    for name, text in {
        "b.py": f'"""{LONG}"""\n{CLASS}',
        "a.py": f'"""{LONG}"""\n',
        "short.py": '"""Too few words."""\n',
        "broken.py": "def (:\n",
        "test/of_a.py": f'"""{LONG}"""\n',
        "site-packages/other.py": f'"""{LONG}"""\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "LICENSE.txt").write_text(LONG)
    monkeypatch.setattr(script.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(script, "PACKAGES", ("a_package_that_is_not_installed",))
    return folder


def test_a_document_per_module(script, library, tmp_path, monkeypatch, capsys):
    out = tmp_path / "text.jsonl"
    monkeypatch.setattr(sys, "argv", ["python_text.py", str(out)])
    script.main()
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    first, second, *topics, licence = texts
    assert first == LONG.strip()  # a.py; files in the order of their names
    # white space within a docstring is one space
    assert second == f"{LONG.strip()}\nOf a class.\nOf a method."
    assert licence.strip() == LONG.strip()
    assert len(topics) > 50
    assert any("assert" in text for text in topics)
    assert min(len(text.split()) for text in texts) >= script.LEAST_WORDS
    said = capsys.readouterr().out
    words = sum(len(text.split()) for text in texts)
    assert said == f"{out}: {len(texts):,} documents, {words:,} words\n"
