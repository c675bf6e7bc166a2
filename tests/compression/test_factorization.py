"""Tables of words as products of two matrices, against the same model with the product in place."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from fastbert.compression import shrink
from fastbert.compression.factorization import factorize
from fastbert.finetuning.losses import TaskLosses
from fastbert.layers.modules import part
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.model_pairs import build

REFUSED = ("mobilebert", "eurobert")
NAMES = [name for name in FAMILY_NAMES if name not in REFUSED]
CLOSE = dict(rtol=1e-9, atol=1e-9)
RANK = 7


def inputs_of(name):
    return {**batch(name), "attention_mask": torch.ones(4, 40, dtype=torch.int64)}


def words_of(model):
    return model.get_input_embeddings()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_factored_table_is_its_product(name, tmp_path):
    theirs, ours = build(name, "ForMaskedLM")
    ours, inputs = ours.double(), inputs_of(name)
    table = words_of(ours).weight
    rows, width = table.shape
    small = factorize(ours, RANK)
    assert small.num_parameters() - ours.num_parameters() == RANK * (rows + width) - rows * width
    assert small.config.word_embedding_rank == RANK
    # No matrix of that rank is nearer
    product = words_of(small)(torch.arange(rows))
    rest = torch.linalg.svdvals(table)[RANK:]
    torch.testing.assert_close((product - table).norm(), rest.norm(), **CLOSE)
    whole = shrink.dense(small)
    torch.testing.assert_close(words_of(whole).weight, product, **CLOSE)
    expected = whole(**inputs).logits
    torch.testing.assert_close(small(**inputs).logits, expected, **CLOSE)
    decoder = small.get_output_embeddings()
    assert decoder.weight is words_of(small).weight
    assert decoder.weight.shape == (rows, RANK)
    # The whole rank is the model itself
    torch.testing.assert_close(factorize(ours, width)(**inputs).logits, ours(**inputs).logits, **CLOSE)
    small.save_pretrained(tmp_path / "small")
    again = type(small).from_pretrained(tmp_path / "small", dtype="auto").eval()
    assert torch.equal(again(**inputs).logits, small(**inputs).logits)
    whole.save_pretrained(tmp_path / "whole")
    stock = type(theirs).from_pretrained(tmp_path / "whole", dtype="auto").eval()
    if name != "longformer":
        torch.testing.assert_close(stock(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    # Once more, a smaller rank of the product
    torch.testing.assert_close(
        words_of(factorize(small, 3))(torch.arange(rows)),
        words_of(factorize(whole, 3))(torch.arange(rows)),
        **CLOSE,
    )


@pytest.mark.parametrize("name", ["bert", "modernbert", "electra", "big_bird"])
def test_gradients_are_those_of_the_product(name):
    small = factorize(build(name, "ForMaskedLM")[1].double(), RANK)
    whole, inputs = shrink.dense(small), inputs_of(name)
    inputs["input_ids"] = torch.randint(6, 120, (4, 40), generator=torch.Generator().manual_seed(0))
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] % 3 > 0, -100)
    for model in (small, whole):
        model(**inputs, labels=labels).loss.backward()
    gradient, words = words_of(whole).weight.grad, words_of(small)
    torch.testing.assert_close(words.weight.grad, gradient @ words.projection.weight, **CLOSE)
    torch.testing.assert_close(words.projection.weight.grad, gradient.T @ words.weight, **CLOSE)
    for (key, p), q in zip(small.base_model.named_parameters(), whole.base_model.parameters(), strict=False):
        if "embeddings" not in key:
            break
        assert p.grad is not None, (key, q.shape)


def test_nothing_is_shared_or_changed():
    ours = build("bert", "ForMaskedLM")[1].train()
    before = copy.deepcopy(ours.state_dict())
    words_of(ours).requires_grad_(False)
    small = factorize(ours, RANK)
    assert small.training
    assert not words_of(small).weight.requires_grad
    assert not words_of(small).projection.weight.requires_grad
    for parameter in small.parameters():
        parameter.data.fill_(7.0)
    assert all(torch.equal(t, before[key]) for key, t in ours.state_dict().items())


@torch.no_grad()
def test_an_untied_decoder_stays():
    ours = build("bert", "ForMaskedLM", tie_word_embeddings=False)[1].double()
    small, inputs = factorize(ours, 48), inputs_of("bert")
    assert torch.equal(small.get_output_embeddings().weight, ours.get_output_embeddings().weight)
    torch.testing.assert_close(small(**inputs).logits, ours(**inputs).logits, **CLOSE)


def test_factored_models_quantise_autocast_and_take_perturbed_words():
    ours, inputs = build("bert", "ForSequenceClassification")[1], inputs_of("bert")
    small = factorize(ours, RANK)
    whole = shrink.dense(small)
    with torch.no_grad():
        expected = whole(**inputs).logits
        torch.testing.assert_close(small(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(small(**inputs).logits.float(), expected, rtol=0.05, atol=0.05)
        delta = torch.randn(4, 40, 48)
        moved = [TaskLosses(model).output({**inputs, "delta": delta}).logits for model in (small, whole)]
        torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(moved[0], expected)
        small, whole = small.quantize("int8"), whole.quantize("int8")
        torch.testing.assert_close(small(**inputs).logits, whole(**inputs).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_prune_factors_the_words_that_stay():
    ours, ids = build("bert", "ForMaskedLM")[1].double(), list(range(0, 120, 2))
    found = fastbert.prune(ours, vocabulary=ids, heads={0: [1]}, embedding_rank=RANK)
    config = found.model.config
    assert (config.vocab_size, config.word_embedding_rank, config.pruned_heads) == (60, RANK, {0: [1]})
    cut = words_of(ours).weight[ids]
    product = words_of(found.model)(torch.arange(60))
    rest = torch.linalg.svdvals(cut)[RANK:].norm()
    torch.testing.assert_close((product - cut).norm(), rest, **CLOSE)
    assert found.after.parameters < found.before.parameters
    dense, inputs = found.dense(), {"input_ids": torch.arange(60).view(4, 15)}
    assert dense.config.word_embedding_rank is None
    torch.testing.assert_close(dense(**inputs).logits, found.model(**inputs).logits, **CLOSE)


@torch.no_grad()
def test_the_vocabulary_of_a_factored_model_changes():
    small = factorize(build("bert", "ForMaskedLM")[1].double(), RANK)
    inputs = inputs_of("bert")
    before = small(**inputs).logits
    small.resize_token_embeddings(130)
    assert words_of(small).weight.shape == (130, RANK)
    after = small(**inputs).logits
    torch.testing.assert_close(after[..., :120], before, **CLOSE)
    assert after.shape[-1] == 130
    with pytest.raises(ValueError, match="value: expected a FactoredTable"):
        small.set_input_embeddings(torch.nn.Embedding(130, RANK))


def test_bad_arguments():
    ours = build("bert", "ForMaskedLM")[1]
    for rank in (0, 49, 1.5, True):
        with pytest.raises(ValueError, match="embedding_rank: expected an integer from 1 to 48, got"):
            factorize(ours, rank)
        with pytest.raises(
            ValueError, match="config word_embedding_rank: expected None or an integer from 1"
        ):
            fastbert.BertConfig(hidden_size=48, num_attention_heads=3, word_embedding_rank=rank)
    for name in REFUSED:
        with pytest.raises(ValueError, match="config word_embedding_rank: expected None, as"):
            factorize(build(name, "ForMaskedLM")[1], 4)
    with pytest.raises(TypeError, match="model: expected a model of fastbert, got BertModel"):
        factorize(transformers.BertModel(transformers.BertConfig(num_hidden_layers=0)), 4)
    with pytest.raises(ValueError, match="model: expected floating point, got 8 bits"):
        factorize(build("bert", "ForSequenceClassification")[1].quantize("int8"), 4)
    other = build("bert", "ForSequenceClassification")[1]
    other.base_model.embeddings.word_embeddings = torch.nn.Embedding(120, 48, max_norm=1.0)
    part(other.base_model, "embeddings.word_embeddings").register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="model: expected a plain table of words, got a Embedding"):
        factorize(other, 4)
