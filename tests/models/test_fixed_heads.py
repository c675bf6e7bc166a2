"""Models whose heads attend by fixed patterns: against taps on the whole model, maps, files, bad input."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fastbert
from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.fixed import FixedPatterns
from fastbert.analysis.heads import importance
from fastbert.layers.patterns import LEARNED, NAMES
from fastbert.models.encoder import tapped
from fastbert.models.fixed_heads import fix_heads
from fastbert.tasks.examples import Examples
from tests.support.analysis import both
from tests.support.hf_models import BERT_LAYERS
from tests.support.pattern_maps import dense

# 3 layers of 3 heads; between them every pattern that a config may have
PATTERNS = [
    ["previous", "learned", "left context"],
    ["learned", "end", "learned"],
    ["first token", "right context", "learned"],
]
ALIKE = ["learned", "start", "next"]
LENGTHS = (11, 1, 7)


def assignment_of(patterns):
    return np.array([[NAMES.index(name) for name in row] for row in patterns])


def padded(seed=0):
    """(input_ids, attention_mask), the second with a hole."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask[0, 4] = False
    ids = torch.randint(5, 60, mask.shape, generator=draw)
    return ids, mask.long()


@pytest.fixture(params=BERT_LAYERS)
def family(request):
    return request.param


@pytest.fixture
def whole():
    return copy.deepcopy(both("bert")[1])


def of_base(model, *inputs, **kwargs):
    return model.base_model(*inputs, **kwargs)


# -- what it computes ----------------------------------------------------------------------------------------


def test_as_taps_on_the_whole_model(family):
    """Outputs and all gradients, to rounding: of queries and keys, those of learned heads."""
    original = copy.deepcopy(both(family)[1])
    shares = family.startswith("albert")
    patterns = [ALIKE] * len(original.base_model.layer_list()) if shares else PATTERNS
    fixed = fix_heads(original, ALIKE if shares else PATTERNS)
    ids, mask = padded()
    labels = torch.tensor([0, 2, 1])
    with tapped(original.base_model, FixedPatterns(assignment_of(patterns))):
        expected = original(ids, mask, labels=labels)
    found = fixed(ids, mask, labels=labels)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-10, atol=1e-12)
    for out in (expected, found):
        out.loss.backward()
    smaller = 0
    for (name, p), (other, q) in zip(original.named_parameters(), fixed.named_parameters(), strict=True):
        assert name == other
        keep = slice(None)
        if p.shape != q.shape:
            smaller += 1
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            learned = assignment_of(patterns)[numbers[0]] == LEARNED
            keep = torch.from_numpy(learned).repeat_interleave(len(p) // 3)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad[keep], rtol=1e-8, atol=1e-12, msg=name)
    # two weights and two biases of each layer; ALBERT's are shared
    own = len(set(fixed.base_model.layer_list()))
    assert smaller == 4 * own


def test_the_probabilities_are_the_maps(whole):
    ids, mask = padded()
    fixed = fix_heads(whole, PATTERNS)
    with torch.no_grad():
        found = of_base(fixed, ids, mask, output_attentions=True).attentions
        with tapped(whole.base_model, FixedPatterns(assignment_of(PATTERNS))):
            learned = of_base(whole, ids, mask, output_attentions=True).attentions
    for layer, names in enumerate(PATTERNS):
        for head, name in enumerate(names):
            for row, keep in enumerate(mask.bool()):
                got = found[layer][row, head]
                assert (got[~keep] == 0).all()
                assert (got[:, ~keep] == 0).all()
                n = int(keep.sum())
                if name == "learned":
                    expected = learned[layer][row, head][keep][:, keep]
                else:
                    expected = torch.from_numpy(dense(NAMES.index(name), n, np.zeros(n, bool)))
                torch.testing.assert_close(got[keep][:, keep], expected, rtol=1e-9, atol=1e-12)


def test_the_head_mask_reaches_every_head(whole):
    """0 for a head is its output at 0: the same as its columns of the attention's output layer at 0."""
    fixed = fix_heads(whole, PATTERNS)
    ids, mask = padded()
    for layer, head in ((0, 0), (0, 1), (2, 1)):
        gates = torch.ones(3, 3, dtype=torch.float64)
        gates[layer, head] = 0
        without = copy.deepcopy(fixed)
        dense_layer = without.bert.encoder.layer[layer].attention.output.dense
        with torch.no_grad():
            dense_layer.weight[:, 16 * head : 16 * (head + 1)] = 0
            torch.testing.assert_close(
                fixed(ids, mask, head_mask=gates).logits, without(ids, mask).logits, rtol=1e-10, atol=1e-12
            )
    gates = torch.full((3, 3), 0.5, dtype=torch.float64, requires_grad=True)
    fixed(ids, mask, head_mask=gates).logits.sum().backward()
    assert (gates.grad != 0).all()


def test_packed_and_first_tokens_as_padded(whole):
    fixed = fix_heads(whole, PATTERNS)
    ids, mask = padded()
    keep = mask.bool()
    ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    with torch.no_grad():
        whole_rows = of_base(fixed, ids, mask)[0]
        first = of_base(fixed, ids, mask, first_token_only=True)[0]
        positions = torch.arange(ids.shape[1]).expand(3, -1)[keep]
        found = of_base(fixed, ids[keep], position_ids=positions, cu_seqlens=ends)[0]
    torch.testing.assert_close(found, whole_rows[keep], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first, whole_rows[:, :1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5), (2, 5)], ids=str)
