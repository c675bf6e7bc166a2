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
import sys
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fastbert.runtime.version import VERSION as __version__

# Public name -> module, with a colon and the name there if it differs. Model classes are not listed: the Auto
# classes are in models/auto.py, BERT's heads in models/heads, and other models in their family's module.
_PLACES = {
    "BertConfig": "models.config:EncoderConfig",
    "CheckpointError": "checkpoint.files",
    "CrossEncoder": "sentences.cross_encoder",
    "EarlyExit": "compression.early_exit",
    "EncoderConfig": "models.config",
    "EncodingError": "sentences.tokenizer",
    "MultiVectorEncoder": "sentences.multi_vector",
    "SentenceEncoder": "sentences.encoder",
    "SparseEncoder": "sentences.sparse_encoder",
    "accelerate": "acceleration",
    "clear": "runtime.prepared",
    "distill": "compression.distillation.run",
    "double_backward": "ops.checks",
    "eliminate": "compression.elimination",
    "encode": "sentences.encoder",
    "explain": "acceleration",
    "finetune": "finetuning.run",
    "graph": "graphs.model",
    "graph_training": "graphs.training",
    "predict": "finetuning.predict",
    "prune": "compression.pruning",
    "quantization_report": "compression.quantization",
    "restore": "acceleration",
    "use_backend": "runtime.dispatch",
}

__all__ = [
    "AlbertForMaskedLM",
    "AlbertForMultipleChoice",
    "AlbertForPreTraining",
    "AlbertForQuestionAnswering",
    "AlbertForSequenceClassification",
    "AlbertForTokenClassification",
    "AlbertModel",
    "AutoConfig",
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
    "AutoModelForPreTraining",
    "AutoModelForQuestionAnswering",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "BigBirdForMaskedLM",
    "BigBirdForMultipleChoice",
    "BigBirdForPreTraining",
    "BigBirdForQuestionAnswering",
    "BigBirdForSequenceClassification",
    "BigBirdForTokenClassification",
    "BigBirdModel",
    "CamembertForMaskedLM",
    "CamembertForMultipleChoice",
    "CamembertForQuestionAnswering",
    "CamembertForSequenceClassification",
    "CamembertForTokenClassification",
    "CamembertModel",
    "CheckpointError",
    "CrossEncoder",
    "DebertaV2ForMaskedLM",
    "DebertaV2ForMultipleChoice",
    "DebertaV2ForQuestionAnswering",
    "DebertaV2ForReplacedTokens",
    "DebertaV2ForSequenceClassification",
    "DebertaV2ForTokenClassification",
    "DebertaV2Model",
    "DistilBertForMaskedLM",
    "DistilBertForMultipleChoice",
    "DistilBertForQuestionAnswering",
    "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification",
    "DistilBertModel",
    "EarlyExit",
    "ElectraForMaskedLM",
    "ElectraForMultipleChoice",
    "ElectraForPreTraining",
    "ElectraForQuestionAnswering",
    "ElectraForSequenceClassification",
    "ElectraForTokenClassification",
    "ElectraModel",
    "EncoderConfig",
    "EncodingError",
    "ErnieForMaskedLM",
    "ErnieForMultipleChoice",
    "ErnieForNextSentencePrediction",
    "ErnieForPreTraining",
    "ErnieForQuestionAnswering",
    "ErnieForSequenceClassification",
    "ErnieForTokenClassification",
    "ErnieModel",
    "EuroBertForMaskedLM",
    "EuroBertForSequenceClassification",
    "EuroBertForTokenClassification",
    "EuroBertModel",
    "GteForMaskedLM",
    "GteForSequenceClassification",
    "GteForTokenClassification",
    "GteModel",
    "JinaBertForMaskedLM",
    "JinaBertForMultipleChoice",
    "JinaBertForQuestionAnswering",
    "JinaBertForSequenceClassification",
    "JinaBertForTokenClassification",
    "JinaBertModel",
    "JinaEmbeddingsV3ForMaskedLM",
    "JinaEmbeddingsV3ForQuestionAnswering",
    "JinaEmbeddingsV3ForSequenceClassification",
    "JinaEmbeddingsV3ForTokenClassification",
    "JinaEmbeddingsV3Model",
    "LongformerForMaskedLM",
    "LongformerForMultipleChoice",
    "LongformerForQuestionAnswering",
    "LongformerForSequenceClassification",
    "LongformerForTokenClassification",
    "LongformerModel",
    "MPNetForMaskedLM",
    "MPNetForMultipleChoice",
    "MPNetForQuestionAnswering",
    "MPNetForSequenceClassification",
    "MPNetForTokenClassification",
    "MPNetModel",
    "MobileBertForMaskedLM",
    "MobileBertForMultipleChoice",
    "MobileBertForNextSentencePrediction",
    "MobileBertForPreTraining",
    "MobileBertForQuestionAnswering",
    "MobileBertForSequenceClassification",
    "MobileBertForTokenClassification",
    "MobileBertModel",
    "ModernBertForMaskedLM",
    "ModernBertForMultipleChoice",
    "ModernBertForQuestionAnswering",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "ModernBertModel",
    "MultiVectorEncoder",
    "NeoBertForMaskedLM",
    "NeoBertForSequenceClassification",
    "NeoBertModel",
    "NomicBertForMaskedLM",
    "NomicBertForSequenceClassification",
    "NomicBertForTokenClassification",
    "NomicBertModel",
    "RobertaForMaskedLM",
    "RobertaForMultipleChoice",
    "RobertaForQuestionAnswering",
    "RobertaForSequenceClassification",
    "RobertaForTokenClassification",
    "RobertaModel",
    "SentenceEncoder",
    "SparseEncoder",
    "XLMRobertaForMaskedLM",
    "XLMRobertaForMultipleChoice",
    "XLMRobertaForQuestionAnswering",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaForTokenClassification",
    "XLMRobertaModel",
    "XLNetForMultipleChoice",
    "XLNetForQuestionAnswering",
    "XLNetForQuestionAnsweringSimple",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
    "XLNetLMHeadModel",
    "XLNetModel",
    "__version__",
    "accelerate",
    "clear",
    "distill",
    "double_backward",
    "eliminate",
    "encode",
    "explain",
    "finetune",
    "graph",
    "graph_training",
    "predict",
    "prune",
    "quantization_report",
    "restore",
    "use_backend",
]


