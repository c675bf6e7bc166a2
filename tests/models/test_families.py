"""A family is one entry of models/families/: no other code asks for a family by its name."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES
from tests.support.hf_models import FAMILY_NAMES, PAD_POSITIONS, batch, hf_config
from tests.support.model_pairs import build, close

ROOT = Path(__file__).resolve().parents[2] / "fastbert"
ROOMS = ("layers", "checkpoint", "models", "graphs", "sentences", "acceleration", "cli")


def branches(source: str) -> list[str]:
    """Each comparison and each `case` with the name of a family, as source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            names = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
            if names & set(FAMILIES):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_code_asks_for_a_family_by_name(room):
    found = {str(path): branches(path.read_text()) for path in sorted((ROOT / room).rglob("*.py"))}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "planted",
    [
        "if config.model_type == 'albert': pass",
        "x = 1 if model_type != 'mpnet' else 2",
        "if name in ('bert', 'ernie'): pass",
        "match name:\n    case 'distilbert': pass",
    ],
)
def test_a_planted_branch_is_found(planted):
    assert branches(planted)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", [*FAMILY_NAMES, "xlnet"])
def test_no_tokens(name, grad):
    """Sequences that a mask empties, packed sequences without tokens, and no sequences."""
    model = AutoModel.from_config(EncoderConfig.from_hf(hf_config(name))).eval()
    none = torch.zeros(0, dtype=torch.long)
    calls = [{"input_ids": none, "cu_seqlens": torch.zeros(n, dtype=torch.int32)} for n in (1, 3)]
    calls += [{"input_ids": torch.ones(n, 5, dtype=torch.long)} for n in (0, 2)]
    calls[3]["attention_mask"] = torch.zeros(2, 5)
    with torch.set_grad_enabled(grad):
        found = [model(**inputs) for inputs in calls]
        asked = model(**calls[3], output_attentions=True, output_hidden_states=True)
    assert [tuple(o[0].shape) for o in found] == [(0, 48), (0, 48), (0, 5, 48), (2, 5, 48)]
    assert found[-1][0].eq(0).all()
    assert torch.equal(asked[0], found[-1][0])
    assert name == "longformer" or asked.attentions[0].shape == (2, 3, 5, 5)  # whose are bands
    assert found[2].get("pooler_output") is None or found[2].pooler_output.shape == (0, 48)


@pytest.mark.parametrize("name", PAD_POSITIONS)
@torch.no_grad()
def test_positions_with_another_id_of_padding(name):
    """MPNet counts positions from 1 even then, all other families from that id; texts may have either."""
    theirs, ours = build(name, "ForTokenClassification", pad_token_id=3)
    inputs = batch(name)
    kept = inputs["attention_mask"].bool()
    inputs["input_ids"][~kept] = 3
    inputs["input_ids"][3, [2, 7, 8]], inputs["input_ids"][0, 4] = torch.tensor([1, 3, 3]), 3
    expected = theirs(**inputs).logits
    hooked, fast = copy.deepcopy(ours), fastbert.accelerate(copy.deepcopy(theirs))
    hooked.base_model.embeddings.register_forward_hook(lambda *_: None)
    for model in (ours, hooked, fast):
        close(model(**inputs).logits[kept], expected[kept], 1e-4)
    whole = torch.tensor([3, 0])  # without masked tokens before others
    packed = {key: t[whole][kept[whole]] for key, t in inputs.items() if key != "attention_mask"}
    ends = torch.nn.functional.pad(kept[whole].sum(1).cumsum(0), (1, 0)).int()
    close(ours(**packed, cu_seqlens=ends).logits, expected[whole][kept[whole]], 1e-4)
