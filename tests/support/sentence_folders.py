"""Folders of all-MiniLM-L6-v2 that tests change."""

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()[::3]


def changeable(directory, folder):
    """Copy the small files of the directory and link its weights, so that a test can change the copy."""
    shutil.copytree(
        directory, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md", "data_config.json")
    )
    (folder / "model.safetensors").symlink_to(directory / "model.safetensors")
    return folder


def rewrite(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
