"""Dense modules behind the pooling, against sentence-transformers."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from fastbert import SentenceEncoder
from fastbert.cli.analyses.loading import pooling_of
from fastbert.compression.distillation.sentences import student_settings, teacher_vectors
from fastbert.sentences.settings import sentence_settings
from tests.support.sentence_folders import SENTENCES, rewrite
from tests.support.tiny_folders import tiny

TEXTS = [*SENTENCES[:30], "", "A long, long text. " * 9]
# pooling, [(width, activation, bias)] of the Dense modules, whether Normalize follows
STACKS = {
    "labse": ("cls", [(32, nn.Tanh(), True)], True),
    "distiluse": ("mean", [(20, nn.Tanh(), True)], False),
    "two": ("mean", [(32, nn.GELU(), True), (32, None, False)], True),
    "three": ("max", [(40, nn.ReLU(), False), (32, nn.SiLU(), True), (8, nn.Tanh(), True)], True),
}


def stacked(minilm, folder, name):
    """A random model of sentence-transformers, saved in `folder`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as models

    pooling, layers, normalize = STACKS[name]
    plain = tiny("BertModel", minilm, folder / "plain")
    modules = [models.Transformer(str(plain), max_seq_length=40), models.Pooling(32, pooling)]
    for width, activation, bias in layers:
        given = modules[-1].get_embedding_dimension()
        # Of a size that does not saturate the activation
        weight = torch.randn(width, given) / given**0.5
        modules.append(models.Dense(given, width, bias, activation, weight))
        if bias:
            nn.init.normal_(modules[-1].linear.bias)
    model = SentenceTransformer(modules=modules + [models.Normalize()] * normalize, device="cpu")
    model.save(str(folder))
    return model


@pytest.fixture
def folder(minilm, tmp_path):
    stacked(minilm, tmp_path / "distiluse", "distiluse")
    return tmp_path / "distiluse"


@pytest.mark.parametrize("name", STACKS)
def test_vectors_are_sentence_transformers(minilm, tmp_path, name):
    theirs = stacked(minilm, tmp_path / "theirs", name)
    expected = theirs.encode(TEXTS)
    one = SentenceEncoder.from_pretrained(tmp_path / "theirs", device="cpu")
    ours = one.encode(TEXTS, batch_size=7)
    assert np.abs(ours - expected).max() < 1e-5
    assert one.get_embedding_dimension() == theirs.get_embedding_dimension() == ours.shape[1]
    exact = SentenceEncoder.from_pretrained(tmp_path / "theirs", dtype=torch.float64, device="cpu")
    half = SentenceEncoder.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16, device="cpu")
    assert {linear.weight.dtype for linear, _ in half.dense} == {torch.float32}
    truth = exact.encode(TEXTS)
    assert np.abs(theirs.double().encode(TEXTS) - truth).max() < 1e-6  # sentence-transformers rounds them
    stock = theirs.bfloat16().encode(TEXTS, convert_to_tensor=True).double().numpy()
    assert np.square(half.encode(TEXTS) - truth).mean() <= np.square(stock - truth).mean()


@pytest.mark.parametrize("name", STACKS)
def test_what_it_saves_sentence_transformers_and_it_load(minilm, tmp_path, name):
    from sentence_transformers import SentenceTransformer

    stacked(minilm, tmp_path / "theirs", name)
    one = SentenceEncoder.from_pretrained(tmp_path / "theirs", device="cpu")
    expected = one.encode(TEXTS)
    one.save_pretrained(tmp_path / "ours")
    again = SentenceEncoder.from_pretrained(tmp_path / "ours", device="cpu")
    assert np.array_equal(again.encode(TEXTS), expected)
    assert repr(again) == repr(one)
    theirs = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert np.abs(theirs.encode(TEXTS) - expected).max() < 1e-5
    assert theirs[1].get_embedding_dimension() == 32


