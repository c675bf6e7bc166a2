"""Heads that read more than the last layer: against plain torch and transformers, and from files to files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import fastbert
from fastbert.finetuning import trained
from fastbert.finetuning.heads import Head
from fastbert.finetuning.predict import predict
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.tasks import task_of
from fastbert.models.auto import AutoModel, AutoModelForSequenceClassification
from fastbert.models.labels import IGNORED
from fastbert.sentences.tokenizer import load_tokenizer
from tests.support.rule_tasks import digests, quick, stopped, tiny_model, written

# name -> (the kind of the model, options of the head; beside is the kind of the second model)
FORMS = {
    "mix": ("usual", {"head_mix": True}),
    "bilstm": ("usual", {"head_bilstm": True}),
    "mix-bilstm": ("usual", {"head_mix": True, "head_bilstm": True}),
    "left-to-right": ("causal", {}),
    "left-to-right-bilstm": ("causal", {"head_bilstm": True}),
    "both-ways": ("causal", {"beside": "reversed"}),
    "both-ways-bilstm": ("causal", {"beside": "reversed", "head_bilstm": True}),
    "two-usual": ("usual", {"beside": "usual"}),
}
KINDS = {"usual": {}, "causal": {"is_decoder": True}, "reversed": {"is_decoder": True, "right_to_left": True}}


@pytest.fixture(scope="module")
def models(memory):
    """Kind -> a model, one after another with other weights."""
    return {
        kind: tiny_model(memory / kind, seed=seed, **config)
        for seed, (kind, config) in enumerate(KINDS.items())
    }


@pytest.fixture
def begun(models):
    """(task, form) -> the first model of a run, with a head that depends on all that it reads."""

    def of(task, form, **settings):
        kind, options = FORMS[form]
        options = {k: models[v] if k == "beside" else v for k, v in options.items()}
        given = Settings(lr=1e-3, epochs=1, batch_size=8, max_length=32, **settings)
        torch.manual_seed(5)
        model = task.first(models[kind], given, Head(**options))
        if (above := model._modules.get("above")) is not None and above.mix is not None:
            nn.init.normal_(above.mix.scores, std=0.1)
            nn.init.normal_(above.mix.scale)
        return model

    return of


def of_task(task):
    return task_of(task, **({"max_query": 10, "doc_stride": 8} if task == "squad2" else {}))


def one_lstm(ours):
    """PyTorch's own LSTM of two layers, with the weights of ours."""
    parts = list(ours.layers)
    found = nn.LSTM(parts[0].input_size, parts[0].hidden_size, 2, bidirectional=True, batch_first=True)
    for number, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            getattr(found, name.replace("l0", f"l{number}")).data = parameter.data.clone()
    return found.double()


def transformers_loss(model, folder, task, inputs):
    """The loss as transformers' encoders and plain torch have it, each sequence alone; and an encoder."""
    trained.save(model, folder)
    above = model._modules.get("above")
    encoder = transformers.AutoModel.from_pretrained(folder).double().eval()
    second = lstm = None
    if above is not None and above.beside is not None:
        second = transformers.AutoModel.from_pretrained(folder / "beside").double().eval()
    if above is not None and above.lstm is not None:
        lstm = one_lstm(above.lstm)
    logits, vectors = [], []
    cut = np.split(np.arange(len(inputs["input_ids"])), inputs["cu_seqlens"][1:-1])
    for rows in cut:
        ids, types = (torch.from_numpy(inputs[k][rows])[None] for k in ("input_ids", "token_type_ids"))
        states = encoder(ids, token_type_ids=types, output_hidden_states=True).hidden_states
        parts, causal = [states[-1]], encoder.config.is_decoder
        ends = [-1 if causal else 0]
        if above is not None and above.mix is not None:
            weights = (10 * above.mix.scores).softmax(0).double() * above.mix.scale.double()
            parts = [torch.einsum("l,lbsh->bsh", weights, torch.stack(states))]
        if second is not None and second.config.to_dict().get("right_to_left"):
            parts.append(second(ids.flip(1), token_type_ids=types.flip(1)).last_hidden_state.flip(1))
            ends.append(0)
        elif second is not None:
            parts.append(second(ids, token_type_ids=types).last_hidden_state)
            ends.append(0)
        x = torch.cat(parts, -1)
        last = torch.cat([part[:, end] for part, end in zip(parts, ends, strict=True)], -1)
        if lstm is not None:
            x, (states_of_ends, _) = lstm(x)
            last = torch.cat([states_of_ends[-2], states_of_ends[-1]], -1)
        elif second is not None:
            x, last = (F.linear(v, above.narrow.weight, above.narrow.bias) for v in (x, last))
        logits.append(x[0])
        vectors.append(last)
    labels = {k: torch.from_numpy(v) for k, v in inputs.items() if k in ("labels", "start_positions")}
    if task in ("cola", "swag"):
        pooled = F.linear(torch.cat(vectors), *model.bert.pooler.dense.parameters()).tanh()
        scores = F.linear(pooled, *model.classifier.parameters()).reshape(len(labels["labels"]), -1)
        return F.cross_entropy(scores, labels["labels"]), encoder
    if task == "ner":
        scores = F.linear(torch.cat(logits), *model.classifier.parameters())
        return F.cross_entropy(scores, labels["labels"], ignore_index=IGNORED), encoder
    scores = [F.linear(x, *model.qa_outputs.parameters()) for x in logits]
    losses = [
        F.cross_entropy(each[None, :, side], torch.from_numpy(inputs[name][i : i + 1]))
        for i, each in enumerate(scores)
        for side, name in enumerate(("start_positions", "end_positions"))
    ]
    return sum(losses) / len(losses), encoder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["cola", "swag", "ner", "squad2"])
