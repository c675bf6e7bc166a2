"""Replaced tokens: labels, draws, losses and gradients against transformers' models, one embedding block."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fastbert
from fastbert.models.config import EncoderConfig
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives import replaced_tokens
from fastbert.pretraining.objectives.replaced_tokens import (
    ReplacedTokenLosses,
    ReplacedTokens,
    drawn,
    generator_config,
)
from fastbert.training.optimizers import decay_groups, optimizer
from tests.support.draw_shares import few_or_many, inside
from tests.support.numbered_text import (
    MASK,
    SIZES,
    VOCAB,
    Numbered,
    assert_as_papers,
    at_unit_scale,
    originals,
    padded,
    relative_error,
)
from tests.support.objectives import batch_of, tensors
from tests.support.small_runs import V3
from tests.support.vocabulary_rows import VocabularyRows


def module_of(
    share: float = 1 / 4, seed: int = 0, embeddings: str = "shared", family: str = "electra", **config
) -> ReplacedTokenLosses:
    """Both models; DeBERTa's generator has half of the layers."""
    torch.manual_seed(seed)
    depth = 1.0 if family == "electra" else 0.5
    sizes = {"embedding_size": 24} if family == "electra" else V3
    objective = ReplacedTokens(
        Numbered(), generator_share=share, generator_depth=depth, embeddings=embeddings
    )
    config = EncoderConfig(family, **{**SIZES, **sizes, **config})
    return at_unit_scale(objective.losses(objective.model(config)))


BOTH = [(family, kind) for family in ("electra", "deberta-v2") for kind in replaced_tokens.EMBEDDINGS]


@pytest.fixture
def batch():
    return batch_of(ReplacedTokens(Numbered()))


# --- examples -----------------------------------------------------------------------------------------------


@few_or_many(400, 3400)
def test_what_the_generator_reads(size):
    """85% of the predicted tokens are [MASK], the rest the original."""
    format = Numbered([40] * 5)
    truth, masks, kept = originals(format), 0, 0
    for seed in range(size):
        found = batch_of(ReplacedTokens(format, seed=seed)).inputs
        predicted = found["labels"] != IGNORED
        assert predicted.sum() == 30
        assert np.array_equal(found["labels"][predicted], truth[predicted])
        assert np.array_equal(found["input_ids"][~predicted], truth[~predicted])
        is_mask = found["input_ids"][predicted] == MASK
        masks += is_mask.sum()
        kept += (found["input_ids"][predicted] == truth[predicted]).sum()
    assert masks + kept == 30 * size
    assert inside(masks, 30 * size, 0.85)


def test_the_counts_of_a_batch(batch):
    labelled = int((batch.inputs["labels"] != IGNORED).sum())
    assert batch.counts == {"mlm": labelled, "rtd": 111, "replaced": labelled}
    assert batch.inputs["labelled"] == labelled == 5 + 2 + 6 + 1 + 4


def test_labels_are_readable_from_the_ids(batch, monkeypatch, noted):
    """The discriminator reads the originals and what was drawn; the label is 1 where the two differ."""
    module, truth = module_of(), torch.from_numpy(originals(Numbered()))
    predicted = torch.from_numpy(batch.inputs["labels"] != IGNORED)
    written = truth[predicted].clone()
    written[::3] += 1  # two of three draws are right
    monkeypatch.setattr(replaced_tokens, "drawn", lambda logits: written)
    given = noted(type(module.model), "loss", lambda self, logits, labels, encoded: (logits, labels))
    inputs = tensors(batch)
    kept = inputs["input_ids"].clone()
    _, counted = module(inputs, measure=True)
    assert torch.equal(inputs["input_ids"], kept)  # the caller's ids are as they were
    filled = torch.where(predicted, torch.zeros_like(truth).masked_scatter(predicted, written), truth)
    ((logits, labels),) = given
    assert torch.equal(labels.bool(), filled != truth)
    assert labels.sum() == len(written[::3])
    assert counted["replaced"] == len(written[::3])
    assert counted["rtd"] == ((logits > 0) == (filled != truth)).sum()
    assert 0 < counted["rtd"] < 111
    with torch.no_grad():
        every = module.generator(input_ids=kept, **lengths_of(inputs)).logits
    assert counted["mlm"] == (every.argmax(-1) == truth)[predicted].sum()


def lengths_of(inputs) -> dict:
    return {key: inputs[key] for key in ("token_type_ids", "cu_seqlens", "max_seqlen")}


# --- losses -------------------------------------------------------------------------------------------------