def test_no_tokens(whole, shape):
    """Of no sequences, and of sequences of which a mask keeps nothing."""
    fixed = fix_heads(whole, PATTERNS)
    ids = torch.ones(shape, dtype=torch.int64)
    for out in (of_base(fixed, ids, 0 * ids), of_base(fixed, ids, 0 * ids, output_attentions=True)):
        assert out[0].shape == (*shape, 48)
        assert (out[0] == 0).all()
    assert out.attentions[0].shape == (shape[0], 3, shape[1], shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_dtypes(whole, dtype):
    fixed = fix_heads(whole, PATTERNS)
    ids, mask = padded()
    with torch.no_grad():
        exact = of_base(fixed, ids, mask)[0]
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
        found = of_base(copy.deepcopy(fixed).to(dtype), ids, mask)[0]
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)
        under = copy.deepcopy(fixed).float()
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(of_base(under, ids, mask)[0].double(), exact, rtol=0, atol=0.1)


def test_quantised_and_compiled(whole):
    fixed = fix_heads(whole, PATTERNS).float()
    ids, mask = padded()
    with torch.no_grad():
        exact = of_base(fixed, ids, mask)[0]
        compiled = torch.compile(fixed.base_model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, mask)[0], exact, rtol=1e-4, atol=1e-4)
        eight = copy.deepcopy(fixed.base_model)
        eight.quantize()
        found = eight(ids, mask)[0]
    cosine = torch.nn.functional.cosine_similarity(found[mask.bool()], exact[mask.bool()])
    assert cosine.min() > 0.99
    assert not torch.equal(found, exact)


