"""A folder of verdicts for each test, and kernels that are planted in processes that check."""

import sys
from pathlib import Path

import pytest

from fastbert.backends import aten
from fastbert.runtime import dispatch
from fastbert.testing import checking, proving, verdicts
from tests.support.fake_backends import fake_backend
from tests.support.planted_kernel import FLOATS

PLANTED = Path(__file__).resolve().parents[1] / "support" / "planted_kernel.py"

FAKE = """
import json, sys, time
units = json.loads(sys.argv[1])["units"]
print(json.dumps(units), file=open({path!r}, "a"), flush=True)
def send(**message):
    print(json.dumps(message), flush=True)
def end(reason=None, outcome="passed", times=(), broken=False):
    send(reason=reason, outcome=outcome, seconds=0.5, date="now", times=times, broken=broken)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_warned", False)
    return tmp_path / "cache" / "self_checks"


@pytest.fixture
def nothing_known(monkeypatch):
    monkeypatch.setattr(verdicts, "found", {})
    monkeypatch.setattr(proving, "_alone", set())
    monkeypatch.setattr(dispatch, "_resolved", {})


@pytest.fixture
def apart(nothing_known, monkeypatch):
    """First checks on a CPU run in a process of their own."""
    monkeypatch.setattr(checking, "DEVICES", ("cuda", "cpu"))


@pytest.fixture
def planted(monkeypatch):
    """A function that plants a kernel of layer_norm in processes that check; in this one it is good."""
    served = []
    module = fake_backend(
        monkeypatch, layer_norm_fwd=lambda *args: served.append(1) or aten.layer_norm_fwd(*args)
    )
    module.DTYPES = {"layer_norm": FLOATS}

    def plant(behaviours):
        monkeypatch.setattr(checking, "COMMAND", [sys.executable, str(PLANTED), behaviours, "check"])
        return served

    return plant


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A function that makes a script the process that checks; it returns the file of what it is asked for."""
    path = tmp_path / "asked"

    def plant(code):
        monkeypatch.setattr(checking, "COMMAND", [sys.executable, "-c", FAKE.format(path=str(path)) + code])
        return path

    return plant
