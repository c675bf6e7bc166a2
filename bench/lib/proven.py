"""The shipped tables of proofs, `fastbert/testing/proven/<gpu>.json`, made from self-checks of GPU runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from bench.lib.roofs import TAGS
from fastbert.testing import verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import PASSED, SLOWER, Verdict

# Parts of a proof's key whose change makes an earlier proof worthless.
_CONTENT = ("source", "tuned")


def row_of(unit: Unit, found: Verdict, device: torch.device) -> dict:
    """The row of a run's file: the verdict, and the key of the proof that it is, if it may be one."""
    key = verdict_keys.proof_key_of(unit, device)
    facts = {name: getattr(found, name) for name in ("outcome", "reason", "date", "seconds")}
    return {
        "step": "selfcheck",
        "name": f"{unit.op}-{unit.backend}-{TAGS.get(unit.dtype, verdict_keys.name_of(unit.dtype))}",
        "status": "ok" if found.outcome in (PASSED, SLOWER) else "failed",
        **facts,
        "times": [list(time) for time in found.times],
        # what the table has already is not new
        "key": None if found.commit else key,
    }


def merge(rows: Iterable[dict], commit: str | None, folder: Path = verdicts.FOLDER) -> list[Path]:
    """Put the proofs of a run into the tables of their GPUs; returns the files that were written.

    A proof replaces the earlier one of the same kernel, GPU and compilers.

    Args:
        rows: rows of a run; rows of other steps than checks are skipped.
        commit: commit of the tree that ran, for rows without one.
        folder: instead of the shipped one.
    """
    found: dict[Path, list[dict]] = {}
    for row in rows:
        proven = row.get("step") == "selfcheck" and row["outcome"] in (PASSED, SLOWER)
        if proven and row["key"] and (row.get("commit") or commit):
            proof = {name: row[name] for name in ("outcome", "reason", "date", "times", "key")}
            path = folder / verdicts.table_of(row["key"]["device"]).name
            found.setdefault(path, []).append({"commit": row.get("commit") or commit, **proof})
    for path, proofs in found.items():
        before = json.loads(path.read_text())["proofs"] if path.is_file() else []
        kept = {_kernel(proof): proof for proof in before + proofs}
        text = ",\n".join(json.dumps(kept[name]) for name in sorted(kept))
        path.write_text(f'{{"device": {json.dumps(proofs[0]["key"]["device"])}, "proofs": [\n{text}\n]}}\n')
    return list(found)


def _kernel(proof: dict) -> tuple[str, ...]:
    return tuple(value for name, value in proof["key"].items() if name not in _CONTENT)
