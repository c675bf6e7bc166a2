"""Small public objects that are pickled: models, encoders of sentences, a config, an output, an error."""

from __future__ import annotations

import contextlib
import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import fastbert

TINY = {
    "vocab_size": 12,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "type_vocab_size": 1,
}
NAMES = (
    "BertModel",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "RobertaForSequenceClassification",
    "DistilBertForTokenClassification",
    "AlbertModel",
    "ElectraForPreTraining",
    "MPNetForMaskedLM",
    "BertForMultipleChoice",
)
# Models of transformers that are accelerated: name of the pickle -> (class, its config's own keys, options)
DISTILBERT = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}
ACCELERATED = {
    "accelerated-bert": ("BertModel", {}, {}),
    "accelerated-bert-int8": ("BertModel", {}, {"dtype": "int8"}),
    "accelerated-bert-spans": ("BertForQuestionAnswering", {}, {}),
    "accelerated-bert-attention": ("BertModel", {}, {"ffn": False, "layer_norm": False}),
    "accelerated-distilbert": ("DistilBertForSequenceClassification", DISTILBERT, {}),
    "accelerated-albert": ("AlbertModel", {"embedding_size": 4}, {}),
    "accelerated-mpnet": ("MPNetModel", {}, {}),
    "accelerated-prelayernorm": ("RobertaPreLayerNormModel", {}, {}),
}
QUANTIZED = {
    "quantized-bert": ("BertModel", "bert"),
    "quantized-roberta": ("RobertaForSequenceClassification", "roberta"),
}
SENTENCES = ["one two", "three", "two three one two"]
IDS = torch.tensor([[2, 5, 7, 3], [2, 9, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def answer(thing: object) -> torch.Tensor:
    """The embeddings of SENTENCES, or a model's first output for a batch of two sequences."""
    if type(thing).__name__ in ("SentenceEncoder", "SentenceTransformer"):
        return torch.as_tensor(thing.encode(SENTENCES))
    ids, mask = (IDS[None], MASK[None]) if "MultipleChoice" in type(thing).__name__ else (IDS, MASK)
    with torch.no_grad():
        return thing.eval()(ids, attention_mask=mask)[0]


def own(name: str, kind: str) -> torch.nn.Module:
    """A model of this package with random weights."""
    torch.manual_seed(0)
    return getattr(fastbert, name)(fastbert.EncoderConfig(model_type=kind, **TINY)).eval()


def accelerated(name: str) -> torch.nn.Module:
    """A model of ACCELERATED with random weights."""
    import transformers

    cls, keys, options = ACCELERATED[name]
    torch.manual_seed(0)
    cls = getattr(transformers, cls)
    model = cls(cls.config_class(**{**TINY, **keys})).eval()
    return fastbert.accelerate(model, **options)


def words() -> Tokenizer:
    """A tokenizer that knows three words."""
    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "one", "two", "three"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def sentence_encoder() -> fastbert.SentenceEncoder:
    """An encoder of sentences over three words."""
    return fastbert.SentenceEncoder(own("BertModel", "bert"), words(), normalize=True, max_length=6)


def sentence_transformer() -> torch.nn.Module:
    """An accelerated SentenceTransformer over three words."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        own("BertModel", "bert").save_pretrained("words")
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words(), pad_token="[PAD]", unk_token="[UNK]", model_max_length=6
        ).save_pretrained("words")
        encoder = Transformer("words")
    pooling = Pooling(encoder.get_embedding_dimension())
    return fastbert.accelerate(SentenceTransformer(modules=[encoder, pooling], device="cpu"))


def objects() -> dict[str, object]:
    """Name -> what is pickled: models, an encoder of sentences, a config, an output, a list of classes."""
    found: dict[str, object] = {}
    for name in NAMES:
        kinds = ("distilbert", "bert", "roberta", "albert", "electra", "mpnet")
        found[name] = own(name, next(kind for kind in kinds if name.lower().startswith(kind)))
    found |= {name: accelerated(name) for name in ACCELERATED}
    found["accelerated-sentences"] = sentence_transformer()
    found |= {name: own(*which).quantize("int8") for name, which in QUANTIZED.items()}
    found["sentence-encoder"] = sentence_encoder()
    found["sentence-encoder-int8"] = sentence_encoder().quantize("int8")
    found["config"] = fastbert.EncoderConfig(**TINY)
    found["output"] = found["BertModel"](IDS, attention_mask=MASK)
    found["error"] = fastbert.CheckpointError("no such file")
    found["classes"] = [v for n in fastbert.__all__ if isinstance(v := getattr(fastbert, n), type)]
    return found
