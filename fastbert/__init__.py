"""fastbert: HuggingFace's BERT encoders, packed without padding, on kernels of our own.

    import fastbert

    model = fastbert.AutoModel.from_pretrained("path/to/model")
    vectors = fastbert.encode("path/to/model", ["a sentence", "another"])
    fastbert.accelerate(model_of_transformers)

Names are imported at their first use: `import fastbert` alone loads neither torch nor a backend.
"""

from __future__ import annotations

import importlib
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {  # public name -> where it is defined; an alias names its target after a colon
    "AutoModel": "models",
    "AutoModelForMaskedLM": "heads",
    "AutoModelForMultipleChoice": "heads",
    "AutoModelForNextSentencePrediction": "heads",
    "AutoModelForPreTraining": "heads",
    "AutoModelForQuestionAnswering": "heads",
    "AutoModelForSequenceClassification": "heads",
    "AutoModelForTokenClassification": "heads",
    "BertConfig": "config:EncoderConfig",
    "CheckpointError": "checkpoint",
    "EncoderConfig": "config",
    "EncodingError": "encoding",
    "SentenceEncoder": "encoding",
    "accelerate": "acceleration",
    "encode": "encoding",
    "explain": "dispatch",
    "graph": "graphs",
    "restore": "acceleration",
    "use_backend": "dispatch",
}

_HEADS = (
    "ForMaskedLM",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
)
# Each family's classes, under HuggingFace's names
for _family, _further in {
    "Albert": ("ForPreTraining",),
    "Bert": ("ForPreTraining", "ForNextSentencePrediction"),
    "Camembert": (),
    "DistilBert": (),
    "Electra": ("ForPreTraining",),
    "Ernie": ("ForPreTraining", "ForNextSentencePrediction"),
    "MPNet": (),
    "Roberta": (),
    "XLMRoberta": (),
}.items():
    _PUBLIC |= {f"{_family}Model": "models", **{_family + head: "heads" for head in (*_HEADS, *_further)}}
del _family, _further

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:  # what type checkers and editors see; the families' other names are made at run time
    from fastbert.acceleration import accelerate as accelerate
    from fastbert.acceleration import restore as restore
    from fastbert.checkpoint import CheckpointError as CheckpointError
    from fastbert.config import EncoderConfig as BertConfig  # noqa: F401
    from fastbert.config import EncoderConfig as EncoderConfig
    from fastbert.dispatch import explain as explain
    from fastbert.dispatch import use_backend as use_backend
    from fastbert.encoding import EncodingError as EncodingError
    from fastbert.encoding import SentenceEncoder as SentenceEncoder
    from fastbert.encoding import encode as encode
    from fastbert.graphs import graph as graph
    from fastbert.heads import AlbertForPreTraining as AlbertForPreTraining
    from fastbert.heads import AutoModelForMaskedLM as AutoModelForMaskedLM
    from fastbert.heads import AutoModelForMultipleChoice as AutoModelForMultipleChoice
    from fastbert.heads import AutoModelForNextSentencePrediction as AutoModelForNextSentencePrediction
    from fastbert.heads import AutoModelForPreTraining as AutoModelForPreTraining
    from fastbert.heads import AutoModelForQuestionAnswering as AutoModelForQuestionAnswering
    from fastbert.heads import AutoModelForSequenceClassification as AutoModelForSequenceClassification
    from fastbert.heads import AutoModelForTokenClassification as AutoModelForTokenClassification
    from fastbert.heads import BertForMaskedLM as BertForMaskedLM
    from fastbert.heads import BertForMultipleChoice as BertForMultipleChoice
    from fastbert.heads import BertForNextSentencePrediction as BertForNextSentencePrediction
    from fastbert.heads import BertForPreTraining as BertForPreTraining
    from fastbert.heads import BertForQuestionAnswering as BertForQuestionAnswering
    from fastbert.heads import BertForSequenceClassification as BertForSequenceClassification
    from fastbert.heads import BertForTokenClassification as BertForTokenClassification
    from fastbert.heads import ElectraForPreTraining as ElectraForPreTraining
    from fastbert.models import AutoModel as AutoModel
    from fastbert.models import BertModel as BertModel


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fastbert' has no attribute {name!r}")
    module, _, target = _PUBLIC[name].partition(":")
    value = getattr(importlib.import_module(f"fastbert.{module}"), target or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _warn_of_the_other_project() -> None:
    """PyPI's `fastbert` is an unrelated project whose files have our folder and partly our names."""
    try:
        other = metadata.distribution("fastbert")
    except metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"the distribution 'fastbert' {other.version}, an unrelated project, is installed at "
        f"{other.locate_file('')} and has a module of the same name as 'fastbert-kernels': whichever was "
        "installed last wins, file by file. Run `pip uninstall fastbert`, then "
        "`pip install --force-reinstall --no-deps fastbert-kernels`",
        stacklevel=3,
    )


_warn_of_the_other_project()
