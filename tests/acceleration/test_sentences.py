"""`SentenceTransformer.encode` of an accelerated model, against stock `encode`.

Which batches it makes by tokens, and when stock's own loop runs.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from fastbert.acceleration import sentences
from tests.support.hf_models import hf_model
from tests.support.trainers import word_tokenizer

st = pytest.importorskip("sentence_transformers", minversion="6")
TEXTS = [
    "the cat sat on the mat",
    "",
    "a dog",
    "it rained and rained and rained until the cat and the dog sat on the mat again",
    "the",
    "cat dog cat dog cat dog cat dog",
    "it sat",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny encoder with a word-level tokenizer."""
    path = tmp_path_factory.mktemp("words")
    hf_model("bert", transformers.AutoModel, num_hidden_layers=1).save_pretrained(path)
    word_tokenizer(" ".join(TEXTS).split(), 16).save_pretrained(path)
    return path


def model_of(folder: Path, **settings):
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    words = Transformer(str(folder))
    pooling = Pooling(words.get_embedding_dimension(), **settings)
    return st.SentenceTransformer(modules=[words, pooling], device="cpu")


@pytest.fixture
def pair(folder):
    """(accelerated, stock)."""
    return fastbert.accelerate(model_of(folder)), model_of(folder)


@pytest.fixture
def batches(monkeypatch) -> list[tuple[int, int]]:
    """(texts, tokens) of every batch that our loop ran; empty if stock's loop ran."""
    seen, cut = [], sentences.Texts.features

    def features(self, batch, device):
        found = cut(self, batch, device)
        seen.append((len(batch), int(found["attention_mask"].sum())))
        return found

    monkeypatch.setattr(sentences.Texts, "features", features)
    return seen


def assert_same(model, stock, texts=TEXTS, **settings) -> None:
    got, want = (torch.as_tensor(m.encode(texts, **settings)) for m in (model, stock))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    if want.dim() == 2:
        assert (want[0] - want[3]).abs().max() > 1e-3  # so that a wrong order is noticed


@pytest.mark.parametrize("batch_size", (1, 2, 32))
@pytest.mark.parametrize("at_once", (3, 4096))
def test_a_batch_holds_no_more_tokens_than_stocks_largest(pair, batches, monkeypatch, batch_size, at_once):
    monkeypatch.setattr(sentences, "_TOKENISED", at_once)
    assert_same(*pair, batch_size=batch_size)
    assert sum(count for count, _ in batches) == len(TEXTS)
    assert max(tokens for _, tokens in batches) <= batch_size * 16
    lengths = pair[1].tokenizer(TEXTS, truncation=True)["input_ids"]
    assert sum(tokens for _, tokens in batches) == sum(map(len, lengths))
    if batch_size == 32:
        assert len(batches) == -(-len(TEXTS) // at_once)


def test_a_part_left_in_training_mode_is_set_to_eval(pair, batches):
    """As stock `encode` does for all modules, also where the model itself is in eval mode."""
    for model in pair:
        model.encode(TEXTS)
        dropout = next(m for m in model.modules() if isinstance(m, torch.nn.Dropout))
        dropout.p = 0.5
        dropout.train()
    assert_same(*pair)
    assert batches


@pytest.mark.parametrize(
    "settings",
    (
        {"convert_to_tensor": True},
        {"convert_to_numpy": False, "convert_to_tensor": True, "normalize_embeddings": True},
        {"truncate_dim": 5},
        {"truncate_dim": 5, "normalize_embeddings": True},
        {"prompt": "the dog "},
        {"show_progress_bar": True},
    ),
    ids=str,
)
def test_settings(pair, batches, settings, capfd):
    assert_same(*pair, **settings)
    assert batches
    assert ("7/7" in capfd.readouterr().err) == ("show_progress_bar" in settings)


def test_a_prompt_that_is_not_pooled(folder, batches):
    model, stock = (model_of(folder, include_prompt=False) for _ in range(2))
    assert_same(fastbert.accelerate(model), stock, prompt="the dog ")
    assert batches
    assert (model.encode(TEXTS, prompt="the dog ") - model.encode(TEXTS)).any()


def test_queries_and_documents(folder, batches):
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    def make():
        words = Transformer(str(folder), query_length=6)
        return st.SentenceTransformer(
            modules=[words, Pooling(words.get_embedding_dimension())],
            device="cpu",
            prompts={"query": "it ", "document": ""},
        )

    model, stock = fastbert.accelerate(make()), make()
    for encode in ("encode_query", "encode_document"):
        got, want = (torch.from_numpy(getattr(m, encode)(TEXTS)) for m in (model, stock))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert len(batches) == 2
    assert batches[0][1] < batches[1][1]


def test_half_precision(folder, batches):
    model, stock = (model_of(folder).bfloat16() for _ in range(2))
    got, want = (m.encode(TEXTS, convert_to_tensor=True) for m in (fastbert.accelerate(model), stock))
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)
    assert batches


