"""`fastbert.accelerate` with PEFT's adapters."""

from __future__ import annotations

import copy

import pytest
import torch

import fastbert
from tests.support.accelerated_models import (
    HEAD,
    LAYERS,
    assert_close,
    assert_fused,
    assert_same_training,
    assert_stock,
    calls,
    first_kept,
    relative,
    same_gradients,
    stock,
    tiny,
)
from tests.support.checkpoints import assert_same_state

# --- PEFT ---------------------------------------------------------------------------------------------------


TARGETS = {
    "query-value": ["query", "value"],
    "feed-forward": ["intermediate.dense", "output.dense"],
    "all-linear": "all-linear",
    "embeddings-too": ["word_embeddings", "key"],
}


def with_lora(model, targets: str = "query-value", **settings):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=2,
        lora_dropout=settings.pop("lora_dropout", 0.0),
        target_modules=TARGETS[targets],
        init_lora_weights=False,
        modules_to_save=["classifier"] if model.config.model_type == "bert" else None,
        **settings,
    )
    return peft.get_peft_model(model, config)


def both_ways(order: str, targets: str, name: str = "bert"):
    """(an accelerated model with LoRA, the stock one)."""
    if order == "lora-first":
        model = fastbert.accelerate(with_lora(tiny(name=name), targets))
    else:
        model = with_lora(fastbert.accelerate(tiny(name=name)), targets)
    return model, with_lora(tiny(name=name), targets)


FAMILIES = ("roberta", "distilbert", "electra", "albert", "mpnet")


@pytest.mark.parametrize(
    ("name", "targets"), [*(("bert", t) for t in TARGETS), *((name, "all-linear") for name in FAMILIES)]
)
@pytest.mark.parametrize("order", ("lora-first", "accelerate-first"))
def test_lora_trains_as_on_the_stock_model(order, name, targets):
    model, stock = both_ways(order, targets, name)
    inputs = first_kept(name)
    with torch.no_grad():  # the adapter has an effect
        assert relative(stock(**inputs).logits, tiny(name=name)(**inputs).logits) > 1e-2
    assert_same_training(model, stock, inputs)
    assert_fused(model)


LAYOUTS = {
    "modernbert": ["Wqkv", "mlp.Wo"],
    "nomic_bert": ["q_proj", "gate_proj"],
    "eurobert": ["q_proj", "gate_proj"],
    "deberta-v2": ["query_proj", "dense"],
    "mobilebert": ["query", "bottleneck.input.dense", "intermediate.dense"],
    "longformer": ["query", "key_global", "query_global"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_lora_in_other_layers(name):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=LAYOUTS[name], r=4, init_lora_weights=False)
    slow = peft.get_peft_model(stock(name, HEAD), config).double().train()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    for model in (slow, fast):
        with calls(model, **({"packed": 1, "fused": LAYERS, "stock": 0} if model is fast else {})):
            model(**first_kept(name), labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("order", ("lora-first", "accelerate-first"))
def test_merged_adapters_leave_a_fused_model_and_save_a_vanilla_one(order, tmp_path):
    model, stock = both_ways(order, "all-linear")
    merged_stock = stock.merge_and_unload()
    inputs = first_kept("bert")
    with torch.no_grad():
        before = model(**inputs).logits
        merged = model.merge_and_unload()
        after = merged(**inputs).logits
        assert_close(after, before)
        assert_close(after, merged_stock(**inputs).logits)
    assert_fused(merged)
    assert type(merged).__name__ == "BertForSequenceClassification"
    merged.save_pretrained(tmp_path)
    vanilla = HEAD.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(fastbert.restore(merged)(**inputs).logits, vanilla(**inputs).logits)


def test_adapters_merged_in_place_switched_and_left_out():
    peft = pytest.importorskip("peft")
    models = []
    for make in (tiny, lambda: fastbert.accelerate(tiny())):
        model = with_lora(make())
        torch.manual_seed(2)
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["key"], init_lora_weights=False))
        models.append(model)
    stock, model = models
    inputs = first_kept("bert")
    seen = []
    for change in (
        lambda m: m.set_adapter("second"),
        lambda m: m.set_adapter("default"),
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
    ):
        change(stock)
        change(model)
        with torch.no_grad():
            seen.append(stock(**inputs).logits)
            assert_close(model(**inputs).logits, seen[-1])
            with stock.disable_adapter(), model.disable_adapter():
                assert_close(model(**inputs).logits, stock(**inputs).logits)
    assert relative(seen[0], seen[1]) > 1e-2
    assert_fused(model)


def test_dropout_inside_lora_is_honoured():
    model = fastbert.accelerate(with_lora(tiny(), lora_dropout=0.5)).eval()
    stock = with_lora(tiny(), lora_dropout=0.5).eval()
    inputs = first_kept("bert")
    with torch.no_grad():
        assert_close(model(**inputs).logits, stock(**inputs).logits)
        model.train()  # the model's own dropout is 0
        draws = torch.stack([model(**inputs).logits for _ in range(64)])
        exact = model.eval()(**inputs).logits
        stock.train()
        stock_draws = torch.stack([stock(**inputs).logits for _ in range(64)])
    assert_fused(model)
    spread, stock_spread = draws.std(0).mean(), stock_draws.std(0).mean()
    assert 0.7 < spread / stock_spread < 1.4
    assert (draws - exact).abs().max() > 1e-3


def test_an_adapter_on_a_stock_model_loads_what_an_accelerated_one_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = with_lora(fastbert.accelerate(tiny()))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny(), tmp_path)
    inputs = first_kept("bert")
    with torch.no_grad():
        assert_close(model(**inputs).logits, loaded(**inputs).logits)
    assert_same_state(model, loaded)


def test_other_adapters_take_the_stock_layer():
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(
        target_modules=["layer.1.attention.self.key", "layer.1.output.dense"],
        feedforward_modules=["layer.1.output.dense"],
        init_ia3_weights=False,
    )
    models = []
    for model in (tiny(), fastbert.accelerate(tiny())):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(model, copy.deepcopy(config)))
    stock, model = models
    assert_same_training(model, stock, first_kept("bert"))
    assert_stock(model, lambda name: "layer.1" in name)
    fused = [layer for layer in fastbert.explain(model).layers if "layer.0" in layer.name]
    assert [(layer.fused_calls, layer.stock_calls) for layer in fused] == [(1, 0)]


def test_prompt_tuning():
    peft = pytest.importorskip("peft")
    models = []
    for model in (tiny(), fastbert.accelerate(tiny())):
        torch.manual_seed(1)
        config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
        models.append(peft.get_peft_model(model, config))
    stock, model = models
    assert_same_training(
        model, stock, first_kept("bert")
    )  # soft words before the text need inputs_embeds and a longer mask
    assert_fused(model)