def test_losses_and_gradients_are_those_of_sequences_alone(tmp_path, begun, models, task, form):
    own = of_task(task)
    examples = own.read(written(task, tmp_path / "data", 9, 3), "train")
    train = own.encode(examples, load_tokenizer(models["usual"]), 32, True)
    inputs = train.batch(np.array([2, 0, len(train) - 1, 1]), True).inputs
    model = begun(own, form).double().eval()
    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    loss = model(**given).loss
    loss.backward()
    expected, encoder = transformers_loss(model, tmp_path / "saved", task, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-7)
    gradients = dict(model.named_parameters())
    heads = [name for name in gradients if not name.startswith(("bert.", "above.beside."))]
    ours = {name: gradients[name].grad.clone() for name in heads if "lstm" not in name}
    for name in ours:
        gradients[name].grad = None
    expected.backward()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, gradients[name].grad, rtol=1e-6, atol=1e-8)
    for name, parameter in encoder.named_parameters():
        if parameter.grad is not None:
            found = model.bert.get_parameter(name).grad
            torch.testing.assert_close(found, parameter.grad, rtol=1e-6, atol=1e-8)


def test_a_batch_that_is_padded_equals_the_packed_one(tmp_path, begun, models):
    own = of_task("cola")
    examples = own.read(written("cola", tmp_path / "data", 9, 3), "train")
    train = own.encode(examples, load_tokenizer(models["usual"]), 32, True)
    model = begun(own, "both-ways-bilstm").double().eval()
    ids = [
        torch.from_numpy(ids)[:n]
        for n, ids in zip((7, 4), np.split(train.ids, train.starts[1:3])[:2], strict=True)
    ]
    starts = torch.tensor([0, 7, 11], dtype=torch.int32)
    packed = model(torch.cat(ids), cu_seqlens=starts).logits
    padded = nn.utils.rnn.pad_sequence(ids, True)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    torch.testing.assert_close(model(padded, mask).logits, packed, rtol=1e-9, atol=1e-9)
    embeds = model.get_input_embeddings()(padded)
    with pytest.raises(ValueError, match=r"^inputs_embeds: expected input_ids with beside"):
        model(inputs_embeds=embeds)


@pytest.fixture(scope="module")
def data(memory):
    return written("csv", memory / "data", 24, 12)


OPTIONS = {"lr": 2e-3, "epochs": 2, "batch_size": 8}
SAVED = ["mix-bilstm", "left-to-right", "both-ways-bilstm"]


@pytest.mark.parametrize("form", SAVED)
def test_files(tmp_path, models, data, form):
    """Predictions, a second training and every library read what was saved, or say what they lack."""
    kind, options = FORMS[form]
    options = {k: models[v] if k == "beside" else v for k, v in options.items()}
    result = quick("csv", models[kind], data, tmp_path / "run", **OPTIONS, **options)
    rows = (result.output / "dev" / "dev.csv").read_text().split()[1:]
    answers = predict("csv", result.output, data / "dev.csv", device="cpu")
    assert [answer["label"] for answer in answers] == [row.split(",")[1] for row in rows]
    again = quick("csv", result.output, data, tmp_path / "again", lr=1e-12, epochs=0.1)
    assert again.scores == result.scores
    assert json.loads((again.output / "head.json").read_text()) == {
        "kind": "ForSequenceClassification",
        "head_mix": "head_mix" in options,
        "head_bilstm": "head_bilstm" in options,
        "beside": "beside" in options,
    }
    kind = transformers.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(result.output, output_loading_info=True)[1]
    assert {"classifier.weight", "classifier.bias"} <= {*theirs["missing_keys"]}
    with pytest.warns(UserWarning, match="freshly initialised"):
        AutoModelForSequenceClassification.from_pretrained(result.output)
    other = written("ner", tmp_path / "ner", 4, 4) / "valid.txt"
    with pytest.raises(ValueError, match=r"^model: .* has no trained head for ner;"):
        next(predict("ner", result.output, other, columns=True, device="cpu"))