def test_what_stocks_loop_is_left_to(folder, batches):
    model, stock = fastbert.accelerate(model_of(folder)), model_of(folder)
    assert_same(model, stock, processing_kwargs={"text": {"max_length": 5, "truncation": True}})
    for value in ("token_embeddings", None):
        got, want = (m.encode(TEXTS, output_value=value) for m in (model, stock))
        for a, b in zip(got, want, strict=True):
            a, b = (x if value else x["sentence_embedding"] for x in (a, b))
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert_same(model, stock, texts=[("the cat", "a dog"), *TEXTS[2:]])
    for m in (model, stock):
        m.tokenizer.padding_side = "left"
    assert_same(model, stock)
    assert not batches
    for m in (model, stock):
        m.tokenizer.padding_side = "right"
    assert_same(model, stock)
    assert batches


@pytest.mark.sweep
def test_a_compiled_model_is_left_to_stocks_loop(pair, batches):
    pair[0].compile(backend="eager")
    assert_same(*pair)
    assert not batches


def test_features_beside_the_tokens(pair, batches, monkeypatch):
    for m in pair:

        def preprocess(*args, original=m[0].preprocess, **kwargs):
            found = original(*args, **kwargs)
            return {**found, "marks": found["input_ids"]}

        monkeypatch.setattr(m[0], "preprocess", preprocess)
    assert_same(*pair)
    assert not batches


def test_only_a_loop_that_is_known(folder, monkeypatch):
    class Mine(st.SentenceTransformer):
        def _inference(self, inputs, **given):
            return super()._inference(inputs, **given)

    class Named(st.SentenceTransformer):
        pass

    def fits(kind=st.SentenceTransformer):
        model = model_of(folder)
        model.__class__ = kind
        return sentences.fits(model)

    assert fits()
    assert fits(Named)
    assert not fits(Mine)
    assert not sentences.fits(torch.nn.Linear(1, 1))
    for version, known in (("5.9.9", False), ("6.0.0", True), ("7.0.0", False)):
        monkeypatch.setattr(st, "__version__", version)
        assert fits() == known
    monkeypatch.setattr(st, "__version__", "6.9.0")

    def other(self, inputs, *, prompt, batch_size, buckets, **kwargs):
        raise AssertionError

    home = next(c for c in st.SentenceTransformer.__mro__ if "_inference" in vars(c))
    monkeypatch.setattr(home, "_inference", other)
    assert not fits()
    model = fastbert.accelerate(model_of(folder))
    assert type(model) is st.SentenceTransformer
    assert fastbert.explain(model).models[0].reason is None


def test_restore_gives_the_class_back(pair):
    model, stock = pair
    assert type(model) is not st.SentenceTransformer
    assert type(model).__name__ == "SentenceTransformer"
    assert type(fastbert.restore(model)) is st.SentenceTransformer
    assert torch.equal(*(m.encode(TEXTS, convert_to_tensor=True) for m in pair))
    assert_same(fastbert.accelerate(fastbert.accelerate(model)), stock)


def test_pickled_class_of_a_model_is_its_class(folder):
    model = fastbert.accelerate(model_of(folder))
    assert pickle.loads(pickle.dumps(type(model))) is type(model)
    # what a process of a pool is given
    worker, twin = pickle.loads(ForkingPickler.dumps((type(model)._multi_process_worker, model)))
    assert worker.__func__ is type(model)._multi_process_worker.__func__
    assert torch.equal(
        twin.encode(TEXTS, convert_to_tensor=True), model.encode(TEXTS, convert_to_tensor=True)
    )
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is type(model)
    assert torch.equal(
        twin.encode(TEXTS, convert_to_tensor=True), model.encode(TEXTS, convert_to_tensor=True)
    )