def test_recomputed_layers_give_the_same_gradients(whole):
    fixed = fix_heads(whole, PATTERNS).float().train()
    for module in fixed.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    again = copy.deepcopy(fixed)
    again.gradient_checkpointing_enable()
    ids, mask = padded()
    labels = torch.tensor([0, 2, 1])
    for model in (fixed, again):
        torch.manual_seed(0)
        model(ids, mask, labels=labels).loss.backward()
    for p, q in zip(fixed.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_importance_knows_fixed_heads_and_statistics_refuse_them(whole):
    fixed = fix_heads(whole, PATTERNS)
    examples = Examples(
        ids=np.array([2, 7, 9, 3, 2, 8, 3]),
        starts=np.array([0, 4, 7]),
        types=np.zeros(7, np.int64),
        segments=np.zeros(7, np.int64),
        kinds=np.array([0, 4, 4, 1, 0, 4, 1], np.int8),
        words=np.array([-1, 0, 1, -1, -1, 0, -1]),
        labels=np.array([1, 2]),
    )
    derivatives = importance(fixed, examples).derivatives
    assert derivatives.shape == (2, 3, 3)
    assert (derivatives != 0).all()
    with pytest.raises(ValueError, match=r"model: has heads with fixed patterns \(config fixed_heads\)"):
        attention_statistics(fixed, examples)


# -- configs and files ---------------------------------------------------------------------------------------


def config_of(**kwargs):
    sizes = dict(
        vocab_size=60, hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=64
    )
    return fastbert.BertConfig(**{**sizes, **kwargs})


def test_a_new_model_has_fewer_rows():
    model = fastbert.BertModel(config_of(fixed_heads=PATTERNS))
    rows = [layer.attention.self.query.weight.shape[0] for layer in model.layer_list()]
    assert rows == [16, 32, 16] == [layer.attention.self.key.bias.shape[0] for layer in model.layer_list()]
    assert all(layer.attention.self.value.weight.shape == (48, 48) for layer in model.layer_list())
    alike = fastbert.BertModel(config_of(fixed_heads=ALIKE))
    assert alike.config.fixed_patterns() == [(0, NAMES.index("start"), NAMES.index("next"))] * 3
    assert config_of().fixed_heads is None
    assert "fixed_heads" not in config_of().to_dict()


def test_saved_and_loaded(whole, tmp_path):
    fixed = fix_heads(whole, PATTERNS)
    fixed.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["fixed_heads"] == PATTERNS
    shapes = {
        tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items() if "query.w" in name
    }
    assert shapes == {(16, 48), (32, 48)}
    loaded = type(whole).from_pretrained(tmp_path, dtype=torch.float64)
    ids, mask = padded()
    with torch.no_grad():
        assert torch.equal(loaded(ids, mask).logits, fixed(ids, mask).logits)


def test_other_patterns_than_those_of_the_weights(whole, tmp_path):
    """Also where the shapes agree, and not where the same patterns are written in another way."""
    fix_heads(whole, [ALIKE] * 3).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    for given, fits in ((ALIKE, True), (["learned", "end", "next"], False)):
        path.write_text(json.dumps({**content, "fixed_heads": given}))
        if fits:
            type(whole).from_pretrained(tmp_path)
        else:
            with pytest.raises(fastbert.CheckpointError, match=r"fixed_heads: config\.json says"):
                type(whole).from_pretrained(tmp_path)


def test_a_whole_checkpoint_does_not_fit(whole, tmp_path):
    whole.save_pretrained(tmp_path)
    with pytest.raises(fastbert.CheckpointError, match=r"query.weight.*shape \(48, 48\)"):
        type(whole).from_pretrained(tmp_path, fixed_heads=PATTERNS)


def test_the_original_is_left_alone(whole):
    before = {name: t.clone() for name, t in whole.state_dict().items()}
    whole.bert.encoder.layer[1].attention.self.query.weight.requires_grad_(False)
    fixed = fix_heads(whole.train(), PATTERNS)
    assert whole.config.fixed_heads is None
    assert fixed.config.fixed_heads == PATTERNS
    assert fixed.base_model.config is fixed.config
    assert fixed.training
    weights = [layer.attention.self.query.weight for layer in fixed.base_model.layer_list()]
    assert [w.requires_grad for w in weights] == [True, False, True]
    for name, t in whole.state_dict().items():
        assert torch.equal(t, before[name])
    with torch.no_grad():
        for parameter in fixed.parameters():
            parameter.zero_()
    for name, t in whole.state_dict().items():
        assert torch.equal(t, before[name])


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], "expected None, 3 names for all layers or 3 lists of 3 names, got \\[\\]"),
        (["learned", "next"], "expected None, 3 names for all layers"),
        ("learned", "3 lists of 3 names, got 'learned'"),
        (["learned", "upwards", "next"], "config fixed_heads: expected names of learned, .*, got 'upwards'"),
        ([*PATTERNS[:2], ["learned", 3, "next"]], r"config fixed_heads\[2\]: expected names of .*, got 3"),
        (["learned", "separators", "next"], "got 'separators'"),
        (["next", "previous", "end"], "config fixed_heads: expected at least one 'learned' head, got none"),
    ],
)
def test_bad_patterns(patterns, expected):
    with pytest.raises(ValueError, match=expected):
        config_of(fixed_heads=patterns)


def test_what_does_not_go_together(whole):
    with pytest.raises(ValueError, match=r"config fixed_heads\[0\]: 'next', but with is_decoder True"):
        config_of(fixed_heads=[["next", "learned", "learned"], *PATTERNS[1:]], is_decoder=True)
    backward = ["previous", "learned", "left context"]
    causal = fastbert.BertModel(config_of(fixed_heads=backward, is_decoder=True)).eval()
    ids = padded()[0]
    with torch.no_grad():
        torch.testing.assert_close(causal(ids)[0][:, :5], causal(ids[:, :5])[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="albert shares its layers' weights, so all layers must be alike"):
        fix_heads(both("albert")[1], PATTERNS)
    fixed = fix_heads(whole, PATTERNS)
    with pytest.raises(ValueError, match="attention_mask: expected 2-D, got 4-D; heads with fixed patterns"):
        fixed(ids, torch.ones(3, 1, 1, 11))
    words = "causal: got True, but config fixed_heads has 'end', which looks ahead"
    with pytest.raises(ValueError, match=words):
        of_base(fixed, ids, causal=True)
    with pytest.raises(ValueError, match="model: expected one with learned heads only"):
        fix_heads(fixed, PATTERNS)
    with pytest.raises(TypeError, match="model: expected a model of fastbert, got Linear"):
        fix_heads(torch.nn.Linear(2, 2), PATTERNS)
    with pytest.raises(TypeError, match="patterns: expected"):
        fix_heads(whole, 3)
    with pytest.raises(ValueError, match="config fixed_heads: expected None, 3 names for all layers"):
        fix_heads(whole, [3, 4, 5])
    eight = copy.deepcopy(whole).float()
    eight.quantize()
    with pytest.raises(ValueError, match=r"model: expected plain linear layers, but attention\.self\.query"):
        fix_heads(eight, PATTERNS)
