"""The words that are not written here, found in pages, comments, docstrings and texts of the program.

    python docs/words.py [FILE ...]    print file, line, words, what to write instead; exit status 1 if any

Without a FILE it reads all tracked files. Case does not matter, and a line break counts as a space.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# (words, what to write instead); a space in the words is any white space
WORDS = [
    ("whoever|whomever", "name the program, the file or the user"),
    (
        "(?:nobody|no one|somebody|someone|anybody|everybody)(?![/-])",
        "name what acts: no caller, each thread, all peers",
    ),
    ("who (?:runs|serves|holds|computes|checks|failed|calls)", "which"),
    ("says who", "names"),
    ("(?:is|are|was|were|be|being) told", "receives, takes, is passed"),
    ("(?:go|goes|going|went) on", "continue, resume; of a call: is passed on to"),
    (
        "stands|(?:stand|stood) (?:for|before|first|there|in|at|on|beside)",
        "is; mean, represent; override; come first",
    ),
    ("the others", "name them: the other rows"),
    ("(?<!so\\s)that one(?=[,.;:)]| (?:is|was|has) )", "name it"),
    ("of the first(?=[,.;:)]| it )", "name it"),
    ("the (?:[a-z]+ before's|ones? before)|of before", "the previous"),
    (
        "(?:tokens|sentences|texts|requests|steps|bytes|[KMG]i?B|FLOPs?|ops|labels?|rows?|times)"
        " an? (?:second|step|call|sequence|sentence|token|text|row|layer|line|core|thread)",
        "per",
    ),
    ("came into being", "was created"),
    ("turn by turn", "interleaved"),
]
PATTERNS = [(re.compile(rf"(?i)\b(?:{words})\b".replace(" ", r"\s+")), instead) for words, instead in WORDS]
KINDS = {".md", ".py", ".h", ".cpp", ".cu", ".cuh", ".toml", ".sh"}
SKIPPED = re.compile(r"docs/words\.py|bench/results/")


def hits(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, the words, what to write instead) of each hit, in the text of a page or a source file.

    Code needs no parsing, because it has none of these words; marks of comments and strings count as spaces.
    """
    text = re.sub(r"[#\"]|//", " ", text)
    for pattern, instead in PATTERNS:
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def main(files: list[str]) -> int:
    """Print the hits of the files, of all tracked ones if none is named; 1 if there are any."""
    if not files:
        listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
        files = [file for file in listed if Path(file).suffix in KINDS and not SKIPPED.match(file)]
    found = [(file, *hit) for file in files for hit in sorted(hits(Path(file).read_text(encoding="utf-8")))]
    for file, line, words, instead in found:
        print(f"{file}:{line}: {words!r}: write {instead}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
