"""The version of fastbert, where every room can read it. `pyproject.toml` states the same."""

from __future__ import annotations

VERSION = "0.1.0"
