"""jina-embeddings-v2 against a reference in plain PyTorch: transformers has no class of it."""

from __future__ import annotations

import copy
import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import fastbert
from fastbert.layers.alibi import slopes
from fastbert.layers.taps import Taps
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import tapped
from fastbert.models.outputs import BaseModelOutputWithPooling
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import unit_scale
from tests.support.model_pairs import close, kept_rows, no_larger_errors, same_packed_and_alone

LENGTHS = (1, 2, 17, 72, 73, 101)
HEADS, SIZE, LAYERS = 3, 16, 3
# The keys of the published config.json, with small sizes; 3 heads are no power of two
CONFIG = {
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "attention_probs_dropout_prob": 0.0,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 80,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 72,
    "model_max_length": 72,
    "model_type": "bert",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "type_vocab_size": 2,
    "vocab_size": 120,
}


class Reference(nn.Module):
    """What the published code computes, with the parameters of a model of ours; distances count columns."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        own = dict(self.model.named_parameters())

        def dense(x, path):
            return F.linear(x, own[f"{path}.weight"], own.get(f"{path}.bias"))

        def norm(x, path):
            return F.layer_norm(x, (HEADS * SIZE,), own[f"{path}.weight"], own[f"{path}.bias"], 1e-12)

        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = own["embeddings.word_embeddings.weight"][input_ids]
        x = norm(x + own["embeddings.token_type_embeddings.weight"][types], "embeddings.LayerNorm")
        at = torch.arange(input_ids.shape[1])
        penalty = torch.tensor([2**-4, 2**-8, 2**-2])[:, None, None] * (at[:, None] - at).abs()
        for layer in (f"encoder.layer.{i}" for i in range(LAYERS)):
            names = (f"{layer}.attention.self.{name}" for name in ("query", "key", "value"))
            q, k, v = (dense(x, name).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for name in names)
            scores = q @ k.mT / SIZE**0.5 - penalty
            probs = scores.masked_fill(attention_mask[:, None, None] == 0, -torch.inf).softmax(-1)
            context = (probs.to(v.dtype) @ v).transpose(1, 2).flatten(2)
            out = f"{layer}.attention.output"
            x = norm(x + dense(context, f"{out}.dense"), f"{out}.LayerNorm")
            gate, up = dense(x, f"{layer}.mlp.gated_layers").chunk(2, -1)
            x = norm(x + dense(F.gelu(gate) * up, f"{layer}.mlp.wo"), f"{layer}.mlp.layernorm")
        return BaseModelOutputWithPooling(last_hidden_state=x)


@functools.cache
def both(**config):
    """(the reference, ours with the same weights), both in float64 and in eval."""
    torch.manual_seed(0)
    model = unit_scale(fastbert.AutoModel.from_config(EncoderConfig.from_dict({**CONFIG, **config}))).eval()
    return Reference(copy.deepcopy(model)).double(), model.double()


def ragged(lengths=LENGTHS, holes=False):
    g = torch.Generator().manual_seed(0)
    shape = len(lengths), max(lengths)
    kept = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    if holes:
        kept &= (torch.rand(shape, generator=g) > 0.3) | (torch.arange(shape[1]) == 0)
    ids, types = (torch.randint(low, high, shape, generator=g) for low, high in ((5, 120), (0, 2)))
    return {"input_ids": ids, "attention_mask": kept.long(), "token_type_ids": types}


@pytest.mark.parametrize("holes", [False, True])
@torch.no_grad()
def test_ragged_lengths(holes):
    """Longer than the config's positions too; padded, packed, alone, and called module by module."""
    reference, model = both()
    inputs = ragged(holes=holes)
    kept = inputs["attention_mask"].bool()
    found = kept_rows(model, inputs)
    close(found, kept_rows(reference, inputs), 1e-9)
    first = model(**inputs, first_token_only=True).last_hidden_state[:, 0]
    close(first, model(**inputs).last_hidden_state[:, 0], 1e-12)
    hooked = copy.deepcopy(model)
    for path in ("attention.self", "mlp", "mlp.wo"):
        hooked.get_submodule(f"encoder.layer.1.{path}").register_forward_hook(lambda *_: None)
    given = {"head_mask": torch.tensor([0.0, 1.0, 0.5]), "output_attentions": True}
    one, other = (m(**inputs, **given) for m in (hooked, model))
    close(one.last_hidden_state[kept], other.last_hidden_state[kept], 1e-12)
    pairs = kept[:, None, :, None] & kept[:, None, None, :]
    for mine, theirs in zip(one.attentions, other.attentions, strict=True):
        close(mine[pairs.expand_as(mine)], theirs[pairs.expand_as(mine)], 1e-12)
    with tapped(model, Taps()):
        close(kept_rows(model, inputs), found, 1e-12)
    if not holes:
        same_packed_and_alone(model, inputs, found)


