"""Folders of small random models with MiniLM's tokenizer, as sentence-transformers and PyLate save them."""

import json
import shutil

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

PREFIXES = ("[Q] ", "[D] ")


def tiny(kind, minilm, folder, added=()):
    """A model of the class `kind` of transformers in `folder`, with `added` tokens behind MiniLM's."""
    import transformers

    folder.mkdir(parents=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(minilm / name, folder)
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=30522 + len(added),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        # So that logits of either sign are far from 0
        initializer_range=0.3,
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 48, "do_lower_case": false}')
    return folder


def splade(minilm, folder, legacy=True, **pooling):
    """SPLADE, by the module names of sentence-transformers 5 (`legacy`) or 6."""
    tiny("BertForMaskedLM", minilm, folder)
    kinds = ["MLMTransformer", "SpladePooling"]
    if not legacy:
        kinds[0] = "Transformer"
        settings = {"max_seq_length": 48, "transformer_task": "fill-mask"}
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    _modules(folder, [f"sentence_transformers.sparse_encoder.models.{kind}" for kind in kinds], legacy)
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    return folder


def colbert(minilm, folder, **settings):
    """ColBERT as PyLate saves it: Transformer and Dense, all settings in one file."""
    tiny("BertModel", minilm, folder, added=PREFIXES)
    _modules(folder, ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"])
    identity = "torch.nn.modules.linear.Identity"
    dense = {"in_features": 32, "out_features": 12, "bias": False, "activation_function": identity}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": torch.randn(12, 32)}, folder / "1_Dense" / "model.safetensors")
    content = {
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": PREFIXES[0],
        "document_prefix": PREFIXES[1],
        "query_length": 12,
        "document_length": 20,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [",", ".", "!", "no such token"],
    }
    content = {key: value for key, value in (content | settings).items() if value is not ...}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(content))
    return folder


def _modules(folder, types, legacy=True):
    if not legacy:
        types = [
            "sentence_transformers.base.modules.transformer.Transformer",
            "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
        ]
    modules = []
    for i, kind in enumerate(types):
        path = f"{i}_{kind.rpartition('.')[2]}" if i else ""
        (folder / path).mkdir(exist_ok=True)
        modules.append({"idx": i, "name": str(i), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))
