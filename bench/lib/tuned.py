"""The table of tuned configs: read, extended by an entry, or by what another machine recorded."""

from __future__ import annotations

import json
from pathlib import Path

from bench.lib import lines
from bench.lib.report import write_atomically
from fastbert.kernels import tuning


def read_table(path: Path, name: str) -> dict:
    """What the file holds. Raises if it belongs to another device."""
    if not path.exists():
        return {"device": name}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--out {path}: is no JSON: {error}") from error
    if not isinstance(table, dict) or table.get("device") != name:
        whose = table.get("device") if isinstance(table, dict) else None
        raise ValueError(f"--out {path}: is the table of {whose!r}, not of {name!r}")
    return table


def with_entry(table: dict, entry: list, config: dict) -> dict:
    """The table with one more entry, or a newer one; sorted, so that two runs differ in configs only."""
    op, key, bucket = entry
    buckets = table.get(op, {}).get(key, {}) | {str(bucket): config}
    keys = table.get(op, {}) | {key: {b: buckets[b] for b in sorted(buckets, key=int)}}
    table = table | {op: {key: keys[key] for key in sorted(keys)}}
    return {"device": table["device"], **{op: table[op] for op in sorted(table) if op != "device"}}


def merge(record: Path, path: Path | None = None) -> tuple[Path, int]:
    """Take the entries of a run's `--json` file into the table; the table's path and how many there were.

    Raises:
        ValueError: the file is of no run on a GPU, or the table is of another one.
    """
    data = lines.read(record) if record.suffix == ".jsonl" else json.loads(record.read_text(encoding="utf-8"))
    where = data.get("environment", {})
    if where.get("device_type") != "cuda":
        raise ValueError(f"--merge {record}: is of no run on a GPU")
    path = path or tuning.file_of(where["device"])
    table = read_table(path, where["device"])
    entries = [row for row in data["rows"] if row.get("step") == "tuning" and "config" in row]
    for row in entries:
        table = with_entry(table, row["entry"], row["config"])
    if entries:
        write_atomically(path, table)
    return path, len(entries)
