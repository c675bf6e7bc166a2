"""The peers' encoders, with random weights: transformers' BERT, or torch's own layers where it is missing."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from bench.lib import workloads


class StandInEncoder(nn.Module):
    """BERT's sizes in torch's own nn.TransformerEncoder, for machines without transformers."""

    def __init__(self, model: workloads.Model, heads_on: bool):
        super().__init__()
        self.word = nn.Embedding(model.vocab, model.hidden)
        self.position = nn.Embedding(512, model.hidden)
        self.segment = nn.Embedding(2, model.hidden)
        self.norm = nn.LayerNorm(model.hidden, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            model.hidden, model.heads, model.intermediate, 0.1, "gelu", 1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, model.layers)
        self.mlm = nn.Linear(model.hidden, model.vocab) if heads_on else None
        self.nsp = nn.Linear(model.hidden, 2) if heads_on else None

    def forward(self, input_ids, token_type_ids, attention_mask=None, labels=None, next_sentence_label=None):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word(input_ids) + self.position(positions) + self.segment(token_type_ids)
        padding = None if attention_mask is None else attention_mask == 0
        x = self.encoder(self.norm(x), src_key_padding_mask=padding)
        if labels is None:
            return x
        labelled = labels != -100
        loss = F.cross_entropy(self.mlm(x[labelled]).float(), labels[labelled])
        return loss + F.cross_entropy(self.nsp(x[:, 0]).float(), next_sentence_label)


def build_peer(model: workloads.Model, heads_on: bool, device: torch.device) -> tuple[str, nn.Module]:
    """(name, module with random weights): transformers' BertModel / BertForPreTraining, or the stand-in."""
    torch.manual_seed(0)
    with torch.device(device):  # the weights are drawn there: on a CPU a large model takes seconds
        return _build_peer(model, heads_on)


def _build_peer(model: workloads.Model, heads_on: bool) -> tuple[str, nn.Module]:
    try:
        from transformers import BertConfig, BertForPreTraining, BertModel
    except ImportError:
        return "torch_transformer_encoder", StandInEncoder(model, heads_on)
    config = BertConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.intermediate,
    )
    config._attn_implementation = "sdpa"
    module = BertForPreTraining(config) if heads_on else BertModel(config, add_pooling_layer=False)
    return "transformers_sdpa", module


def forward_call(module: nn.Module, inputs: dict[str, torch.Tensor], compiled: bool) -> Callable[[], object]:
    """The forward without autograd: no_grad for torch.compile, the cheaper inference_mode for eager."""
    mode = torch.no_grad if compiled else torch.inference_mode

    def call():
        with mode():
            return module(**inputs)

    return call


def training_call(
    module: nn.Module, inputs: dict[str, torch.Tensor], device: torch.device, autocast: bool
) -> Callable[[], object]:
    """Forward, backward and a fused AdamW step, with fp32 parameters and, if asked, bf16 autocast."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def call():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = module(**inputs)
            loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        optimizer.step()

    return call


def training_inputs(lengths: tuple[int, ...], vocab: int, device: torch.device) -> tuple[dict, int]:
    """Model inputs with labels for 15% of the real tokens and the next sentence; how many tokens have one."""
    inputs = workloads.padded_inputs(lengths, vocab, "cpu")
    generator = torch.Generator().manual_seed(1)
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & real
    chosen[0, 0] = True  # at least one label, so that the loss is not empty
    inputs["labels"] = torch.where(chosen, ids, -100)
    inputs["next_sentence_label"] = torch.randint(0, 2, ids.shape[:1], generator=generator)
    return {key: value.to(device) for key, value in inputs.items()}, int(chosen.sum())
