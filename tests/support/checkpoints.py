"""Small randomised models of every family, and their checkpoints."""

import json

import torch
import transformers
from safetensors.torch import save_file

import fastbert
from fastbert.checkpoint import load as checkpoint
from fastbert.checkpoint import save as saving
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 40,
}
DISTIL = dict(dim=32, n_layers=3, n_heads=4, hidden_dim=48, vocab_size=61, max_position_embeddings=40)
# class prefix -> config; all sizes differ, so that swapped axes are found
CONFIGS = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "XLMRoberta": SIZES,
    "Camembert": SIZES,
    "DistilBert": DISTIL,
    "Electra": {**SIZES, "embedding_size": 16},
    "Albert": {**SIZES, "embedding_size": 16, "num_hidden_groups": 2, "inner_group_num": 2},
    "Ernie": SIZES,
    "MPNet": SIZES,
}


def ours(name):
    """Our class of HuggingFace's name."""
    return getattr(fastbert, name)


def split_name(name):
    prefix = next(p for p in sorted(CONFIGS, key=len, reverse=True) if name.startswith(p))
    return prefix, name[len(prefix) :]


def random_model(name, **values):
    """A random model of ours."""
    prefix, _ = split_name(name)
    model_type = next(family.model_type for family in FAMILIES.values() if family.class_prefix == prefix)
    return randomise(ours(name)(EncoderConfig(model_type, **CONFIGS[prefix], **values)))


def randomise(model, seed=0):
    """Give every parameter random values, so that no two are alike and none is at its default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model.eval()


def theirs(name, **overrides):
    """A randomised transformers model of this class."""
    prefix, _ = split_name(name)
    config = getattr(transformers, prefix + "Config")(**{**CONFIGS[prefix], **overrides})
    return randomise(getattr(transformers, name)(config))


def empty(name, directory, dtype=torch.float32, device="meta", **overrides):
    """Our model of the directory's config, without its weights."""
    own = {k: overrides.pop(k) for k in ("add_pooling_layer",) if k in overrides}
    config = EncoderConfig.from_pretrained(directory, **overrides)
    with torch.device(device):
        return ours(name)(config, **own).to(dtype)


def load(name, directory, **overrides):
    model = empty(name, directory, **overrides)
    model.load_report = checkpoint.load_weights(model, directory)
    return model


def assert_same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert set(a) == set(b)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


def write(directory, config, state):
    """Write a checkpoint directory from a plain dictionary of tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.clone().contiguous() for k, v in state.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return directory


def old_norms(key):
    return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def two_models():
    """Two models of the same sizes; weights, `layer_norm_eps`, dropout and labels differ."""
    return [
        randomise(
            ours("BertModel")(
                EncoderConfig(
                    "bert",
                    **SIZES,
                    hidden_dropout_prob=seed / 10,
                    layer_norm_eps=eps,
                    id2label={0: f"no {seed}", 1: f"yes {seed}"},
                )
            ),
            seed,
        )
        for seed, eps in ((1, 1e-12), (2, 1e-3))
    ]


LAYOUTS = {"single": "5GB", "shards": "60KB"}


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def saved(tmp_path, name="BertModel"):
    """Save a random model of ours, and return it."""
    model = random_model(name)
    saving.save(model, tmp_path)
    return model