def stock(module: ReplacedTokenLosses) -> torch.nn.ModuleDict:
    """transformers' models with the same weights and one embedding block."""
    made = {}
    for name, kind in (("model", "ElectraForPreTraining"), ("generator", "ElectraForMaskedLM")):
        own = getattr(module, name)
        config = transformers.ElectraConfig(**own.config.to_dict())
        made[name] = getattr(transformers, kind)(config)
        made[name].set_attn_implementation("eager")
        made[name].load_state_dict(own.state_dict(), strict=True)
    made["generator"].electra.embeddings = made["model"].electra.embeddings
    made["generator"].generator_lm_head.weight = made["model"].electra.embeddings.word_embeddings.weight
    return torch.nn.ModuleDict(made).train()


def paper(models: torch.nn.ModuleDict, inputs: dict, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The losses as the paper has them, on a padded batch, with what was drawn."""
    given = padded(inputs)
    mask, labels = given["attention_mask"], given["labels"]
    chosen = labels != IGNORED
    shape = {key: given[key] for key in ("attention_mask", "token_type_ids")}
    hidden = models["generator"].electra(given["input_ids"], **shape).last_hidden_state[chosen]
    generator = models["generator"]
    logits = generator.generator_lm_head(generator.generator_predictions(hidden))
    mlm = F.cross_entropy(logits, labels[chosen])
    filled, truth = given["input_ids"].clone(), given["input_ids"].clone()
    filled[chosen], truth[chosen] = tokens, labels[chosen]
    scores = models["model"](filled, **shape).logits
    each = F.binary_cross_entropy_with_logits(scores, (filled != truth).to(scores.dtype), reduction="none")
    return {"mlm": mlm, "rtd": (each * mask).sum() / mask.sum()}


def recorded(module: ReplacedTokenLosses, inputs: dict, monkeypatch) -> tuple[dict, torch.Tensor]:
    """(losses, what was drawn)."""
    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(replaced_tokens, "drawn", lambda logits: seen.append(drawn(logits)) or seen[-1])
        losses, _ = module(inputs)
    return losses, torch.cat(seen)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def backward(module: ReplacedTokenLosses, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of the weighted sum, as the loop has it."""
    module.zero_grad()
    sum(module.weights.get(name, 1.0) * loss for name, loss in losses.items()).backward()
    return gradients(module)


@pytest.mark.parametrize(
    ("share", "config"),
    [(1 / 4, {}), (1 / 2, {"embedding_size": 48}), (1 / 2, {"embedding_size": 24}), (1.0, {})],
    ids=["projected", "unprojected", "generator-unprojected", "as-wide"],
)
def test_losses_and_gradients_are_the_papers(share, config, batch, monkeypatch):
    module, inputs = module_of(share, **config), tensors(batch)
    assert module.weights == {"rtd": 50.0}
    single = stock(module)
    double = copy.deepcopy(single).double()
    torch.manual_seed(5)
    losses, tokens = recorded(module, inputs, monkeypatch)
    assert not torch.equal(tokens, inputs["labels"][inputs["labels"] != IGNORED])
    found = []
    for models in (single, double):
        theirs = paper(models, inputs, tokens)
        (theirs["mlm"] + 50 * theirs["rtd"]).backward()
        found.append((theirs, gradients(models)))
    (eager, eager_gradients), (truth, true_gradients) = found
    own = backward(module, losses)
    assert own.keys() == true_gradients.keys()
    assert len(own) == len(list(module.parameters()))
    wide = copy.deepcopy(module).double()
    monkeypatch.setattr(replaced_tokens, "drawn", lambda logits: tokens)
    wide_losses, _ = wide(inputs)
    wide_own = backward(wide, wide_losses)
    assert_as_papers(losses, eager, wide_losses, truth)
    assert_as_papers(own, eager_gradients, wide_own, true_gradients)


def test_autocast_gradients_are_no_worse_than_transformers_own(monkeypatch):
    mine, theirs = [], []
    for seed in range(3):
        inputs = tensors(batch_of(ReplacedTokens(Numbered(), seed=seed)))
        module = module_of(seed=seed)
        models = stock(module)
        double = copy.deepcopy(models).double()
        with torch.autocast("cpu", torch.bfloat16):
            losses, tokens = recorded(module, inputs, monkeypatch)
            plain = paper(models, inputs, tokens)
        assert all(loss.dtype == torch.float32 for loss in losses.values())
        exact = paper(double, inputs, tokens)
        (exact["mlm"] + 50 * exact["rtd"]).backward()
        (plain["mlm"] + 50 * plain["rtd"]).backward()
        truth = gradients(double)
        mine.append(relative_error(backward(module, losses), truth))
        theirs.append(relative_error(gradients(models), truth))
    assert sum(mine) <= 1.1 * sum(theirs), f"{mine} against {theirs}"


@pytest.mark.parametrize(("family", "embeddings"), BOTH)
def test_a_loss_moves_its_own_model_and_what_is_shared(family, embeddings, batch):
    """No gradient passes through what was drawn, nor through the generator's disentangled table."""
    module = module_of(1.0, embeddings=embeddings, family=family)
    losses, _ = module(tensors(batch))
    for loss, name in (("rtd", "model"), ("mlm", "generator")):
        module.zero_grad()
        losses[loss].backward(retain_graph=True)
        of_model = {id(p) for p in getattr(module, name).parameters()}
        assert all((p.grad is not None) == (id(p) in of_model) for p in module.parameters())
    table, other = (m.get_input_embeddings().weight for m in (module.model, module.generator))
    assert (table is other) == (embeddings == "shared")


@pytest.mark.parametrize("embeddings", replaced_tokens.EMBEDDINGS)
def test_losses_and_gradients_of_deberta_are_the_papers(embeddings, batch, monkeypatch):
    """He et al. 2021, eq. 6 and 7, by transformers' encoders and a head of its own layers."""
    module = module_of(1.0, embeddings=embeddings, family="deberta-v2").double()
    inputs = tensors(batch)
    losses, tokens = recorded(module, inputs, monkeypatch)
    config = transformers.DebertaV2Config(**module.model.config.to_dict())
    small = transformers.DebertaV2Config(**module.generator.config.to_dict())
    assert (config.num_hidden_layers, small.num_hidden_layers) == (2, 1)
    head = copy.deepcopy(module.model.mask_predictions)
    parts = {"deberta": transformers.DebertaV2Model(config), "mask_predictions": head}
    generator, encoder = transformers.DebertaV2ForMaskedLM(small), parts["deberta"]
    models = torch.nn.ModuleDict({"model": torch.nn.ModuleDict(parts), "generator": generator}).double()
    models.model.load_state_dict(module.model.state_dict())
    models.generator.load_state_dict(module.generator.state_dict())
    table, difference = (m.get_input_embeddings().weight for m in (generator, encoder))
    if embeddings == "shared":
        encoder.embeddings = generator.deberta.embeddings
    given = padded(inputs)
    mask, labels = given["attention_mask"], given["labels"]
    chosen = labels != IGNORED
    logits = generator(given["input_ids"], attention_mask=mask).logits[chosen]
    filled, truth = given["input_ids"].clone(), given["input_ids"].clone()
    filled[chosen], truth[chosen] = tokens, labels[chosen]
    name = "embeddings.word_embeddings.weight"
    rows = {name: table.detach() + difference} if embeddings == "disentangled" else {}
    called = torch.func.functional_call(encoder, rows, (filled,), {"attention_mask": mask})
    hidden = called.last_hidden_state
    x = F.gelu(head.dense(head.LayerNorm(hidden + hidden[:, :1])))
    differs = (filled != truth).double()
    each = F.binary_cross_entropy_with_logits(head.classifier(x).squeeze(2), differs, reduction="none")
    expected = {"mlm": F.cross_entropy(logits, labels[chosen]), "rtd": (each * mask).sum() / mask.sum()}
    (expected["mlm"] + 50 * expected["rtd"]).backward()
    own, truth = backward(module, losses), gradients(models)
    if embeddings == "shared":  # the oracle's block has the generator's names
        own = {key.replace("model.deberta.emb", "generator.deberta.emb"): g for key, g in own.items()}
        truth = {key.replace("model.deberta.emb", "generator.deberta.emb"): g for key, g in truth.items()}
    # transformers rounds the square root that divides the scores to float32
    for key, value in expected.items():
        torch.testing.assert_close(losses[key], value, rtol=1e-6, atol=0)
    assert relative_error(own, truth) < 1e-6


@pytest.mark.parametrize(("family", "embeddings"), BOTH)
def test_both_models_learn(family, embeddings, batch):
    """The generator learns the batch by heart, and the discriminator beats the share of originals."""
    torch.manual_seed(0)
    config = EncoderConfig(family, **SIZES, **(V3 if family == "deberta-v2" else {"embedding_size": 48}))
    options = {"generator_share": 1.0, "generator_depth": 0.5, "embeddings": embeddings}
    objective = ReplacedTokens(Numbered(), **options)
    module, inputs = objective.losses(objective.model(config)).train(), tensors(batch)
    start = module.generator.get_input_embeddings().weight.detach().clone()
    if embeddings == "disentangled":
        assert not module.model.get_input_embeddings().weight.any()
    made, seen = optimizer("adamw", decay_groups(module, 0.01), 3e-3), []
    for _ in range(60):
        losses, _ = module(inputs)
        backward(module, losses)
        made.step()
        seen.append([losses["mlm"].item(), losses["rtd"].item()])
    (first, _), (last, found) = seen[0], np.mean(seen[-5:], 0)
    assert last < 0.3 * first
    assert found < 0.9 * seen[0][1]
    assert (module.generator.get_input_embeddings().weight - start).abs().max() > 0.01


def test_no_prediction_at_all():
    format = Numbered([2, 2])
    batch = batch_of(ReplacedTokens(format))
    assert batch.counts == {"mlm": 0, "rtd": 4, "replaced": 0}
    module = module_of()
    losses, counted = module(tensors(batch), measure=True)
    assert losses["mlm"] == 0
    assert counted["mlm"] == counted["replaced"] == 0
    (losses["mlm"] + losses["rtd"]).backward()
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


# --- draws --------------------------------------------------------------------------------------------------


def agrees(tokens: torch.Tensor, shares: torch.Tensor) -> bool:
    """Whether χ² over all classes, and the exact 99.9% interval of each of the likeliest, hold the shares."""
    counts = np.bincount(tokens.numpy(), minlength=len(shares))
    shares = shares.double().numpy()
    large = shares * len(tokens) >= 5  # the rest is one class
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(shares[large], shares[~large].sum()) * len(tokens)
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    expected *= observed.sum() / expected.sum()
    for c in np.argsort(shares)[-3:]:
        if not inside(counts[c], len(tokens), shares[c]):
            return False
    return stats.chisquare(observed, expected).pvalue > 0.001


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_have_the_probabilities_of_the_softmax(dtype):
    torch.manual_seed(11)
    logits = (3 * torch.randn(2, 60)).to(dtype)
    logits[0, :5] -= 9  # rare ones
    for row in logits:
        tokens = drawn(row.expand(120_000, 60).contiguous())
        assert agrees(tokens, row.double().softmax(-1))
        pairs = tokens.view(-1, 2)  # rows are independent of their neighbours
        likely = int(row.argmax())
        first, second = (pairs == likely).unbind(1)
        table = [[int((first & second).sum()), int((first & ~second).sum())]]
        table.append([int((~first & second).sum()), int((~first & ~second).sum())])
        assert stats.chi2_contingency(table).pvalue > 0.001
    one = torch.full((1000, 60), -torch.inf, dtype=dtype)
    one[:, 7] = 0.0
    assert drawn(one).eq(7).all()


@pytest.mark.sweep
def test_the_generator_draws_from_its_softmax(monkeypatch):
    """Chunk by chunk, at two positions; V columns are never made for more rows than a chunk has."""
    monkeypatch.setitem(replaced_tokens.CHUNK_BYTES, "cpu", 8 * VOCAB * 10_000)
    module = module_of()
    torch.manual_seed(3)
    two = torch.randn(2, 12)
    with torch.no_grad():
        shares = module.generator.lm_logits(two).softmax(-1)
    for hidden, share in zip(two, shares, strict=True):
        with VocabularyRows(VOCAB) as seen:
            tokens, right = module.fill(
                hidden.expand(105_000, 12).contiguous(), share.argmax().expand(105_000), True
            )
        assert max(seen.rows) == 10_000
        assert agrees(tokens, share)
        assert right == 105_000
        likely = share.argsort()[-2]
        assert module.fill(hidden[None], likely[None], True)[1] == 0


# --- one embedding block ------------------------------------------------------------------------------------


def tied(module: ReplacedTokenLosses) -> None:
    """Assert that both models have one embedding block, and the generator's decoder its word embeddings."""
    own, other = module.model.electra.embeddings, module.generator.electra.embeddings
    named = dict(own.named_parameters())
    assert len(named) == 5
    assert "LayerNorm.weight" in named
    assert all(p is q for p, q in zip(named.values(), other.parameters(), strict=True))
    assert module.generator.generator_lm_head.weight is own.word_embeddings.weight
    parameters = list(module.parameters())
    assert len({id(p) for p in parameters}) == len(parameters)
    shared = len(named)
    separate = len(list(module.model.parameters())) + len(list(module.generator.parameters()))
    assert len(parameters) == separate - shared


def test_the_embedding_block_is_one(batch):
    module = module_of()
    tied(module)
    groups = decay_groups(module, 0.01)
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))
    made = optimizer("adamw", groups, 1e-2)
    before = module.model.electra.embeddings.LayerNorm.bias.clone()
    losses, _ = module(tensors(batch))
    (losses["mlm"] + losses["rtd"]).backward()
    made.step()
    tied(module)
    assert not torch.equal(module.model.electra.embeddings.LayerNorm.bias, before)
    tied(module.double())
    other = module_of(seed=1).double()
    other.load_state_dict(module.state_dict())
    tied(other)
    tied(copy.deepcopy(other))
    for name, p in module.named_parameters():
        assert torch.equal(p, other.get_parameter(name))


