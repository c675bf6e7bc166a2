"""Feature-based entities: transformers' features, plain torch's tagger, one computation, the same bytes."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from fastbert.finetuning import features as features_module
from fastbert.finetuning.features import LAYERS, NerFeatures
from fastbert.finetuning.heads import BiLstm
from fastbert.finetuning.predict import predict
from fastbert.finetuning.tasks import task_of
from fastbert.sentences.tokenizer import load_tokenizer
from tests.support.rule_tasks import digests, quick, stopped, tiny_model, written

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
OPTIONS = {"epochs": 2, "batch_size": 8, "lr": 3e-3, "max_length": 32}


@pytest.fixture(scope="module")
def model(memory):
    """A model of four layers with dropout, which features must not have."""
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return tiny_model(memory / "deep", **SIZES, **rates)


@pytest.fixture(scope="module")
def data(memory):
    return written("ner", memory / "data", 24, 12)


def prepared(task, model, data, folder=None, split="train", batch_tokens=64):
    """(sentences, their windows, their features)."""
    examples = task.read(data, split)
    windows = task.encode(examples, load_tokenizer(model), 16, split == "train")
    device = torch.device("cpu")
    return (
        examples,
        windows,
        task.prepared(windows, examples, model, device, torch.float32, batch_tokens, folder),
    )


@pytest.mark.parametrize("layers", LAYERS)
def test_features_are_transformers_states(model, data, layers):
    """In eval mode, at the first token of each word, in windows with context."""
    examples, windows, found = prepared(NerFeatures(layers=layers), model, data)
    theirs = transformers.AutoModel.from_pretrained(model).eval()
    expected = np.zeros_like(found.table)
    for window in windows.windows:
        with torch.no_grad():
            ids = torch.from_numpy(window.ids.astype(np.int64))[None]
            states = theirs(ids, output_hidden_states=True).hidden_states[LAYERS[layers]]
        kept = window.words >= 0
        expected[window.words[kept]] = torch.stack(states, 2)[0].numpy()[kept]
    assert len(expected) == sum(len(sentence.words) for sentence in examples)
    np.testing.assert_allclose(found.table, expected, rtol=1e-4, atol=1e-4)
    assert np.diff(found.starts).tolist() == [len(sentence.words) for sentence in examples]


def test_the_bilstm_is_torchs_on_sequences_alone():
    """Outputs, ends and all gradients; so neither the order of a batch nor its neighbours matter."""
    torch.manual_seed(0)
    ours = BiLstm(6, 5, 0.0).double()
    stock = nn.LSTM(6, 5, 2, bidirectional=True).double()
    named = dict(stock.named_parameters())
    places = {
        name: named[name.removeprefix(f"layers.{number}.").replace("l0", f"l{number}")]
        for number in (0, 1)
        for name, _ in ours.named_parameters()
        if name.startswith(f"layers.{number}.")
    }
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            places[name].copy_(parameter)
    lengths = [3, 1, 7, 2, 7]
    x = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    rows, ends = ours(x, starts)
    alone = [stock(part) for part in x.split(lengths)]
    expected = torch.cat([each for each, _ in alone]), torch.stack([h[2:].flatten() for _, (h, _) in alone])
    draw = torch.randn(20, 10, dtype=torch.float64), torch.randn(5, 10, dtype=torch.float64)
    gradients = []
    for found, inputs in (((rows, ends), [*ours.parameters()]), (expected, [*places.values()])):
        total = (found[0] * draw[0]).sum() + (found[1] * draw[1]).sum()
        gradients.append(torch.autograd.grad(total, [x, *inputs]))
    for found, wanted in zip((rows, ends, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layers", LAYERS)
def test_the_taggers_loss_is_that_of_plain_torch(model, data, layers):
    task = NerFeatures(layers=layers)
    _, _, found = prepared(task, model, data)
    task.adopt(transformers.AutoConfig.from_pretrained(model))
    tagger = task.first(model, None, None).double().eval()
    inputs = found.batch(np.array([3, 0, 5]), False).inputs
    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    given["features"] = given["features"].double()
    if tagger.mix is not None:
        nn.init.normal_(tagger.mix.scores, std=0.1)
        weights = (10 * tagger.mix.scores).softmax(0) * tagger.mix.scale
        x = torch.einsum("l,rlh->rh", weights, given["features"])
    else:
        x = torch.cat([*given["features"].unbind(1)], -1)
    logits = F.linear(tagger.lstm(x, given["cu_seqlens"])[0], *tagger.classifier.parameters())
    expected = F.cross_entropy(logits, given["labels"])
    torch.testing.assert_close(tagger(**given).loss, expected)
    assert tagger.lstm.layers[0].input_size == (128 if layers == "last4-concat" else 32)
    assert tagger.lstm.layers[0].hidden_size == 32


def test_it_learns_and_its_files_are_read(tmp_path, memory):
    model = tiny_model(memory / "learns", num_hidden_layers=4)
    data = written("ner", tmp_path / "data", 96, 40)
    given = {**OPTIONS, "epochs": 8, "layers": "last4-sum"}
    result = quick("ner-features", model, data, tmp_path / "run", **given)
    assert result.best.score > 0.75
    assert not result.best.failed
    assert "concatenated last four (dev, published): 96.1" in result.table()
    lines = (result.output / "dev" / "dev.txt").read_text().splitlines()
    theirs = [line.split()[-1] for line in lines if line and not line.startswith("-DOCSTART-")]
    answers = predict("ner-features", result.output, data / "valid.txt", columns=True, device="cpu")
    assert [tag for answer in answers for tag in answer["tags"]] == theirs
    assert len(theirs) > 200
    # the encoder is that of the start, and every library finds no head
    ours, kept = (transformers.AutoModel.from_pretrained(path) for path in (result.output, model))
    for name, parameter in ours.named_parameters():
        if "pooler" not in name:
            assert torch.equal(parameter, kept.get_parameter(name))
    assert json.loads((result.output / "head.json").read_text()) == {
        "kind": "ner-features",
        "layers": "last4-sum",
    }
    again = quick(
        "ner-features", result.output, data, tmp_path / "again", **{**given, "lr": 1e-12, "epochs": 0.1}
    )
    assert again.scores == result.scores
    with pytest.raises(ValueError, match=r"^layers: the tagger in .* reads last4-sum, got last"):
        predict("ner-features", result.output, [["the", "cat"]], layers="last", device="cpu")
    with pytest.raises(ValueError, match=r"^model: .* has no trained head for ner;"):
        predict("ner", result.output, [["the", "cat"]], device="cpu")
    with pytest.raises(ValueError, match=r"^model: .* has no trained tagger;"):
        predict("ner-features", model, [["the", "cat"]], device="cpu")


@pytest.fixture
def computed(monkeypatch):
    """The number of words whose features were computed, per time."""
    found, states = [], features_module._states

    def counted(*given):
        made = list(states(*given))
        found.append(sum(len(numbers) for numbers, _ in made))
        return made

    monkeypatch.setattr(features_module, "_states", counted)
    return found


def test_runs_share_the_features(tmp_path, model, data, computed):
    given = {**OPTIONS, "lr": [1e-3, 2e-3], "restarts": 2}
    result = quick("ner-features", model, data, tmp_path / "run", **given)
    assert len(result.runs) == 4
    own = task_of("ner")
    splits = [own.read(data, split) for split in ("train", "dev", "test")]
    assert computed == [sum(len(sentence.words) for sentence in split) for split in splits]
    assert not (tmp_path / "run" / "runs" / "features").exists()


def test_other_data_another_model_and_other_layers_make_new_features(tmp_path, memory, model, data, computed):
    def key(model=model, data=data, **options):
        return prepared(NerFeatures(**options), model, data, tmp_path / "cache" / model.name)[2].key

    first = key()
    assert key() == first
    assert len(computed) == 1
    other = shutil.copytree(data, tmp_path / "data")
    text = (other / "train.txt").read_text()
    (other / "train.txt").write_text(text.replace("anna I-PER", "anna O"))
    keys = {first, key(data=other), key(layers="last"), key(context=2)}
    assert len(keys) == len(computed) == 4
    small = tiny_model(memory / "small", seed=1, **SIZES)
    key(model=small)
    assert len(computed) == 5


@pytest.mark.parametrize("step", [0, 4])
def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path, monkeypatch, model, data, computed, step):
    def call(name):
        return lambda: quick("ner-features", model, data, tmp_path / name, **OPTIONS)

    call("whole")()
    stopped(monkeypatch, step, call("run"))
    assert len(computed) == 5
    call("run")()
    # those of train and dev were kept
    assert len(computed) == 6
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


def test_a_call_that_ended_while_it_made_features_is_repeated(tmp_path, monkeypatch, model, data):
    with monkeypatch.context() as patch:
        patch.setattr(features_module, "_states", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quick("ner-features", model, data, tmp_path / "run", **OPTIONS)
    quick("ner-features", model, data, tmp_path / "run", **OPTIONS)


BAD = [
    ({"freeze": False}, "freeze: expected True"),
    ({"qat": "int8"}, "qat: expected None"),
    ({"head_bilstm": True}, "head_bilstm: ner-features has a tagger of its own"),
    ({"reinit": 1}, "freeze: a frozen encoder has no use for reinit"),
    ({"layers": "first"}, "layers: expected one of last4-concat, embeddings"),
    ({"layers": "last4-sum"}, "layers: last4-sum needs a model of 4 layers, got 3"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: value if type(value) is str else "")
def test_errors(tmp_path, memory, data, options, message):
    flat = tiny_model(memory / "flat", **{**SIZES, "num_hidden_layers": 3})
    with pytest.raises(ValueError, match=rf"^{message}"):
        quick("ner-features", flat, data, tmp_path / "run", **{**OPTIONS, **options})
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match="'layers'"):
        task_of("ner", layers="last")