def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path, monkeypatch, memory, data):
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = tiny_model(memory / "dropping", **rates, **KINDS["causal"])
    second = tiny_model(memory / "second", seed=1, **rates, **KINDS["reversed"])
    options = {"beside": second, "head_mix": True, "head_bilstm": True, **OPTIONS}
    quick("csv", model, data, tmp_path / "whole", **options)
    stopped(monkeypatch, 4, lambda: quick("csv", model, data, tmp_path / "run", **options))
    quick("csv", model, data, tmp_path / "run", **options)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    monkeypatch.undo()
    other = tiny_model(memory / "third", seed=2, **rates, **KINDS["reversed"])
    with pytest.raises(ValueError, match=r"^head\.beside: the run in"):
        quick("csv", model, data, tmp_path / "run", **{**options, "beside": other})


def test_new_layers_are_on_top(tmp_path, models, data):
    options = {"head_layers": 2, "freeze": True, **OPTIONS}
    result = quick("csv", models["usual"], data, tmp_path / "run", **options)
    loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        result.output, output_loading_info=True
    )
    assert loaded.config.num_hidden_layers == 4
    assert not report["missing_keys"]
    before = AutoModel.from_pretrained(models["usual"])
    for name, parameter in before.named_parameters():
        if "pooler" not in name:
            assert torch.equal(loaded.base_model.get_parameter(name), parameter)
    # the new layers have learned: they are no longer at their first biases
    assert loaded.bert.encoder.layer[2].output.dense.bias.abs().max() > 0
    assert loaded.bert.encoder.layer[3].output.dense.bias.abs().max() > 0


BAD = [
    ({"head_mix": 1}, "head_mix: expected True or False"),
    ({"head_bilstm": "yes"}, "head_bilstm: expected True or False"),
    ({"head_layers": -1}, "head_layers: expected an integer >= 0"),
    ({"head_layers": True}, "head_layers: expected an integer >= 0"),
    ({"beside": 3}, "beside: expected a directory"),
    ({"head_layers": 1, "head_mix": True}, "head_layers: expected 0 with head_mix"),
    ({"head_layers": 1, "beside": "usual"}, "head_layers: expected 0 with beside"),
    ({"head_layers": 1, "reinit": 1}, "reinit: expected 0 with head_layers"),
    ({"beside": "usual", "layer_decay": 0.9}, "layer_decay: expected 1.0 with beside"),
    ({"beside": "usual", "qat": "int8"}, "qat: expected None with beside"),
    ({"beside": "usual", "random_init": True}, "random_init: expected False with beside"),
    ({"beside": "cased"}, "beside: expected the tokenizer of the model"),
    ({"beside": "short"}, "beside: expected 64 positions as the model has, got 32"),
    ({"model": "reversed"}, "model: .* reads from right to left; expected it as beside"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: value if type(value) is str else "")
def test_errors(tmp_path, models, memory, data, options, message):
    places = {**models, "cased": memory / "cased", "short": memory / "short"}
    tiny_model(places["short"], max_position_embeddings=32)
    words = (tiny_model(places["cased"]) / "vocab.txt").read_text()
    (places["cased"] / "vocab.txt").write_text(words.replace("cat", "Cat"))
    given = {name: places.get(value, value) for name, value in options.items()}
    with pytest.raises(ValueError, match=rf"^{message}"):
        quick("csv", given.pop("model", models["usual"]), data, tmp_path / "run", **given)


def test_a_model_that_shares_its_layers_gets_no_new_ones(tmp_path, data):
    torch.manual_seed(0)
    sizes = {"embedding_size": 16, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = fastbert.AutoConfig.for_model("albert", vocab_size=60, intermediate_size=32, **sizes)
    AutoModel.from_config(config).save_pretrained(tmp_path / "albert")
    given = Settings(lr=1e-3, epochs=1, batch_size=8, max_length=32)
    with pytest.raises(ValueError, match=r"^head_layers: expected 0, because albert shares its layers"):
        task_of("csv").first(tmp_path / "albert", given, Head(head_layers=1))
    for change in ({"reinit": 1}, {"layer_decay": 0.9}):
        with pytest.raises(ValueError, match=r"^model: albert shares its layers"):
            task_of("csv").first(tmp_path / "albert", replace(given, **change), Head())
