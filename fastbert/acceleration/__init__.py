"""Models of transformers and sentence-transformers on our kernels: `fastbert.accelerate(model)`.

    model = AutoModelForSequenceClassification.from_pretrained(path)  # transformers
    fastbert.accelerate(model)

The model stays the same object, with its parameters, configuration, hooks and methods. Only the classes of
its encoder and of each encoder layer change (classes.py).

in_place.py   `accelerate` and `restore`
report.py     `explain`
parts.py      finds encoders and layers in a model
model.py      the encoder: removes padding once per call if all layers are fused and nothing looks inside
model_gaps.py why an encoder keeps its padding
layer.py      a layer: fused if all its parts are unchanged, else as transformers runs it
layer_gaps.py why a layer cannot be fused
blocks.py     what differs in BigBird
streams.py    XLNet's layers, and what its heads read
spans.py      a question-answering head: masked tokens get no probability
watching.py   what looks at a module: hooks, FSDP, tracers
interface.py  our attention alone, set on models of no family
attention.py  the two functions that transformers' attention interface then calls
sentences.py  `SentenceTransformer.encode` with batches measured in tokens

Imports from `models`, `sentences` and below. Nothing here imports transformers, except `attention.register`
for a model of transformers, which is imported with such a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastbert.acceleration.in_place import accelerate, restore
    from fastbert.acceleration.report import ExecutorReport, Explanation, LayerReport, ModelReport, explain

__all__ = ["ExecutorReport", "Explanation", "LayerReport", "ModelReport", "accelerate", "explain", "restore"]

# Hidden from type checkers, for which it would make any name public
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place = "in_place" if name in ("accelerate", "restore") else "report"
        value = getattr(importlib.import_module(f"fastbert.acceleration.{place}"), name)
        globals()[name] = value
        return value
