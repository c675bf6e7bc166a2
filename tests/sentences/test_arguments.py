"""Bad arguments of `encode` and of the model's forward are named."""

import numpy as np
import pytest
import torch

from fastbert.sentences.cross_encoder import CrossEncoder
from fastbert.sentences.encoder import SentenceEncoder, encode
from fastbert.sentences.tokenizer import EncodingError, load_tokenizer


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"sentences": ["a", 3]},
            TypeError,
            r"sentences\[1\]: int; expected str, a pair of them, or {'text'",
        ),
        ({"sentences": [["a", "b", "c"]]}, TypeError, r"sentences\[0\]: a list of 3; expected str"),
        (
            {"sentences": {"query": "a"}},
            TypeError,
            r"sentences\[0\]: a dict of \['query'\]; expected {'text'",
        ),
        ({"sentences": ["a"], "prompt_name": "q"}, ValueError, "prompt_name: 'q'; expected one of .* none"),
        ({"sentences": ["a"], "prompt_name": "q", "prompt": ""}, ValueError, "expected one of the two"),
        ({"sentences": ["a"], "prompt": 3}, TypeError, "prompt: int; expected str or None"),
        ({"sentences": ["a"], "truncate_dim": 385}, ValueError, "truncate_dim: 385; .* from 1 to 384"),
        ({"sentences": ["a"], "precision": "int4"}, ValueError, "precision: 'int4'; expected one of float32"),
        ({"sentences": ["a"], "precision": "int8"}, ValueError, "precision: 'int8' takes the range"),
        ({"sentences": ["a", "b", "c\udc80"]}, EncodingError, r"sentences\[2\]: half of a surrogate pair"),
        ({"sentences": ["a"], "on_long": "cut"}, ValueError, "on_long: 'cut'"),
        (
            {"sentences": ["a"], "batch_tokens": 255},
            ValueError,
            "batch_tokens: 255; expected an integer >= max_length",
        ),
        ({"sentences": 5}, TypeError, "sentences: int; expected a sequence of texts"),
        ({"sentences": np.array(5)}, TypeError, "sentences: ndarray; expected a sequence"),
        ({"sentences": ["a"], "prompt_name": ["q"]}, ValueError, r"prompt_name: \['q'\]; expected one of"),
        ({"sentences": ["a"], "progress": 5}, TypeError, "progress: int; expected a function"),
    ],
)
def test_encode_refuses(encoder, arguments, error, words):
    with pytest.raises(error, match=words):
        encoder.encode(**arguments)


@pytest.mark.parametrize("given", ["a", {"text": "a"}, 5])
def test_tokenize_takes_a_sequence(encoder, given):
    with pytest.raises(TypeError, match=rf"sentences: {type(given).__name__}; expected a sequence of texts"):
        encoder.tokenize(given)


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ({"prompt": None}, TypeError, "prompt: NoneType; expected str"),
        ({"prompts": ["a"]}, TypeError, r"prompts: \['a'\]; expected a dict of texts"),
        ({"prompts": {"a": 5}}, TypeError, "prompts: {'a': 5}; expected a dict of texts"),
        ({"similarity_fn_name": ["dot"]}, ValueError, r"similarity_fn_name: \['dot'\]; expected one of"),
    ],
)
def test_odd_settings_are_named(encoder, directory, setting, error, words):
    with pytest.raises(error, match=words):
        SentenceEncoder(encoder.model, load_tokenizer(directory), **setting)


@pytest.mark.parametrize(
    "given",
    [
        "x",
        None,
        {"a": 1},
        ["a"],
        [[1.0], [1.0, 2.0]],
        [[10**400]],
        np.array(["a"]),
        [torch.zeros(3), torch.zeros(4)],
        torch.zeros(2, 384).to_sparse(),
        np.zeros((2, 384), np.complex64),
    ],
    ids=str,
)
def test_similarity_names_what_are_no_vectors(encoder, given):
    with pytest.raises(ValueError, match=r"^embeddings2: "):
        encoder.similarity(np.zeros((2, 384), np.float32), given)