# --- configs and errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "heads", "intermediate", "embedding", "share", "expected"),
    [
        (256, 4, 1024, 128, 1 / 4, (64, 1, 256, 128)),  # small
        (768, 12, 3072, 768, 1 / 3, (256, 4, 1024, 768)),  # base
        (1024, 16, 4096, 1024, 1 / 4, (256, 4, 1024, 1024)),  # large
        (48, 4, 80, 24, 1 / 8, (6, 1, 10, 24)),  # narrower than a head
    ],
)
def test_the_generators_config(hidden, heads, intermediate, embedding, share, expected):
    config = EncoderConfig(
        "electra",
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        embedding_size=embedding,
        num_hidden_layers=5,
        hidden_act="relu",
    )
    found = generator_config(config, share)
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "embedding_size")
    assert tuple(getattr(found, name) for name in names) == expected
    changed = {key for key, value in found.to_dict().items() if config.to_dict()[key] != value}
    assert changed <= set(names)
    assert config.hidden_size == hidden  # unchanged


def test_errors_are_named(batch):
    words = r"generator_share: 0\.25 of hidden_size 384 is 96; expected a multiple .* 64"
    with pytest.raises(ValueError, match=words):
        generator_config(EncoderConfig("electra", hidden_size=384, num_attention_heads=6), 0.25)
    for values, match in (
        ({"generator_share": 0.0}, r"generator_share: expected a number in \(0, 1\], got 0\.0"),
        ({"generator_depth": 1.5}, r"generator_depth: expected a number in \(0, 1\], got 1\.5"),
        ({"embeddings": "tied"}, "embeddings: expected one of shared, disentangled, separate, got 'tied'"),
        ({"weight": -1.0}, r"weight: expected a finite number >= 0, got -1\.0"),
    ):
        with pytest.raises(ValueError, match=match):
            ReplacedTokens(Numbered(), **values)
    with pytest.raises(ValueError, match="format: replaced tokens have no loss for the 2 classes of a pair"):
        ReplacedTokens(Numbered(num_labels=2))
    objective = ReplacedTokens(Numbered())
    words = "model_type: replaced tokens need a family with a discriminator, .*; got 'bert'"
    with pytest.raises(ValueError, match=words):
        objective.model(EncoderConfig("bert"))
    with pytest.raises(TypeError, match="model: expected a discriminator, got BertForMaskedLM"):
        objective.losses(fastbert.BertForMaskedLM(EncoderConfig("bert", **SIZES)))
    with pytest.raises(ValueError, match=r"embeddings: shared ones .* expected generator_share 1, got 0\.25"):
        objective.losses(objective.model(EncoderConfig("deberta-v2", **SIZES)))


def test_what_examples_depend_on():
    objective = ReplacedTokens(Numbered())
    options = {"generator_share": 0.5, "generator_depth": 0.5, "embeddings": "separate", "weight": 1.0}
    assert ReplacedTokens(Numbered(), **options).hash == objective.hash
    for other in (ReplacedTokens(Numbered(), Masking(share=0.25)), ReplacedTokens(Numbered(), seed=1)):
        assert other.hash != objective.hash
    module = ReplacedTokens(Numbered(), weight=3.0).losses(module_of().model)
    assert module.weights == {"rtd": 3.0}


@pytest.mark.parametrize("embedding", [24, 48])
def test_work_is_that_of_the_products(embedding, monkeypatch):
    """Of all products of both models on one sequence, counted by PyTorch; a step is three forwards."""
    batch = batch_of(ReplacedTokens(Numbered([40])))
    module, inputs = module_of(embedding_size=embedding), tensors(batch)
    models = stock(module)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        paper(models, inputs, inputs["labels"][inputs["labels"] != IGNORED])
    assert module.work(batch) == 3 * counted.get_total_flops()
