"""Public objects come back from a pickle and from `torch.save` as they were, and answer the same."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import fastbert

pytest.importorskip("sentence_transformers", minversion="6")

TINY = dict(vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
TINY |= dict(max_position_embeddings=8, type_vocab_size=1)
DISTILBERT = dict(dim=8, n_layers=1, n_heads=2, hidden_dim=8)
IDS = torch.tensor([[2, 5, 7, 3], [2, 9, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def answer(thing) -> torch.Tensor:
    """The embeddings of three texts, or a model's first output for a batch of two sequences."""
    if type(thing).__name__.startswith("Sentence"):
        return torch.as_tensor(thing.encode(["one two", "three", "two three one two"]))
    with torch.no_grad():
        return thing.eval()(IDS, attention_mask=MASK)[0]


def own(name: str, kind: str) -> torch.nn.Module:
    return getattr(fastbert, name)(fastbert.EncoderConfig(model_type=kind, **TINY)).eval()


def accelerated(name: str, keys=(), **options) -> torch.nn.Module:
    cls = getattr(transformers, name)
    return fastbert.accelerate(cls(cls.config_class(**TINY | dict(keys))).eval(), **options)


def words() -> Tokenizer:
    """A tokenizer that knows three words."""
    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "one", "two", "three"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def sentence_encoder() -> fastbert.SentenceEncoder:
    return fastbert.SentenceEncoder(own("BertModel", "bert"), words(), normalize=True, max_length=6)


def sentence_transformer(folder) -> torch.nn.Module:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    with contextlib.chdir(folder):
        own("BertModel", "bert").save_pretrained("words")
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words(), pad_token="[PAD]", unk_token="[UNK]", model_max_length=6
        ).save_pretrained("words")
        encoder = Transformer("words")
    pooling = Pooling(encoder.get_embedding_dimension())
    return fastbert.accelerate(SentenceTransformer(modules=[encoder, pooling], device="cpu"))


def test_objects_come_back(tmp_path):
    encoder = own("BertModel", "bert")
    things = [
        encoder,
        own("BertForPreTraining", "bert"),
        own("MPNetForMaskedLM", "mpnet"),
        own("RobertaForSequenceClassification", "roberta").quantize("int8"),
        accelerated("BertModel"),
        accelerated("BertModel", dtype="int8"),
        accelerated("BertForQuestionAnswering", ffn=False, layer_norm=False),
        accelerated("DistilBertForSequenceClassification", DISTILBERT),
        accelerated("AlbertModel", {"embedding_size": 4}),
        accelerated("RobertaPreLayerNormModel"),
        sentence_transformer(tmp_path),
        sentence_encoder(),
        sentence_encoder().quantize("int8"),
    ]
    for thing in things:
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        for again in (pickle.loads(pickle.dumps(thing)), torch.load(file, weights_only=False)):
            assert type(again) is type(thing)
            assert torch.equal(answer(again), answer(thing))
            if type(thing).__module__.startswith("transformers."):
                first, second = (str(fastbert.explain(each)).splitlines()[0] for each in (again, thing))
                assert first == second
    classes = [v for name in fastbert.__all__ if isinstance(v := getattr(fastbert, name), type)]
    output, error = encoder(IDS, attention_mask=MASK), fastbert.CheckpointError("no such file")
    again = pickle.loads(pickle.dumps([encoder.config, output, error, classes]))
    assert again[0].to_dict() == encoder.config.to_dict()
    assert torch.equal(again[1][0], output[0])
    assert (again[2].args, again[3]) == (("no such file",), classes)


def test_a_graphed_model_says_that_it_has_no_pickle():
    graphed = fastbert.graph(own("BertModel", "bert"))
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"GraphedModel: .*model and call fastbert\.graph again"):
            copied(graphed)
