"""Distillation's objective, Theseus's replacing and the BiLSTM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fastbert
from fastbert.compression.distillation.bilstm import BiLstmConfig, BiLstmForSequenceClassification
from fastbert.compression.distillation.objective import Distilled
from fastbert.compression.size import size_of
from fastbert.finetuning.losses import TaskLosses
from fastbert.training.stream import Batch
from tests.support.rule_tasks import COLOURS, SIZES, WORDS, tiny_model

CLASSES = dict(enumerate(COLOURS[:3]))


def model(layers=2, seed=0, drop=0.0, kind=fastbert.BertForSequenceClassification, **config):
    torch.manual_seed(seed)
    rates = {"hidden_dropout_prob": drop, "attention_probs_dropout_prob": drop}
    sizes = {**SIZES, "num_hidden_layers": layers, "id2label": CLASSES, **rates, **config}
    return kind(fastbert.EncoderConfig(**sizes))


def batch(seed=0, lengths=(5, 9, 2, 7), labels=(0, 1, -100, 2)):
    draw = np.random.default_rng(seed)
    return {
        "input_ids": torch.from_numpy(draw.integers(5, len(WORDS), sum(lengths))),
        "token_type_ids": torch.zeros(sum(lengths), dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "max_seqlen": max(lengths),
        "labels": torch.tensor(labels),
    }


def given(inputs):
    return {name: value for name, value in inputs.items() if name != "labels"}


@torch.no_grad()
def states_of(model, inputs):
    return model(**given(inputs), output_hidden_states=True)


def test_losses_are_those_of_the_formulas():
    teacher, student = model(4, 1).eval(), model(2, 2).eval()
    inputs = batch()
    weights = {"kd": 1.0, "task": 1.0, "patient": 1.0, "logits": 1.0, "cosine": 1.0, "hidden": 1.0}
    weights |= {"embeddings": 1.0, "scores": 1.0, "attention": 1.0, "values": 1.0}
    module = Distilled(student, teacher, weights, [(1, 3), (2, 4)], temperature=3.0)
    found = {name: loss.item() for name, loss in module(inputs)[0].items()}
    s, t = states_of(student, inputs), states_of(teacher, inputs)
    pairs, starts = ((1, 3), (2, 4)), inputs["cu_seqlens"][:-1].long()
    soft = F.kl_div(F.log_softmax(s.logits / 3, 1), F.softmax(t.logits / 3, 1), reduction="batchmean")
    expected = {
        "kd": 9 * soft,
        "task": F.cross_entropy(s.logits, inputs["labels"]),
        "logits": F.mse_loss(s.logits, t.logits),
        "cosine": (1 - F.cosine_similarity(s.hidden_states[2], t.hidden_states[4])).mean(),
        "hidden": sum(F.mse_loss(s.hidden_states[m], t.hidden_states[n]) for m, n in pairs),
        "embeddings": F.mse_loss(s.hidden_states[0], t.hidden_states[0]),
        "patient": F.mse_loss(
            *(
                torch.stack([F.normalize(o.hidden_states[layer][starts]) for layer in layers])
                for o, layers in ((s, (1, 2)), (t, (3, 4)))
            )
        ),
    }
    maps = [model(**given(inputs), output_attentions=True).attentions for model in (student.eval(), teacher)]
    kept = torch.arange(9) < inputs["cu_seqlens"].diff()[:, None]
    both = (
        maps[1][n - 1] * (maps[1][n - 1].clamp(min=1e-30) / maps[0][m - 1].clamp(min=1e-30)).log()
        for m, n in pairs
    )
    expected["attention"] = sum((p.sum(-1) * kept[:, None]).sum() / (4 * kept.sum()) for p in both)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value.item(), rel=2e-5), name
    assert found["scores"] > 0
    assert found["values"] > 0


def test_a_student_like_its_teacher_has_no_loss():
    teacher = model(2, 1).eval()
    weights = dict.fromkeys(("kd", "patient", "logits", "cosine", "hidden", "embeddings"), 1.0)
    weights |= dict.fromkeys(("scores", "attention", "values", "queries", "keys"), 1.0)
    module = Distilled(model(2, 1).eval(), teacher, weights, [(1, 1), (2, 2)], relation_heads=8)
    for name, loss in module(batch())[0].items():
        assert abs(loss.item()) < 1e-6, name


def test_only_the_student_and_maps_learn():
    teacher = model(4, 1).eval().requires_grad_(False)
    student = model(2, 2, hidden_size=32)
    weights = {"hidden": 1.0, "embeddings": 1.0, "scores": 1.0, "queries": 1.0, "keys": 1.0}
    module = Distilled(student, teacher, weights, [(1, 2), (2, 4)], relation_heads=16)
    losses = module(batch())[0]
    torch.stack([*losses.values()]).sum().backward()
    assert module.maps.keys() == {"hidden", "embeddings"}
    names = {name for name, p in module.named_parameters()}
    assert names == {f"student.{n}" for n, _ in student.named_parameters()} | {
        "maps.hidden.weight",
        "maps.embeddings.weight",
    }
    learned = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"maps.hidden.weight", "maps.embeddings.weight"} <= learned
    assert all(p.grad is None for p in teacher.parameters())
    assert not teacher.training
    module.train()
    assert not teacher.training
    counts = {"hidden": 23}
    given = Batch(
        {k: v.numpy() if torch.is_tensor(v) else v for k, v in batch().items()}, counts, np.array([23])
    )
    whole, alone = (
        module.work(given),
        Distilled(student, student, weights, [(1, 1)], relation_heads=16).work(given),
    )
    assert 0 < alone < whole


@pytest.mark.parametrize("kind", ["Bert", "Electra", "ModernBert", "Albert"])
@pytest.mark.parametrize(
    "weights",
    [("attention", "values"), ("queries", "keys", "values"), ("embeddings", "hidden", "scores"), ("hidden",)],
)
def test_what_no_loss_reads_is_frozen(kind, weights):
    """And all else has a gradient, as ddp demands."""
    kind, more = getattr(fastbert, f"{kind}Model"), {}
    if kind in (fastbert.AlbertModel, fastbert.ElectraModel):
        more = {"embedding_size": 16}
    elif kind is fastbert.ModernBertModel:
        more = {"layer_types": ["full_attention"] * 3, "pad_token_id": 0}
    model_type = kind.model_type or "bert"
    teacher, student = (model(3, seed, kind=kind, model_type=model_type, **more) for seed in (1, 2))
    pairs = [(2, 2), (3, 3)] if "hidden" in weights else [(3, 3)]
    module = Distilled(student, teacher.eval(), dict.fromkeys(weights, 1.0), pairs)
    frozen = {name for name, p in student.named_parameters() if not p.requires_grad}
    student.requires_grad_(True)
    torch.stack([*module(batch())[0].values()]).sum().backward()
    assert frozen == {name for name, p in student.named_parameters() if p.grad is None}
    assert len(frozen) < len([*student.parameters()]) / 2
    assert any("pooler" in name for name in frozen) or kind is not fastbert.BertModel


def test_relations_split_the_width_by_their_own_heads():
    teacher, student = model(2, 1).eval(), model(1, 2, hidden_size=32, num_attention_heads=2).eval()
    inputs = batch(lengths=(6,), labels=(0,))
    module = Distilled(student, teacher, {"values": 1.0}, [(1, 2)], relation_heads=8)
    with torch.no_grad():
        hidden = [model.base_model.layer_list() for model in (student, teacher)]
        inner = [states_of(m, inputs).hidden_states[n] for m, n in ((student, 0), (teacher, 1))]
        v = [
            F.linear(x, layers[n].attention.self.value.weight, layers[n].attention.self.value.bias)
            for x, layers, n in zip(inner, hidden, (0, 1), strict=True)
        ]
        maps = []
        for values in v:
            heads = values.unflatten(1, (8, -1)).transpose(0, 1)
            maps.append((heads @ heads.mT / heads.shape[-1] ** 0.5).softmax(-1))
        expected = (maps[1] * (maps[1] / maps[0]).log()).sum(-1).mean()
    assert module(inputs)[0]["values"].item() == pytest.approx(expected.item(), rel=1e-4)


# -- Theseus


def replaced(student, teacher, k, b):
    return Distilled(student, teacher, {"task": 1.0}, [(1, 2), (2, 4)], replacing=(k, b)).train()


def test_with_certainty_the_successor_is_alone():
    teacher, inputs = model(4, 1).eval(), batch(labels=(0, 1, 2, 2))
    one, other = model(2, 2, drop=0.1).train(), model(2, 2, drop=0.1).train()
    module, alone = replaced(one, teacher, 0.0, 1.0), TaskLosses(other)
    losses = []
    for each in (module, alone):
        torch.manual_seed(5)
        # The draw of layers comes first
        if each is alone:
            torch.rand(2)
        losses.append(each({**inputs}, False)[0]["task"])
        losses[-1].backward()
    assert torch.equal(*losses)
    grads = zip(one.named_parameters(), other.named_parameters(), strict=True)
    for (name, mine), (_, theirs) in grads:
        # Only layers learn while they replace
        if ".layer." in name:
            assert torch.equal(mine.grad, theirs.grad), name
        else:
            assert not mine.requires_grad, name
            assert mine.grad is None, name


def test_layers_replace_their_groups_at_the_rate():
    teacher, student = model(4, 1).eval(), model(2, 2)
    module = replaced(student, teacher, 0.1, 0.25)
    stack, seen = student.bert.encoder.layer, []
    own, theirs = list(stack), teacher.base_model.layer_list()
    expected = {
        (True, True): own,
        (True, False): [own[0], *theirs[2:]],
        (False, True): [*theirs[:2], own[1]],
    }
    torch.manual_seed(0)
    for _ in range(400):
        with module.replacing.mixed():
            seen.append(list(stack))
    assert list(stack) == own
    shares = {key: sum(each == layers for each in seen) / 400 for key, layers in expected.items()}
    assert sum(shares.values()) == 1
    # p = 1/4, and where none is drawn one of the two replaces
    for key, share in (((True, True), 1 / 16), ((True, False), 15 / 32), ((False, True), 15 / 32)):
        assert abs(shares[key] - share) < 0.07, key
    learning = [p for p in student.parameters() if p.requires_grad]
    module.optimized(optimizer := torch.optim.AdamW(learning, 1e-9))
    rates = []
    for _ in range(9):
        rates.append(module.replacing.rate)
        learning[0].grad = torch.ones_like(learning[0])
        optimizer.step()
    assert rates == pytest.approx([min(1, 0.25 + 0.1 * t) for t in range(9)])
    # In eval mode the student is alone, and an error inside leaves it whole
    inputs = batch(labels=(0, 1, 2, 2))
    module.eval()
    assert torch.equal(module(inputs)[0]["task"], module(inputs)[0]["task"])
    with pytest.raises(RuntimeError, match="inside"), module.replacing.mixed():
        raise RuntimeError("inside")
    assert list(stack) == own


# -- the BiLSTM


def test_a_bilstm_reads_packed_and_whole_texts(tmp_path):
    torch.manual_seed(0)
    config = BiLstmConfig(20, 6, CLASSES, hidden_size=5, inner_size=4)
    ours = BiLstmForSequenceClassification(config).eval()
    ids = torch.randint(20, (3, 7))
    whole = ours(ids).logits
    lengths = (7, 4, 1)
    packed = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
    found = ours(packed, cu_seqlens=torch.tensor([0, 7, 11, 12], dtype=torch.int32)).logits
    stock = torch.nn.LSTM(6, 5, bidirectional=True, batch_first=True)
    stock.load_state_dict(ours.lstm.layers[0].state_dict())
    for i, n in enumerate(lengths):
        ends = stock(ours.embeddings(ids[i : i + 1, :n]))[1][0].transpose(0, 1).flatten(1)
        expected = ours.classifier(ours.dense(ends).relu())[0]
        torch.testing.assert_close(found[i], expected)
    torch.testing.assert_close(whole[0], found[0])
    ours.save_pretrained(tmp_path)
    again = BiLstmForSequenceClassification.from_pretrained(tmp_path)
    assert again.config == config
    assert torch.equal(again(ids).logits, whole)
    size = size_of(ours)
    assert size.flops == 2 * 2 * 4 * 5 * (6 + 5)
    assert (size.parameters, size.bytes) == (ours.num_parameters(), 4 * ours.num_parameters())
    tiny_model(tmp_path / "bert")
    with pytest.raises(ValueError, match="model_type: expected 'bilstm', got 'bert'"):
        BiLstmForSequenceClassification.from_pretrained(tmp_path / "bert")