# Families whose module has words apart
_MODULES = {
    "bigbird": "big_bird",
    "debertav2": "deberta_v2",
    "jinabert": "jina_bert",
    "jinaembeddingsv3": "jina_embeddings_v3",
    "nomicbert": "nomic_bert",
    "xlmroberta": "xlm_roberta",
}


def _model_place(name: str) -> str:
    """The module of a model class."""
    if name.startswith("BertFor"):
        return "models.heads"
    family = (
        name.partition("For")[0].removesuffix("Model").removesuffix("LMHead").removesuffix("Config").lower()
    )
    return f"models.{_MODULES.get(family, family)}"


if TYPE_CHECKING:  # names that `__all__` makes public
    from fastbert.acceleration import accelerate, explain, restore
    from fastbert.checkpoint.files import CheckpointError
    from fastbert.compression.distillation.run import distill
    from fastbert.compression.early_exit import EarlyExit
    from fastbert.compression.elimination import eliminate
    from fastbert.compression.pruning import prune
    from fastbert.compression.quantization import quantization_report
    from fastbert.finetuning.predict import predict
    from fastbert.finetuning.run import finetune
    from fastbert.graphs.model import graph
    from fastbert.graphs.training import graph_training
    from fastbert.models.albert import (
        AlbertForMaskedLM,
        AlbertForMultipleChoice,
        AlbertForPreTraining,
        AlbertForQuestionAnswering,
        AlbertForSequenceClassification,
        AlbertForTokenClassification,
        AlbertModel,
    )
    from fastbert.models.auto import (
        AutoConfig,
        AutoModel,
        AutoModelForMaskedLM,
        AutoModelForMultipleChoice,
        AutoModelForNextSentencePrediction,
        AutoModelForPreTraining,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from fastbert.models.bert import (
        BertModel,
    )
    from fastbert.models.big_bird import (
        BigBirdForMaskedLM,
        BigBirdForMultipleChoice,
        BigBirdForPreTraining,
        BigBirdForQuestionAnswering,
        BigBirdForSequenceClassification,
        BigBirdForTokenClassification,
        BigBirdModel,
    )
    from fastbert.models.camembert import (
        CamembertForMaskedLM,
        CamembertForMultipleChoice,
        CamembertForQuestionAnswering,
        CamembertForSequenceClassification,
        CamembertForTokenClassification,
        CamembertModel,
    )
    from fastbert.models.config import EncoderConfig
    from fastbert.models.config import EncoderConfig as BertConfig
    from fastbert.models.deberta_v2 import (
        DebertaV2ForMaskedLM,
        DebertaV2ForMultipleChoice,
        DebertaV2ForQuestionAnswering,
        DebertaV2ForReplacedTokens,
        DebertaV2ForSequenceClassification,
        DebertaV2ForTokenClassification,
        DebertaV2Model,
    )
    from fastbert.models.distilbert import (
        DistilBertForMaskedLM,
        DistilBertForMultipleChoice,
        DistilBertForQuestionAnswering,
        DistilBertForSequenceClassification,
        DistilBertForTokenClassification,
        DistilBertModel,
    )
    from fastbert.models.electra import (
        ElectraForMaskedLM,
        ElectraForMultipleChoice,
        ElectraForPreTraining,
        ElectraForQuestionAnswering,
        ElectraForSequenceClassification,
        ElectraForTokenClassification,
        ElectraModel,
    )
    from fastbert.models.ernie import (
        ErnieForMaskedLM,
        ErnieForMultipleChoice,
        ErnieForNextSentencePrediction,
        ErnieForPreTraining,
        ErnieForQuestionAnswering,
        ErnieForSequenceClassification,
        ErnieForTokenClassification,
        ErnieModel,
    )
    from fastbert.models.eurobert import (
        EuroBertForMaskedLM,
        EuroBertForSequenceClassification,
        EuroBertForTokenClassification,
        EuroBertModel,
    )
    from fastbert.models.gte import (
        GteForMaskedLM,
        GteForSequenceClassification,
        GteForTokenClassification,
        GteModel,
    )
    from fastbert.models.heads import (
        BertForMaskedLM,
        BertForMultipleChoice,
        BertForNextSentencePrediction,
        BertForPreTraining,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertForTokenClassification,
    )
    from fastbert.models.jina_bert import (
        JinaBertForMaskedLM,
        JinaBertForMultipleChoice,
        JinaBertForQuestionAnswering,
        JinaBertForSequenceClassification,
        JinaBertForTokenClassification,
        JinaBertModel,
    )
    from fastbert.models.jina_embeddings_v3 import (
        JinaEmbeddingsV3ForMaskedLM,
        JinaEmbeddingsV3ForQuestionAnswering,
        JinaEmbeddingsV3ForSequenceClassification,
        JinaEmbeddingsV3ForTokenClassification,
        JinaEmbeddingsV3Model,
    )
    from fastbert.models.longformer import (
        LongformerForMaskedLM,
        LongformerForMultipleChoice,
        LongformerForQuestionAnswering,
        LongformerForSequenceClassification,
        LongformerForTokenClassification,
        LongformerModel,
    )
    from fastbert.models.mobilebert import (
        MobileBertForMaskedLM,
        MobileBertForMultipleChoice,
        MobileBertForNextSentencePrediction,
        MobileBertForPreTraining,
        MobileBertForQuestionAnswering,
        MobileBertForSequenceClassification,
        MobileBertForTokenClassification,
        MobileBertModel,
    )
    from fastbert.models.modernbert import (
        ModernBertForMaskedLM,
        ModernBertForMultipleChoice,
        ModernBertForQuestionAnswering,
        ModernBertForSequenceClassification,
        ModernBertForTokenClassification,
        ModernBertModel,
    )
    from fastbert.models.mpnet import (
        MPNetForMaskedLM,
        MPNetForMultipleChoice,
        MPNetForQuestionAnswering,
        MPNetForSequenceClassification,
        MPNetForTokenClassification,
        MPNetModel,
    )
    from fastbert.models.neobert import (
        NeoBertForMaskedLM,
        NeoBertForSequenceClassification,
        NeoBertModel,
    )
    from fastbert.models.nomic_bert import (
        NomicBertForMaskedLM,
        NomicBertForSequenceClassification,
        NomicBertForTokenClassification,
        NomicBertModel,
    )
    from fastbert.models.roberta import (
        RobertaForMaskedLM,
        RobertaForMultipleChoice,
        RobertaForQuestionAnswering,
        RobertaForSequenceClassification,
        RobertaForTokenClassification,
        RobertaModel,
    )
    from fastbert.models.xlm_roberta import (
        XLMRobertaForMaskedLM,
        XLMRobertaForMultipleChoice,
        XLMRobertaForQuestionAnswering,
        XLMRobertaForSequenceClassification,
        XLMRobertaForTokenClassification,
        XLMRobertaModel,
    )
    from fastbert.models.xlnet import (
        XLNetForMultipleChoice,
        XLNetForQuestionAnswering,
        XLNetForQuestionAnsweringSimple,
        XLNetForSequenceClassification,
        XLNetForTokenClassification,
        XLNetLMHeadModel,
        XLNetModel,
    )
    from fastbert.ops.checks import double_backward
    from fastbert.runtime.dispatch import use_backend
    from fastbert.runtime.prepared import clear
    from fastbert.sentences.cross_encoder import CrossEncoder
    from fastbert.sentences.encoder import SentenceEncoder, encode
    from fastbert.sentences.multi_vector import MultiVectorEncoder
    from fastbert.sentences.sparse_encoder import SparseEncoder
    from fastbert.sentences.tokenizer import EncodingError
else:  # hidden from type checkers, which would accept any name as public

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'fastbert' has no attribute {name!r}")
        place = _PLACES.get(name) or _model_place(name)
        module, _, target = place.partition(":")
        value = getattr(importlib.import_module(f"fastbert.{module}"), target or name)
        globals()[name] = value
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
