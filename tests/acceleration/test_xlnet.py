"""Accelerated XLNet: every kind of layer and call, what heads read of padding, memories, options."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

import fastbert
from fastbert.layers import two_streams
from tests.support.accelerated_models import (
    HEAD,
    LAYERS,
    MODEL,
    build,
    calls,
    close,
    same_gradients,
    same_outputs,
    stock,
)
from tests.support.hf_models import batch

KINDS = {
    "as published": {},
    "left to right": {"attn_type": "uni"},
    "clamped": {"clamp_len": 4, "mem_len": None},
    "short memories": {"mem_len": 6, "reuse_len": 14},
    "without memories": {"use_mems_eval": False, "ff_activation": "relu"},
}
PACKED = {"packed": 1, "padded": 0, "fused": LAYERS, "stock": 0}
PADDED = {"packed": 0, "padded": 1, "fused": 0, "stock": LAYERS}


def models(auto: type = MODEL, **config):
    """(the stock model, the same accelerated), in float64."""
    return tuple(model.double() for model in build("xlnet", auto, summary_last_dropout=0.0, **config))


def texts(padding: str = "left") -> dict[str, torch.Tensor]:
    """Four texts; XLNet's tokenizer pads on the left. Token types go up to 9."""
    inputs = batch("xlnet", seqlen=20)
    inputs["token_type_ids"] = torch.randint(0, 10, (4, 20), generator=torch.Generator().manual_seed(1))
    lengths, columns = torch.tensor([20, 1, 7, 13])[:, None], torch.arange(20)
    mask = {"left": columns >= 20 - lengths, "right": columns < lengths, "none": columns >= 0 * lengths}
    inputs["attention_mask"] = mask.get(padding, inputs["attention_mask"]).long()
    return inputs


