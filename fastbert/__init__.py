"""fastbert: HuggingFace's BERT encoders, packed without padding, on kernels of our own.

    import fastbert

    model = fastbert.AutoModel.from_pretrained("path/to/model")
    vectors = fastbert.encode("path/to/model", ["a sentence", "another"])
    fastbert.accelerate(model_of_transformers)
    fastbert.finetune("csv", "path/to/model", "folder/of/train.csv", "trained")

Models         AutoModel, AutoModelFor…, BertModel, BertForMaskedLM, RobertaModel, …: HuggingFace's names
Settings       EncoderConfig (BertConfig), AutoConfig
Sentences      encode, SentenceEncoder, SparseEncoder, MultiVectorEncoder, CrossEncoder
Tasks          finetune, predict
Smaller models distill, prune, eliminate, EarlyExit, quantization_report
Others' models accelerate, restore
How it runs    explain, graph, graph_training, use_backend, double_backward
Errors         CheckpointError, EncodingError

`dir(fastbert)` lists every name, and `help(fastbert.NAME)` says what it does.

Names are imported at their first use: `import fastbert` alone loads neither torch nor a backend.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from fastbert.runtime.version import VERSION as __version__

# Public name -> its module, from the file that type checkers read
_IMPORTS = re.findall(r"from (\S+) import \(?\s*(\w+) as", Path(__file__).with_suffix(".pyi").read_text())
_PLACES = {name: module for module, name in _IMPORTS} | {"BertConfig": ".models.config"}
__all__ = ["__version__", *sorted(_PLACES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fastbert' has no attribute {name!r}")
    module = importlib.import_module(f"fastbert{_PLACES[name]}")
    value = globals()[name] = getattr(module, "EncoderConfig" if name == "BertConfig" else name)
    return value


def __dir__() -> list[str]:
    # help() reads the members through inspect.getmembers, and would print every class, some 80,000 lines. So
    # it finds the module's own names alone; the docstring lists the public names.
    if sys._getframe(1).f_globals.get("__name__") == "inspect":
        return sorted({*globals()} - {*__all__})
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _warn_of_others() -> None:
    """Warn of another distribution whose files lie in our folder: PyPI's `fastbert`, or both of ours."""
    other, what = _distribution("fastbert"), "an unrelated project"
    if other is None and _distribution("fastbert-kernels") is not None:
        other, what = _distribution("fastbert-kernels-cu13"), "the same package with CUDA kernels"
    if other is None:
        return
    name = other.metadata["Name"]
    warnings.warn(
        f"the distribution {name!r} {other.version}, {what}, is installed at "
        f"{other.locate_file('')} and has a module of the same name as 'fastbert-kernels': whichever was "
        f"installed last wins, file by file. Run `pip uninstall {name}`, then "
        "`pip install --force-reinstall --no-deps fastbert-kernels`",
        stacklevel=3,
    )


_warn_of_others()