def test_options_reach_beyond_the_dense_module(folder):
    one = SentenceEncoder.from_pretrained(folder, normalize=True, device="cpu")
    assert "20 dimensions, pooling mean, Dense 20 tanh, normalized, at most 40 tokens" in repr(one)
    rows = one.encode(TEXTS)
    assert np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-5
    assert np.array_equal(one.encode(TEXTS, truncate_dim=6), rows[:, :6])
    with pytest.raises(ValueError, match="truncate_dim: 21; expected an integer from 1 to 20"):
        one.encode(TEXTS, truncate_dim=21)
    one.quantize("int8")
    assert ((one.encode(TEXTS) * rows).sum(1) > 0.99).all()
    assert [type(linear) for linear, _ in one.dense] == [nn.Linear]


def test_a_text_without_tokens_has_the_bias(folder):
    loaded = SentenceEncoder.from_pretrained(folder, device="cpu")
    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bare.post_processor = None
    one = SentenceEncoder(loaded.model, bare, dense=loaded.dense)
    expected = loaded.dense[0][0].bias.tanh().expand(2, 20)
    torch.testing.assert_close(torch.from_numpy(one.encode(["", " "])), expected)
    torch.testing.assert_close(torch.from_numpy(one.encode(["a cat", "", ""])[1:]), expected)


@pytest.mark.parametrize(
    "dense",
    [nn.Linear(32, 4), (nn.Linear(31, 4), None), (nn.Linear(32, 4), "gelu_tanh"), (nn.Tanh(), None)],
    ids=["no pair", "width", "activation", "no layer"],
)
def test_a_layer_that_does_not_fit_is_named(folder, dense):
    loaded = SentenceEncoder.from_pretrained(folder, device="cpu")
    words = (
        r"dense\[0\]: .*; expected \(nn.Linear with 32 inputs, one of None, 'tanh', 'relu', 'gelu', 'silu'\)"
    )
    with pytest.raises(ValueError, match=words):
        SentenceEncoder(loaded.model, loaded._tokenizer, dense=[dense])


def dense_file(**changes):
    return lambda folder: rewrite(folder / "2_Dense" / "config.json", **changes)


def with_nan(folder):
    path = folder / "2_Dense" / "model.safetensors"
    tensors = load_file(path)
    tensors["linear.bias"][3] = torch.nan
    save_file(tensors, path)


BAD = {
    "activation": (
        dense_file(activation_function="torch.nn.modules.activation.Mish"),
        r"2_Dense/config\.json: activation_function 'torch.*Mish'; expected one of torch.*Identity",
    ),
    "input": (
        dense_file(module_input_name="token_embeddings"),
        r"2_Dense/config\.json: module_input_name 'token_embeddings'; expected one of sentence_embedding",
    ),
    "output": (
        dense_file(module_output_name="small_embedding"),
        r"module_output_name 'small_embedding'; expected one of sentence_embedding",
    ),
    "width": (
        dense_file(in_features=20),
        r"2_Dense/config\.json: in_features 20, out_features 20; expected 32",
    ),
    "nan": (with_nan, r"2_Dense/model\.safetensors: linear: not all numbers are finite"),
    "no weights": (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "2_Dense: no weights"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_directories_are_refused(folder, name):
    change, words = BAD[name]
    change(folder)
    with pytest.raises(ValueError, match=words):
        SentenceEncoder.from_pretrained(folder, device="cpu")


def test_a_pickle_and_the_files_of_old_versions_are_read(folder):
    expected = SentenceEncoder.from_pretrained(folder, device="cpu").encode(TEXTS)
    path = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()
    dense_file(module_input_name=None, module_output_name=None, activation_function=None, bias=None)(folder)
    found = SentenceEncoder.from_pretrained(folder, device="cpu").encode(TEXTS)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "read",
    [
        sentence_settings,
        lambda folder: teacher_vectors(folder, torch.device("cpu")),
        lambda folder: student_settings(folder, None),
        lambda folder: pooling_of(Namespace(model=folder), None),
    ],
    ids=["settings", "teacher", "student", "analysis"],
)
def test_it_is_refused_where_pooling_alone_is_read(folder, read):
    with pytest.raises(ValueError, match=r"modules\.json: has Dense modules, which only SentenceEncoder and"):
        read(folder)
