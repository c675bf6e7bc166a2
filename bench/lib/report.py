"""A run's file: its head, its steps and its rows, on the disk as soon as they are known, and printed."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.lib import lines
from bench.lib.machine import commit_here
from bench.lib.turns import told

SCHEMA = 1


def write_atomically(path: Path, data: dict) -> None:
    """Replace the file by the data in one step: a reader sees the old or the new text, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def row_line(row: dict) -> str:
    name = f"{'*' if row.get('serves') else ''}{row['name']:<60}"
    if row["status"] != "ok":
        why = (row.get("error") or "").strip() or "no message"
        return f"{name} {row['status']}: {why.splitlines()[0][:150]}"
    if "samples_ms" not in row and "peak_mib" not in row:
        known = ("step", "name", "status")
        return f"{name} " + " ".join(f"{key}={value}" for key, value in row.items() if key not in known)
    return f"{name} {'  '.join(told(row))}".rstrip()


class Report:
    """The run so far; saved after every change: a file `*.jsonl` grows by a line, any other is replaced.

    `line` is the printed form of a row.
    """

    def __init__(
        self, path: Path | None, settings: dict, note: str | None, line: Callable[[dict], str] = row_line
    ):
        self.path, self.line = path, line
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.data = {
            "schema": SCHEMA,
            "date": now,
            "finished": False,
            "note": note,
            **commit_here(),
            "settings": settings,
            "environment": {},
            "steps": [],
            "rows": [],
        }

    def save(self) -> None:
        """Record everything but rows and steps anew."""
        self._save("head", {key: value for key, value in self.data.items() if key not in ("rows", "steps")})

    def _save(self, kind: str, value: dict) -> None:
        if self.path is None:
            return
        if self.path.suffix == ".jsonl":
            lines.append(self.path, kind, value)
        else:
            write_atomically(self.path, self.data)

    def end(self, **facts: object) -> None:
        """Record that the run came to its end, and these facts."""
        self.data |= {"finished": True, **facts}
        self.save()

    def row(self, row: dict) -> None:
        self.data["rows"].append(row)
        self._save("row", row)
        print(self.line(row), flush=True)

    def step(
        self, name: str, status: str, seconds: float, reason: str | None, clocks: dict | None = None
    ) -> None:
        record = {"step": name, "status": status, "seconds": round(seconds, 2), "reason": reason}
        self.data["steps"].append(record | {"clocks_after": clocks})
        self._save("step", self.data["steps"][-1])
        ending = "" if reason is None else f": {reason.splitlines()[0][:150]}"
        print(f"# {name}: {status} after {seconds:.1f} s{ending}", flush=True)


def count(text: str) -> int:
    """A whole number above zero."""
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number above 0")
    return int(text)