def test_gradients():
    reference, model = (copy.deepcopy(m) for m in both(hidden_dropout_prob=0.0))
    inputs = ragged()
    for each in (reference, model.train()):
        kept_rows(each, inputs).square().sum().backward()
    reference.model.pooler = model.pooler = None
    same_gradients(model, reference.model, 1e-9)


def test_dropout_between_the_products():
    """It drops the inner columns, and nothing is dropped after the second product."""
    _, model = (copy.deepcopy(m) for m in both())
    for path, module in model.train().named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5 * path.endswith("1.mlp.dropout")
    inputs, seen = ragged((9, 9)), []
    model.encoder.layer[1].mlp.wo.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    kept_rows(model, inputs)
    model.eval()(**inputs)
    dropped, whole = (x.flatten(0, -2)[:18] for x in seen)
    assert 0.4 < (dropped == 0).double().mean() < 0.6
    close(torch.where(dropped == 0, 0, whole * 2), dropped, 1e-9)


@torch.no_grad()
def test_pruned_heads_keep_their_own_slopes():
    _, model = both()
    small = fastbert.AutoModel.from_config(EncoderConfig.from_dict(CONFIG, pruned_heads={1: [0]})).eval()
    state = model.state_dict()
    for key in state:
        if key.startswith("encoder.layer.1.attention.self"):
            state[key] = state[key][SIZE:]
    state["encoder.layer.1.attention.output.dense.weight"] = state[
        "encoder.layer.1.attention.output.dense.weight"
    ][:, SIZE:]
    small.double().load_state_dict(state)
    gates = torch.ones(LAYERS, HEADS)
    gates[1, 0] = 0
    inputs = ragged()
    kept = inputs["attention_mask"].bool()
    wanted = model(**inputs, head_mask=gates).last_hidden_state[kept]
    close(kept_rows(small, inputs), wanted, 1e-12)
    small.encoder.layer[1].register_forward_hook(lambda *_: None)
    close(kept_rows(small, inputs), wanted, 1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.1), (torch.bfloat16, 1.0)])
def test_error_is_no_larger_than_the_references_own(dtype, most):
    reference, model = (copy.deepcopy(m).float() for m in both())
    no_larger_errors((model, reference), dtype, [ragged(), ragged(LENGTHS[::-1], True)], most=most)


@pytest.mark.sweep
@torch.no_grad()
def test_8_bit_weights_and_graphs_of_torch_compile(fresh_dynamo):
    _, model = (copy.deepcopy(m).float() for m in both())
    inputs = ragged()
    found = kept_rows(model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(**inputs).last_hidden_state[inputs["attention_mask"].bool()], found, 1e-5)
    assert ((kept_rows(model.quantize("int8"), inputs) - found).norm() / found.norm()) < 0.1


def test_slopes():
    """Of 12 heads, the last four are interpolated (Press et al. 2021)."""
    exponents = [*range(1, 9), 0.5, 1.5, 2.5, 3.5]
    assert slopes(12) == pytest.approx([2**-e for e in exponents], rel=1e-12)
    assert slopes(8) == slopes(12)[:8]
    assert slopes(1) == [2**-8]


def test_files(tmp_path):
    """The published keys, both ways; a file says "bert", as jina's does."""
    _, model = both()
    model = copy.deepcopy(model).float()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {key: saved[key] for key in CONFIG} == CONFIG
    stored = load_file(tmp_path / "model.safetensors")
    assert "encoder.layer.2.mlp.gated_layers.weight" in stored
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    again = fastbert.AutoModel.from_pretrained(tmp_path)
    assert type(again) is fastbert.JinaBertModel
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in stored.items())
    save_file({f"bert.{k}": v for k, v in stored.items()}, tmp_path / "model.safetensors")
    head = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(head.bert.encoder.layer[0].mlp.wo.weight, stored["encoder.layer.0.mlp.wo.weight"])
    # jina's model for code, which norms queries and keys
    stored["encoder.layer.0.attention.self.layer_norm_q.weight"] = torch.ones(48)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(fastbert.CheckpointError, match="layer_norm_q"):
        fastbert.AutoModel.from_pretrained(tmp_path)
