"""Tiny random models of every family, made by transformers: the oracle of the model tests."""

from __future__ import annotations

import warnings

import torch
import transformers

FAMILY_NAMES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert",
    "electra",
    "electra-unprojected",
    "albert",
    "albert-groups",
    "ernie",
    "mpnet",
)
PAD_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")

_SIZES = dict(
    vocab_size=120,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=80,
    max_position_embeddings=72,
)


def hf_config(name: str, **overrides) -> transformers.PretrainedConfig:
    """A tiny transformers config of a family; `overrides` in BERT's spelling."""
    sizes = {**_SIZES, **overrides}
    if name == "distilbert":
        spelling = {
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "hidden_act": "activation",
        }
        return transformers.DistilBertConfig(**{spelling.get(k, k): v for k, v in sizes.items()})
    if name == "electra":
        return transformers.ElectraConfig(embedding_size=24, **sizes)
    if name == "electra-unprojected":
        return transformers.ElectraConfig(embedding_size=sizes["hidden_size"], **sizes)
    if name == "albert":
        return transformers.AlbertConfig(embedding_size=24, **sizes)
    if name == "albert-groups":
        return transformers.AlbertConfig(embedding_size=24, num_hidden_groups=2, inner_group_num=2, **sizes)
    classes = {
        "bert": transformers.BertConfig,
        "roberta": transformers.RobertaConfig,
        "xlm-roberta": transformers.XLMRobertaConfig,
        "camembert": transformers.CamembertConfig,
        "ernie": transformers.ErnieConfig,
        "mpnet": transformers.MPNetConfig,
    }
    if name in PAD_POSITIONS:
        sizes["layer_norm_eps"] = 1e-5
    return classes[name](**sizes)


@torch.no_grad()
def unit_scale(model: torch.nn.Module, scale: float = 1.5) -> torch.nn.Module:
    """The model with matrices of new weights and other vectors, so that every part matters."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, scale / parameter.shape[1] ** 0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def hf_model(name: str, auto: type = transformers.AutoModel, seed: int = 0, **overrides) -> torch.nn.Module:
    """A transformers model of the family, in eval. Weights are at unit scale, so that every part matters."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):
        model = auto.from_config(hf_config(name, **overrides)).eval()
    if name != "mpnet":  # its own eager attention is all it has
        model.set_attn_implementation("eager")
    return unit_scale(model)


def batch(name: str, batch_size: int = 4, seqlen: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids with right and left padding, holes and a full row; token types if the family has them."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch_size, seqlen, dtype=torch.long)
    mask[0, seqlen // 2 :] = 0
    mask[1, : seqlen // 3] = 0
    mask[2] = (torch.rand(seqlen, generator=g) > 0.4).long()
    ids = torch.randint(5, 120, (batch_size, seqlen), generator=g)
    if name in PAD_POSITIONS:
        ids = torch.where(mask.bool(), ids, 1)
    out = {"input_ids": ids, "attention_mask": mask}
    if name not in ("distilbert", "mpnet"):
        out["token_type_ids"] = torch.randint(0, 2, (batch_size, seqlen), generator=g)
    return out