@pytest.mark.parametrize("kind", [SentenceEncoder, CrossEncoder])
@pytest.mark.parametrize(
    ("device", "error"), [("x", ValueError), ("cuda:x", ValueError), (-1, ValueError), (object(), TypeError)]
)
def test_a_device_that_is_none_is_named(directory, kind, device, error):
    with pytest.raises(error, match=r"^device: expected a device such as 'cpu' or 'cuda:0', got "):
        kind.from_pretrained(directory, device=device)


@pytest.mark.parametrize("max_length", [0, 2, 513, 12.0, True])
def test_max_length_out_of_range(encoder, directory, max_length):
    with pytest.raises(ValueError, match=r"max_length: .* from 3 \(2 special tokens and one more\) to 512"):
        SentenceEncoder(encoder.model, load_tokenizer(directory), max_length=max_length)


def test_function_refuses(encoder, directory):
    with pytest.raises(ValueError, match="pooling, device: settings of a SentenceEncoder"):
        encode(encoder, ["a"], pooling="cls", device="cpu")
    with pytest.raises(TypeError, match="model: BertModel; expected a directory or a SentenceEncoder"):
        encode(encoder.model, ["a"])
    with pytest.raises(ValueError, match="pooling: 'sum'; expected one of mean, cls, max"):
        encode(directory, ["a"], pooling="sum")
    with pytest.raises(TypeError, match=r"model: str; .*SentenceEncoder\.from_pretrained\(directory\)"):
        SentenceEncoder("some/folder")
    with pytest.raises(TypeError, match=r"tokenizer: str; expected a tokenizers\.Tokenizer"):
        SentenceEncoder(encoder.model, "some/folder")
    with pytest.raises(ValueError, match="pooling: 'sum'"):
        SentenceEncoder(encoder.model, load_tokenizer(directory), pooling="sum")
    assert encode(encoder, ["a"]).shape == (1, 384)


def test_training_mode_is_refused_and_left_alone(encoder):
    encoder.model.train()
    try:
        with pytest.raises(ValueError, match="model: in training mode"):
            encoder.encode(["a"])
        assert encoder.model.training
    finally:
        encoder.model.eval()


def test_a_token_that_the_model_does_not_know(encoder, directory):
    tokenizer = load_tokenizer(directory)
    tokenizer.add_tokens(["zorgelflux"])
    made = SentenceEncoder(encoder.model, tokenizer)
    words = r"sentences\[1\]: token 'zorgelflux' has id 30522, .* knows 30522 tokens"
    with pytest.raises(EncodingError, match=words):
        made.encode(["fine", "a zorgelflux here", "fine"])


def test_an_embedding_that_is_not_finite_is_named(copy):
    encoder = SentenceEncoder.from_pretrained(copy, device="cpu")
    token = encoder.tokenize(["volcano"]).ids[1]
    with torch.no_grad():
        encoder.model.get_parameter("embeddings.word_embeddings.weight")[token] = float("nan")
    with pytest.raises(EncodingError, match=r"sentences\[2\]: the embedding is not finite"):
        encoder.encode(["a cat", "a dog", "a volcano", "a volcano again", "a mouse"])
    assert np.isfinite(encoder.encode(["a cat", "a dog"])).all()


def test_roberta_like_models_lose_positions(tmp_path, directory):
    from fastbert.models.auto import AutoModel
    from tests.support.hf_models import hf_model

    sizes = {"vocab_size": 30522, "num_hidden_layers": 1, "max_position_embeddings": 34}
    hf_model("roberta", **sizes).save_pretrained(tmp_path)
    encoder = SentenceEncoder(AutoModel.from_pretrained(tmp_path).eval(), load_tokenizer(directory))
    assert encoder.max_length == 32  # positions start at pad_token_id + 1 = 2
    assert np.isfinite(encoder.encode(["word " * 100])).all()
