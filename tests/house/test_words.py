"""`make lint` finds the words that are not written here (docs/words.py), in every kind of file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "words.py"
if not SCRIPT.is_file():
    pytest.skip("no docs here", allow_module_level=True)

BAD = "Run" + " by who" + "ever goes" + "\n{mark} on."
FILES = {
    "page.md": "# A page\n\n" + BAD,
    "module.py": '"""A module.\n\n' + BAD + '\n"""\n',
    "comment.py": "x = 1\n\n# " + BAD + "\n",
    "error.py": 'raise ValueError(\n    "x: ' + BAD.replace("\n", ' "\n    "') + '")\n',
    "kernel.cu": "// A kernel.\n\n// " + BAD + "\nint x;\n",
    "run.sh": "#!/bin/sh\n\n# " + BAD + "\n",
}
MARKS = {"comment.py": "#", "kernel.cu": "//", "run.sh": "#"}


@pytest.mark.parametrize("name", FILES)
def test_words_are_found_in_every_kind_of_file(name, tmp_path):
    """Each with its line, also where a line ends between two of the words."""
    path = tmp_path / name
    path.write_text(FILES[name].format(mark=MARKS.get(name, "")))
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    line = 2 if name == "error.py" else 3
    assert [found.partition(": write ")[0] for found in lines] == [
        f"{path}:{line}: '{words}'" for words in ("goes" + " on", "who" + "ever")
    ]


def test_other_words_are_not_found(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "The call is passed on, so that one program owns the first row, which stan" + "ds.upper() names."
    )
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)
    assert [line.split("'")[1] for line in done.stdout.splitlines()] == ["stan" + "ds"]
    path.write_text("The call is passed on, so that one program owns 2 rows per block, of the first kind.\n")
    assert subprocess.run([sys.executable, SCRIPT, path]).returncode == 0
