"""Configs of other mathematics than a family's are refused; each error names the key."""

from __future__ import annotations

import pytest

from fastbert.models.config import EncoderConfig

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
LINEAR = {"rope_type": "linear", "factor": 1.7, "rope_theta": 900.0}
REFUSED = [
    ("big_bird", {"attention_type": "sparse"}, "attention_type: expected one of block_sparse, original_full"),
    ("big_bird", {"block_size": 0}, "block_size: expected an integer >= 1"),
    ("big_bird", {"num_random_blocks": -1}, "num_random_blocks: expected an integer >= 0"),
    ("big_bird", {"rescale_embeddings": 1}, "rescale_embeddings: expected a boolean"),
    ("big_bird", {"use_bias": None}, "use_bias: expected a boolean"),
    (
        "big_bird",
        {"is_decoder": True},
        "is_decoder: True is not supported with attention_type",
    ),
    ("big_bird", {"fixed_heads": ["learned"] * 12}, "fixed_heads"),
    ("mobilebert", {"normalization_type": "rms_norm"}, "normalization_type"),
    ("mobilebert", {"classifier_activation": "tanh"}, "classifier_activation: expected a boolean"),
    ("mobilebert", {"use_bottleneck": 1}, "use_bottleneck: expected a boolean"),
    ("mobilebert", {"true_hidden_size": 64}, "true_hidden_size: expected 128"),
    ("mobilebert", {"key_query_shared_bottleneck": False}, "intra_bottleneck_size: expected hidden_size 512"),
    ("mobilebert", {"num_feedforward_networks": 0}, "num_feedforward_networks"),
    ("mobilebert", {"intra_bottleneck_size": 126}, "do not divide intra_bottleneck_size 126"),
    ("mobilebert", {"intermediate_sizes": [512] * 24}, "intermediate_sizes: expected None"),
    ("mobilebert", {"is_decoder": True}, "is_decoder"),
    ("deberta-v2", {"pos_att_type": "p2p", "relative_attention": True}, "pos_att_type"),
    ("deberta-v2", {"pos_att_type": "c2p"}, "without relative_attention"),
    ("deberta-v2", {"position_buckets": 2}, "position_buckets"),
    ("deberta-v2", {"position_buckets": 64, "max_relative_positions": 33}, "position_buckets"),
    ("deberta-v2", {"max_relative_positions": 1.5}, "max_relative_positions"),
    ("deberta-v2", {"norm_rel_ebd": "layer_norm|x"}, "norm_rel_ebd"),
    ("deberta-v2", {"attention_head_size": 32}, "attention_head_size: expected 64"),
    ("deberta-v2", {"pooler_hidden_size": 32}, "pooler_hidden_size: expected 1536"),
    ("deberta-v2", {"pooler_hidden_act": "sine"}, "pooler_hidden_act"),
    ("deberta-v2", {"pooler_dropout": 1.0}, "pooler_dropout"),
    ("deberta-v2", {"share_att_key": 1}, "share_att_key"),
    ("deberta-v2", {"legacy": 0}, "legacy"),
    ("deberta-v2", {"legacy": False, "embedding_size": 128}, "embedding_size: expected hidden_size 1536"),
    ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size"),
    ("deberta-v2", {"conv_kernel_size": 3, "conv_groups": 5}, "conv_groups"),
    ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "sine"}, "conv_act"),
    ("deberta-v2", {"fixed_heads": ["learned"] * 24}, "fixed_heads"),
    *(("longformer", {"attention_window": w}, "attention_window: ") for w in (0, 7, [8] * 11, [8.0] * 12)),
    ("longformer", {"sep_token_id": -1}, "sep_token_id: "),
    ("longformer", {"fixed_heads": ["learned"] * 12}, "fixed_heads: "),
    ("longformer", {"is_decoder": True}, "is_decoder: "),
    ("longformer", {"attention_dilation": [2] * 12}, "attention_dilation: "),
    ("longformer", {"autoregressive": True}, "autoregressive: "),
    ("xlnet", {"attn_type": "both"}, "attn_type: "),
    ("xlnet", {"summary_type": "attn"}, "summary_type: "),
    ("xlnet", {"summary_use_proj": False}, "summary_use_proj: "),
    ("xlnet", {"summary_activation": None}, "summary_activation: "),
    ("xlnet", {"d_head": 5}, "d_head: "),
    ("xlnet", {"clamp_len": -2}, "clamp_len: "),
    ("xlnet", {"is_decoder": True}, "is_decoder: "),
    ("xlnet", {"pruned_heads": {0: [1]}}, "pruned_heads: "),
    ("jina_bert", {"feed_forward_type": "reglu"}, "feed_forward_type"),
    ("jina_bert", {"feed_forward_type": "original"}, "feed_forward_type"),
    ("jina_bert", {"is_decoder": True}, "is_decoder"),
    ("jina_bert", {"position_embedding_type": "relative_key"}, "only 'alibi' is"),
    ("bert", {"position_embedding_type": "relative_key"}, "only 'absolute' is"),
    ("neobert", {"ngpt": True}, "ngpt"),
    ("neobert", {"rope": False}, "rope"),
    ("neobert", {"rms_norm": False}, "rms_norm"),
    ("neobert", {"hidden_act": "swiglu2"}, "hidden_act"),
    ("neobert", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
    ("neobert", {"is_decoder": True}, "is_decoder"),
    ("neobert", {"fixed_heads": ["learned"] * 12}, "fixed_heads"),
    ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers"),
    ("nomic_bert", {"n_embd": 768}, "n_embd"),
    ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
    ("nomic_bert", {"rope_scaling": {"type": "ntk", "factor": 8.0}}, "rope_type 'ntk'"),
    ("nomic_bert", {"rope_parameters": {**DYNAMIC, "factor": 0.5}}, "factor >= 1"),
    ("nomic_bert", {"rope_parameters": {**DYNAMIC, "beta_fast": 32}}, "beta_fast"),
    ("nomic_bert", {"rope_parameters": {"rope_type": "linear"}}, "factor as a finite number"),
    ("nomic_bert", {"rope_parameters": DYNAMIC, "rope_theta": 5.0}, "rope_theta"),
    ("nomic_bert", {"rope_parameters": DYNAMIC, "rope_scaling": LINEAR}, "rope_scaling"),
    ("nomic_bert", {"rope_parameters": [1000.0]}, "expected an object"),
    ("nomic_bert", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("nomic_bert", {"head_dim": 15}, "even"),
    ("nomic_bert", {"is_decoder": True}, "is_decoder"),
    ("nomic_bert", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("eurobert", {"num_key_value_heads": 5}, "num_key_value_heads"),
    ("eurobert", {"num_key_value_heads": 4, "pruned_heads": {0: [1]}}, "pruned_heads"),
    ("eurobert", {"classifier_pooling": "cls"}, "classifier_pooling"),
    ("eurobert", {"fixed_heads": ["learned"] * 12}, "fixed_heads"),
    ("eurobert", {"mlp_bias": 1}, "mlp_bias"),
    ("jina_embeddings_v3", {"lora_adaptations": ["retrieval.query"]}, "lora_adaptations"),
    ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
    ("gte", {"rope_scaling": {"type": "ntk", "factor": 8.0}}, "rope_type 'ntk'"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_configs_of_other_mathematics_are_refused(refused):
    name, keys, message = refused
    with pytest.raises((TypeError, ValueError), match=f"config .*{message}"):
        EncoderConfig(name, **keys)
