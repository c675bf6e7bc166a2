"""Tiny random models of every family, made by transformers: the oracle of the model tests."""

from __future__ import annotations

import functools
import warnings

import torch
import transformers


def _eager_in_own_dtype(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Eager attention whose softmax is not rounded to float32."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    probs = torch.softmax(scores, -1, dtype=wide).to(query.dtype)
    probs = torch.nn.functional.dropout(probs, dropout, module.training)
    return (probs @ value).transpose(1, 2).contiguous(), probs


def _rotated_in_own_dtype(half, q, k, cos, sin, unsqueeze_dim=1):
    """ModernBERT's rotation, which does not round float64 queries and keys to float32."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return tuple((t.to(wide) * cos + half(t.to(wide)) * sin).to(t.dtype) for t in (q, k))


def _masked_lm_loss_in_own_dtype(logits, labels, vocab_size, **kwargs):
    """The loss whose logits are not rounded to float32."""
    return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def _rms_norm_in_own_dtype(norm, x):
    """EuroBERT's norm, which does not round float64 to float32."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * wide.to(x.dtype)


class _Changed:
    """A module with other values of some names."""

    def __init__(self, module, **names):
        self.module = module
        vars(self).update(names)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _softmax_in_own_dtype(scores, dim, dtype=None):
    """Longformer's softmax, which does not round float64 to float32."""
    return torch.softmax(scores, dim, torch.float64 if scores.dtype == torch.float64 else dtype)


def _size_sqrt_in_own_dtype(query, terms):
    """DeBERTa's divisor of the scores, not rounded to float32."""
    return torch.tensor(query.size(-1) * terms, dtype=torch.float64).sqrt()


def _sinusoids_in_own_dtype(computed, model, *args, **kwargs):
    """XLNet's sinusoids, in the dtype of the weights, which its second stream needs."""
    return computed(model, *args, **kwargs).to(model.dtype)


@functools.cache
def _make_exact() -> None:
    """Let the oracles compute in float64 where their weights are in float64."""
    # A module-level import would import Triton before the tests choose its interpreter
    from transformers.loss.loss_utils import LOSS_MAPPING
    from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta
    from transformers.models.eurobert import modeling_eurobert as eurobert
    from transformers.models.longformer import modeling_longformer as longformer
    from transformers.models.modernbert import modeling_modernbert as modeling
    from transformers.models.xlnet import modeling_xlnet as xlnet

    LOSS_MAPPING["ForMaskedLM"] = _masked_lm_loss_in_own_dtype
    functional = _Changed(torch.nn.functional, softmax=_softmax_in_own_dtype)
    longformer.nn = _Changed(torch.nn, functional=functional)
    computed = xlnet.XLNetModel.relative_positional_encoding
    xlnet.XLNetModel.relative_positional_encoding = lambda model, *args, **kwargs: _sinusoids_in_own_dtype(
        computed, model, *args, **kwargs
    )
    deberta.scaled_size_sqrt = _size_sqrt_in_own_dtype
    modeling.eager_attention_forward = _eager_in_own_dtype
    eurobert.eager_attention_forward = _eager_in_own_dtype
    eurobert.EuroBertRMSNorm.forward = _rms_norm_in_own_dtype
    modeling.apply_rotary_pos_emb = functools.partial(_rotated_in_own_dtype, modeling.rotate_half)


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
    "modernbert",
    "nomic_bert",
    "gte",
    "jina_embeddings_v3",
    "eurobert",
    "deberta-v2",
    "mobilebert",
    "big_bird",
    "longformer",
)
# The families whose layers are of BERT's form, which every executor knows
BERT_LAYERS = FAMILY_NAMES[: FAMILY_NAMES.index("modernbert")]
# The families whose layers `accelerate` fuses
ACCELERATED = FAMILY_NAMES
# The families that `fastbert.analysis` takes
ANALYSED = tuple(name for name in FAMILY_NAMES if name != "longformer")
PAD_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")

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
    if name == "modernbert":
        spelling = {
            "hidden_dropout_prob": "embedding_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "hidden_act": "hidden_activation",
        }
        small = {"local_attention": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        small |= {"cls_token_id": 1, "sep_token_id": 2, **{spelling.get(k, k): v for k, v in sizes.items()}}
        return transformers.ModernBertConfig(**small)
    if name == "eurobert":
        spelling = {"attention_probs_dropout_prob": "attention_dropout", "layer_norm_eps": "rms_norm_eps"}
        small = {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        small |= {
            "mask_token_id": 3,
            "classifier_pooling": "bos",
            **{spelling.get(k, k): v for k, v in sizes.items()},
        }
        return transformers.EuroBertConfig(**small)
    if name == "deberta-v2":
        kinds = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_biased_input": False}
        kinds |= {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
        # Without it transformers rounds the loss to float32
        kinds["problem_type"] = "single_label_classification"
        return transformers.DebertaV2Config(**{**kinds, **sizes})
    if name == "mobilebert":
        # Heads are of the same size as in other families
        small = {"intra_bottleneck_size": sizes["hidden_size"], "embedding_size": sizes["hidden_size"] // 2}
        small["num_feedforward_networks"] = 2
        return transformers.MobileBertConfig(**{**small, **sizes})
    if name == "xlnet":
        spelling = {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "d_inner",
            "hidden_dropout_prob": "dropout",
            "hidden_act": "ff_activation",
        }
        del sizes["max_position_embeddings"]
        return transformers.XLNetConfig(**{spelling.get(k, k): v for k, v in sizes.items()})
    classes = {
        "nomic_bert": transformers.NomicBertConfig,
        "gte": transformers.GteConfig,
        "jina_embeddings_v3": transformers.JinaEmbeddingsV3Config,
        "bert": transformers.BertConfig,
        "roberta": transformers.RobertaConfig,
        "xlm-roberta": transformers.XLMRobertaConfig,
        "camembert": transformers.CamembertConfig,
        "ernie": transformers.ErnieConfig,
        "mpnet": transformers.MPNetConfig,
        "big_bird": transformers.BigBirdConfig,
        "longformer": transformers.LongformerConfig,
    }
    if name == "longformer":
        sizes.setdefault("attention_window", [4, 8, 16][: sizes["num_hidden_layers"]])
    if name in PAD_POSITIONS:
        sizes["layer_norm_eps"] = 1e-5
    if name in ("gte", "jina_embeddings_v3"):  # which have one by default
        sizes.setdefault("type_vocab_size", 2)
    return classes[name](**sizes)


@torch.no_grad()
def unit_scale(model: torch.nn.Module, scale: float = 1.5) -> torch.nn.Module:
    """The model with matrices of new weights and other vectors, so that every part matters."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # A matrix of three dimensions is a convolution, or one per head
            parameter.normal_(0.0, scale / parameter.shape[0 if parameter.dim() == 3 else 1] ** 0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def hf_model(name: str, auto: type = transformers.AutoModel, seed: int = 0, **overrides) -> torch.nn.Module:
    """A transformers model of the family, in eval. Weights are at unit scale, so that every part matters."""
    if name in ("modernbert", "eurobert", "deberta-v2", "longformer", "xlnet"):
        _make_exact()
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):
        make = getattr(auto, "from_config", None) or auto._from_config
        model = make(hf_config(name, **overrides)).eval()
    if name not in ("mpnet", "deberta-v2", "xlnet"):  # their own eager attention is all they have
        model.set_attn_implementation("eager")
    if name == "big_bird" and model.config.max_position_embeddings <= 704:
        # As the first short text does, whose attentions are not recorded
        model.base_model.set_attention_type("original_full")
    # Without LayerNorm nothing else bounds the hidden states
    unit_scale(model, 1.0 if name == "mobilebert" else 1.5)
    if name == "mobilebert":
        # transformers reads a padding token as the last token's neighbour; ours has none there
        model.get_input_embeddings().weight.data[model.config.pad_token_id] = 0
    return model


def batch(name: str, batch_size: int = 4, seqlen: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids with right and left padding, holes and a full row; token types if the family has them."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch_size, seqlen, dtype=torch.long)
    mask[0, seqlen // 2 :] = 0
    mask[1, : seqlen // 3] = 0
    mask[2] = (torch.rand(seqlen, generator=g) > 0.4).long()
    ids = torch.randint(5, 120, (batch_size, seqlen), generator=g)
    if name in (*PAD_POSITIONS, "mobilebert"):
        ids = torch.where(mask.bool(), ids, 0 if name == "mobilebert" else 1)
    if name == "longformer":  # the separators of its heads
        ids[:, [4, 5, 9]] = 2
    out = {"input_ids": ids, "attention_mask": mask}
    if name not in ("distilbert", "mpnet", "modernbert", "eurobert", "deberta-v2"):
        out["token_type_ids"] = torch.randint(0, 2, (batch_size, seqlen), generator=g)
    return out
