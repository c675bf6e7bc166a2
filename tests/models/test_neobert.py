"""NeoBERT against a reference in plain PyTorch: transformers has no class of it.

The reference rotates complex numbers, as the code in chandar-lab/NeoBERT does.
"""

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
from fastbert.layers.head_major_layer import inner_size
from fastbert.models.config import EncoderConfig
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import unit_scale
from tests.support.model_pairs import close, kept_rows, no_larger_errors, ragged, same_packed_and_alone

LENGTHS = (1, 2, 17, 72, 73, 101)
HEADS, SIZE, LAYERS, TOKENS, INNER = 3, 16, 3, 120, 56
# The keys of the published config.json, with small sizes
CONFIG = {
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {"AutoConfig": "model.NeoBERTConfig", "AutoModelForMaskedLM": "model.NeoBERTLMHead"},
    "classifier_init_range": 0.02,
    "decoder_init_range": 0.02,
    "dim_head": SIZE,
    "embedding_init_range": 0.02,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 80,
    "kwargs": {"trust_remote_code": True},
    "max_length": 72,
    "model_type": "neobert",
    "norm_eps": 1e-05,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "vocab_size": TOKENS,
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        width = HEADS * SIZE
        self.qkv, self.wo = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.ffn = nn.ModuleDict(
            {"w12": nn.Linear(width, 2 * INNER, bias=False), "w3": nn.Linear(INNER, width, bias=False)}
        )
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(width, 1e-5) for _ in range(2))

    def forward(self, x, mask, turns):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(2, (HEADS, 3 * SIZE)).chunk(3, -1)
        q, k = (turned(t, turns) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.mT / SIZE**0.5).masked_fill(~mask[:, None, None], -torch.inf)
        x = x + self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        a, b = self.ffn["w12"](self.ffn_norm(x)).chunk(2, -1)
        return x + self.ffn["w3"](F.silu(a) * b)


def turned(t, turns):
    pairs = torch.view_as_complex(t.to(turns.real.dtype).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, :, None]).flatten(3).to(t.dtype)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, HEADS * SIZE, padding_idx=0)
        self.transformer_encoder = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.layer_norm = nn.RMSNorm(HEADS * SIZE, 1e-5)

    def forward(self, input_ids, attention_mask, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        frequencies = 1.0 / 10000 ** (torch.arange(0, SIZE, 2).float() / SIZE)
        angles, x = position_ids[..., None].float() * frequencies, self.encoder(input_ids)
        turns = torch.complex(angles.cos(), angles.sin())
        turns = turns.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
        for layer in self.transformer_encoder:
            x = layer(x, attention_mask.bool(), turns)
        return fastbert.models.outputs.BaseModelOutputWithPooling(last_hidden_state=self.layer_norm(x))


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.decoder = Encoder(), nn.Linear(HEADS * SIZE, TOKENS)

    def forward(self, labels=None, **inputs):
        logits = self.decoder(self.model(**inputs).last_hidden_state)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        width = HEADS * SIZE
        self.model, self.dense, self.classifier = Encoder(), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, labels=None, **inputs):
        logits = self.classifier(self.dense(self.model(**inputs).last_hidden_state[:, 0]).tanh())
        return logits, F.cross_entropy(logits, labels)


NAMES = {Encoder: "Model", MaskedLM: "ForMaskedLM", Classifier: "ForSequenceClassification"}


@functools.cache
def both(kind=Encoder, **config):
    """(the reference, ours with its weights), both in float64 and in eval."""
    torch.manual_seed(0)
    reference = unit_scale(kind())
    cls = getattr(fastbert, f"NeoBert{NAMES[kind]}")
    model = cls(EncoderConfig.from_dict({**CONFIG, **config})).eval()
    model.load_state_dict(reference.state_dict())
    return reference.double(), model.double()


@torch.no_grad()
def test_ragged_lengths():
    """Padded, packed, alone, with positions, and called module by module."""
    reference, model = both()
    inputs = ragged(LENGTHS)
    kept = inputs["attention_mask"].bool()
    found = kept_rows(model, inputs)
    close(found, kept_rows(reference, inputs), 1e-9)
    same_packed_and_alone(model, inputs, found)
    moved = {**inputs, "position_ids": torch.arange(101 * 6).view(6, 101) % 97 * 31}
    close(kept_rows(model, moved), kept_rows(reference, moved), 1e-9)
    hooked = copy.deepcopy(model)
    for path in ("qkv", "ffn", "ffn.w3", "attention_norm"):
        hooked.get_submodule(f"transformer_encoder.1.{path}").register_forward_hook(lambda *_: None)
    assert "layer 1: ffn" in hooked.gap()
    close(kept_rows(hooked, inputs), found, 1e-12)
    head_mask = torch.tensor([0.0, 1.0, 0.5])
    given = {"head_mask": head_mask, "output_attentions": True}
    one, other = (m(**inputs, **given) for m in (hooked, model))
    close(one.last_hidden_state[kept], other.last_hidden_state[kept], 1e-12)
    for mine, theirs in zip(one.attentions, other.attentions, strict=True):
        close(mine[4, :, :73], theirs[4, :, :73], 1e-12)


