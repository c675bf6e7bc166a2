"""Where classes are now that pickles know by an older module.

A pickle names a class by its module. Until November 2026 the modules were files at the top of the package.
Pickles and `torch.save(model)` files of that time load: a finder answers for the modules that are gone, and
the packages that took over a name (`layers`, `models`) ask `find` for names that they lack.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old module -> name -> module now. Public names are not listed: `fastbert` itself knows where they are.
PLACES: dict[str, dict[str, str]] = {
    "config": {},
    "deferred": dict.fromkeys(("DeferredTensor", "NotComputed"), "models.deferred"),
    "dispatch": {
        "BackendError": "runtime.dispatch",
        "Choice": "testing.serving",
        "Proof": "testing.serving",
    },
    "encoding": {"SentenceSettings": "sentences.settings", "TokenBatch": "sentences.tokenizer"},
    "families": {
        **dict.fromkeys(("LayerNames", "LMHead", "ClassifierHead"), "models.paths"),
        "Family": "models.families",
    },
    "files": {"Stamp": "checkpoint.files"},
    "heads": {},
    "layers": {
        "Embeddings": "layers.embeddings",
        "EncoderLayer": "layers.encoder",
        "LayerForm": "layers.encoder",
        "LayerMath": "layers.encoder",
        "Sequences": "layers.encoder",
    },
    "lookalike": {"_blank": "models.lookalike"},
    "models": {},
    "outputs": dict.fromkeys(
        (
            "ModelOutput",
            "BaseModelOutputWithPooling",
            "PreTrainingOutput",
            "AlbertPreTrainingOutput",
            "LogitsOutput",
            "QuestionAnsweringOutput",
            "_rebuild",
        ),
        "models.outputs",
    ),
    "packing": {"Packing": "layers.packing"},
    "quantization": {"QuantizedLinear": "layers.quantized"},
    "task_model": {"Encoded": "models.heads.task_model"},
    "verdicts": {"Verdict": "testing.verdicts"},
    "vocabulary_heads": {},
    "warmup": {"Result": "testing.warmup"},
}


def find(module: str, name: str) -> Any:
    """What the old `module` ("fastbert.heads") held under `name`.

    Raises:
        AttributeError: it held no such thing, or nothing that pickles name.
    """
    place = PLACES.get(module.removeprefix("fastbert."), {}).get(name)
    if place is not None:
        return getattr(importlib.import_module(f"fastbert.{place}"), name)
    package = sys.modules["fastbert"]
    if name in package.__all__ and not name.startswith("_"):
        return getattr(package, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _Finder:
    """Last on sys.meta_path: makes a module of the old name out of `find`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        return ModuleSpec(name, _Finder()) if package == "fastbert" and module in PLACES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own kind of module will do."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        module.__doc__ = "Gone; here for pickles that name it. See fastbert/runtime/moved.py."
        module.__getattr__ = partial(find, module.__name__)  # type: ignore[method-assign]


def install() -> None:
    """Let pickles find the modules that are gone; called once, by the package."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]