@pytest.mark.parametrize("padding", ["left", "right", "holes", "none"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_kinds(kind, padding):
    """Outputs, memories and hidden states."""
    slow, fast = models(**KINDS[kind])
    inputs, asked = texts(padding), {"output_hidden_states": True}
    kept = inputs["attention_mask"].bool()
    if kind == "left to right":
        if padding != "none":
            pytest.skip("transformers fails: it adds a mask of a batch to one of a sequence in place")
        del inputs["attention_mask"]
    with calls(fast, **PACKED):
        actual = fast(**inputs, **asked)
    expected = slow(**inputs, **asked)
    assert list(actual) == list(expected)
    mems = (actual.mems or (), expected.mems or ())
    assert len(mems[0]) == len(mems[1])
    for ours, theirs in zip(*mems, strict=True):
        # The last tokens of the first `reuse_len`
        first = (slow.reuse_len or 20) - len(theirs)
        at = kept[:, first : first + len(theirs)].T
        close(ours[at], theirs[at], 1e-9)
        assert ours[~at].eq(0).all()
    for output in (actual, expected):
        output.mems = None
    made = [type(o)(o.last_hidden_state, hidden_states=o.hidden_states) for o in (actual, expected)]
    same_outputs(*made, kept, 1e-9)
    ours, theirs = (model(**inputs, return_dict=False) for model in (fast, slow))
    assert [type(part) for part in ours] == [type(part) for part in theirs]
    close(ours[0][kept], theirs[0][kept], 1e-9)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gradients(layout, training):
    slow, fast = (model.train(training) for model in models(HEAD, use_mems_train=True, use_mems_eval=False))
    if layout == "padded":
        fastbert.accelerate(fast, unpad=False)
    before = list(fast.state_dict())
    with calls(fast, **(PACKED if layout == "packed" else PADDED)):
        actual = fast(**texts(), labels=torch.tensor([1, 0, 1, 1]))
    expected = slow(**texts(), labels=torch.tensor([1, 0, 1, 1]))
    close(actual.logits, expected.logits, 1e-9)
    assert list(actual) == list(expected)
    assert not any(each.requires_grad for each in actual.mems or ())
    for output in (actual, expected):
        output.loss.backward()
    same_gradients(fast, slow, 1e-9)
    assert list(fast.state_dict()) == before == list(slow.state_dict())


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("summary", ["last", "first", "mean", "cls_index"])
@pytest.mark.parametrize("task", ["ForSequenceClassification", "ForMultipleChoice"])
@torch.no_grad()
def test_a_head_that_reads_a_masked_token_keeps_the_padding(task, summary, padding):
    slow, fast = models(getattr(transformers, f"AutoModel{task}"), summary_type=summary)
    inputs, reads = texts(padding), {"first": "left", "mean": "left right"}.get(summary, "right")
    if task == "ForMultipleChoice":
        inputs = {key: value.view(2, 2, 20) for key, value in inputs.items()}
    with calls(fast, **(PADDED if padding in reads else PACKED)):
        actual = fast(**inputs).logits
    close(actual, slow(**inputs).logits, 1e-9)


@pytest.mark.parametrize("padding", ["left", "none"])
@pytest.mark.parametrize(
    "name", ["XLNetLMHeadModel", "XLNetForTokenClassification", "XLNetForQuestionAnswering"]
)
@torch.no_grad()
def test_heads_of_tokens(name, padding):
    """A search for spans reads masked tokens."""
    slow, fast = models(getattr(transformers, name))
    inputs, kept = texts(padding), texts(padding)["attention_mask"].bool()
    searches = name.endswith("Answering")
    with calls(fast, **(PADDED if searches and padding == "left" else PACKED)):
        actual = fast(**inputs)
    expected = slow(**inputs)
    assert list(actual) == list(expected)
    for key in [key for key in expected if key != "mems"]:
        rows = ... if searches else kept
        close(actual[key][rows], expected[key][rows], 1e-9)


@torch.no_grad()
def test_answers_have_no_padding():
    slow, fast = models(transformers.XLNetForQuestionAnsweringSimple)
    inputs, labels = (
        texts(),
        {key: torch.tensor([19, 19, 19, 8]) for key in ("start_positions", "end_positions")},
    )
    with calls(fast, **PACKED):
        actual = fast(**inputs, **labels)
    for row, kept in enumerate(inputs["attention_mask"].bool()):
        expected = slow(**{key: value[row : row + 1, kept] for key, value in inputs.items()})
        for key in ("start_logits", "end_logits"):
            close(actual[key][row].softmax(0)[kept], expected[key][0].softmax(0), 1e-9)
    assert actual.loss <= slow(**inputs, **labels).loss
    with calls(fast.train(), **PADDED):
        close(fast(**inputs, **labels).loss, slow(**inputs, **labels).loss, 1e-9)


SEEN = (torch.rand(4, 20, 20, generator=torch.Generator().manual_seed(0)) > 0.6).double()
SPECIAL = {
    "mems": {"mems": [torch.randn(5, 4, 48, dtype=torch.float64) for _ in range(LAYERS)]},
    "perm_mask": {"perm_mask": SEEN},
    "target_mapping": {"target_mapping": torch.eye(20).double()[:3].expand(4, -1, -1)},
    "input_mask": {"input_mask": 1.0 - texts()["attention_mask"], "attention_mask": None},
    "output_attentions": {"output_attentions": True},
    "position_ids": {"position_ids": torch.arange(20).flip(0)[None]},
}


@pytest.mark.parametrize("asked", SPECIAL)
@torch.no_grad()
def test_calls_of_the_stock_layers(asked):
    slow, fast = models()
    given = texts() | SPECIAL[asked]
    with calls(fast, **PADDED):
        actual = fast(**given)
    expected = slow(**given)
    assert list(actual) == list(expected)
    for key in expected:
        values = [[v] if isinstance(v, torch.Tensor) else v for v in (actual[key], expected[key])]
        assert all(torch.equal(*pair) for pair in zip(*values, strict=True))
    fastbert.accelerate(fast, strict=True)
    fast(**{**texts(), "input_ids": texts()["input_ids"].where(texts()["attention_mask"] > 0, 5)})
    with pytest.raises(RuntimeError, match=r"layer\.0: only the stock layer takes a padded batch"):
        fast(**given)


@pytest.mark.parametrize("config", [{"bi_data": True}, {"attn_type": "uni", "same_length": True}], ids=str)
@torch.no_grad()
def test_configs_of_the_padded_batch(config):
    slow, fast = models(**config)
    ids = texts()["input_ids"]
    with calls(fast, **PADDED):
        assert torch.equal(fast(ids)[0], slow(ids)[0])
    assert "bi_data or same_length" in fastbert.explain(fast).models[0].reason


@torch.no_grad()
def test_another_dropout_of_the_encoder():
    found = []
    for model in models():
        model.dropout = nn.AlphaDropout(0.5)
        torch.manual_seed(0)
        with calls(model, **(PADDED if found else {})):
            found.append(model(**texts())[0])
    assert torch.equal(*found)
    assert fastbert.explain(model).models[0].reason == "dropout is not a plain dropout"


OURS = {"layer_norm": LAYERS, "feed_forward_norm": LAYERS}
OPTIONS = [
    ({}, OURS),
    ({"ffn": False}, {"layer_norm": LAYERS}),
    ({"layer_norm": False}, {"feed_forward_norm": LAYERS}),
    ({"attention": False}, {}),
]


@pytest.mark.parametrize("act", ["gelu", "mish"])
@pytest.mark.parametrize(("options", "ours"), OPTIONS, ids=str)
@torch.no_grad()
def test_options(options, ours, act, monkeypatch):
    """mish is an activation that our ops lack."""
    slow, fast = models(ff_activation=act)
    fastbert.accelerate(fast, **options)
    called: Counter[str] = Counter()
    for name in OURS:

        def counted(own, *args, **kwargs):
            called[own.__name__] += 1
            assert own.__name__ == "layer_norm" or args[8] is options.get("layer_norm", True)
            return own(*args, **kwargs)

        monkeypatch.setattr(two_streams, name, functools.partial(counted, getattr(two_streams, name)))
    inputs, kept = texts(), texts()["attention_mask"].bool()
    with calls(fast, **(PADDED if "attention" in options else PACKED)):
        close(fast(**inputs)[0][kept], slow(**inputs)[0][kept], 1e-9)
    assert called == (ours if act == "gelu" else {k: v for k, v in ours.items() if k == "layer_norm"})
    assert ("attention=False" in str(fastbert.explain(fast))) is ("attention" in options)


@torch.no_grad()
def test_8_bits_are_refused():
    with pytest.warns(RuntimeWarning, match="its attention has no linear layers"):
        fast = fastbert.accelerate(stock("xlnet"), dtype="int8")
    with calls(fast, **PACKED):
        fast(**texts())
    with pytest.raises(ValueError, match="its attention has no linear layers"):
        fastbert.accelerate(stock("xlnet"), dtype="int8", strict=True)


def test_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["layer_1", "layer_2"], r=4, init_lora_weights=False)
    torch.manual_seed(0)
    slow = peft.get_peft_model(models(HEAD)[0], config).train()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    for model in (slow, fast):
        with calls(model, **(PACKED if model is fast else {})):
            model(**texts(), labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    same_gradients(fast, slow, 1e-9)


@torch.no_grad()
def test_folders_copies_and_the_way_back(tmp_path):
    slow, fast = build("xlnet", transformers.XLNetLMHeadModel)
    inputs, kept = texts(), texts()["attention_mask"].bool()
    expected = slow(**inputs).logits
    for model, name in ((slow, "slow"), (fast, "fast")):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "slow").iterdir():
        assert file.read_bytes() == (tmp_path / "fast" / file.name).read_bytes()
    loaded = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "fast")
    for model in (fastbert.accelerate(loaded), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with calls(model, **PACKED):
            close(model(**inputs).logits[kept], expected[kept])
        model.transformer.layer[0].rel_attn.q.mul_(2)
        assert not torch.equal(model(**inputs).logits, fast(**inputs).logits)
    prompt = {"input_ids": inputs["input_ids"][:, :6], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(fast.generate(**prompt), slow.generate(**prompt))
    fastbert.restore(fast)
    assert [type(m) for m in fast.modules()] == [type(m) for m in slow.modules()]
    assert torch.equal(fast(**inputs).logits, expected)