@pytest.mark.parametrize("kind", [MaskedLM, Classifier])
def test_heads_and_gradients(kind):
    reference, model = (copy.deepcopy(m) for m in both(kind))
    inputs = ragged(LENGTHS)
    kept = inputs["attention_mask"].bool()
    labels = torch.arange(6) % 2
    if kind is MaskedLM:
        labels = inputs["input_ids"].where(kept & (inputs["input_ids"] % 3 == 0), -100)
    logits, loss = reference(**inputs, labels=labels)
    found = model(**inputs, labels=labels)
    rows = kept if kind is MaskedLM else ...
    close(found.logits[rows], logits[rows], 1e-9)
    close(found.loss, loss, 1e-12)
    loss.backward()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model(**inputs, labels=labels).loss.backward()
    same_gradients(model, reference, 1e-9)


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.1), (torch.bfloat16, 1.0)])
def test_error_is_no_larger_than_the_references_own(dtype, most):
    reference, model = (copy.deepcopy(m).float() for m in both())
    no_larger_errors((model, reference), dtype, [ragged(LENGTHS), ragged(LENGTHS[::-1])], most=most)


@pytest.mark.sweep
@torch.no_grad()
def test_8_bit_weights_and_graphs_of_torch_compile(fresh_dynamo):
    _, model = (copy.deepcopy(m).float() for m in both())
    inputs = ragged(LENGTHS)
    found = kept_rows(model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(**inputs).last_hidden_state[inputs["attention_mask"].bool()], found, 1e-5)
    assert ((kept_rows(model.quantize("int8"), inputs) - found).norm() / found.norm()) < 0.1


@pytest.mark.parametrize("kind", NAMES)
def test_files(kind, tmp_path):
    """The published keys and values, both ways; the encoder's alone under no prefix."""
    reference, model = both(kind)
    model.float().save_pretrained(tmp_path / "ours")
    stored, wanted = load_file(tmp_path / "ours" / "model.safetensors"), reference.float().state_dict()
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[key], value) for key, value in wanted.items())
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {key: saved[key] for key in CONFIG if key != "architectures"}.items() <= CONFIG.items()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(CONFIG))
    save_file(wanted, tmp_path / "theirs" / "model.safetensors")
    again = type(model).from_pretrained(tmp_path / "theirs")
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in wanted.items())
    stored["transformer_encoder.0.q_norm.weight"] = torch.ones(16)
    save_file(stored, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(fastbert.CheckpointError, match="q_norm"):
        type(model).from_pretrained(tmp_path / "theirs")


@torch.no_grad()
def test_cut_and_made_whole_again():
    _, model = both()
    inputs = ragged(LENGTHS)
    small = fastbert.prune(model, heads={0: [1], 2: [0, 1, 2]}, neurons={1: range(8)})
    whole = small.dense()
    assert whole.num_parameters() == model.num_parameters()
    close(kept_rows(whole, inputs), kept_rows(small.model, inputs), 1e-12)
    layers_alone = fastbert.prune(model, layers=[0, 2]).model.config
    assert layers_alone.intermediate_sizes is None


def test_sizes_and_first_weights():
    """The published code draws from an interval, and a classifier's from a normal distribution."""
    assert [inner_size(size) for size in (3072, 80, 12, 13, 1)] == [2048, 56, 8, 8, 0]
    config = EncoderConfig.from_dict({**CONFIG, "decoder_init_range": 0.3, "classifier_init_range": 1.0})
    model = fastbert.NeoBertForSequenceClassification(config)
    spread = {"model.encoder.weight": 0.02, "model.transformer_encoder.2.ffn.w12.weight": 0.3}
    for key, most in spread.items():
        weight = model.state_dict()[key]
        assert 0.9 * most < weight.abs().max() <= most
        assert weight.std().item() == pytest.approx(most / 3**0.5, rel=0.1)
    assert model.dense.weight.std().item() == pytest.approx(1.0, rel=0.1)
