"""Our attention under other transformers models, each against stock sdpa.

fastbert/acceleration/attention.py and interface.py.
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastbert
from fastbert.acceleration import attention, interface
from tests.support.accelerated_models import close

BATCH, SEQLEN = 4, 24
BART = {"layers": 1, "ffn_dim": 48, "attention_heads": 2}  # of its encoder and of its decoder
LENGTHS = (24, 5, 13, 9)
ENCODERS = (*sorted(interface.PACKED), "layoutlm")
SIZES = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    vocab_size=100,
    max_position_embeddings=64,
    pad_token_id=0,
)
EXTRA = {
    "llama": dict(num_key_value_heads=1, bos_token_id=1, eos_token_id=2),
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "vit": dict(image_size=16, patch_size=4),
    "clip_text_model": dict(bos_token_id=1, eos_token_id=2),
}


@torch.no_grad()
def stock(name: str, auto: type = transformers.AutoModel, **overrides) -> torch.nn.Module:
    """A tiny transformers model, in eval on sdpa. Weights are at unit scale, so that attention matters."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **EXTRA.get(name, {}), **overrides})
    with warnings.catch_warnings(action="ignore"):
        model = auto.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
    return model


def ours(model: torch.nn.Module, **options) -> torch.nn.Module:
    """A copy of the model with our attention."""
    return interface.apply(copy.deepcopy(model), **options)


def masks() -> dict[str, torch.Tensor]:
    """2-D masks of all kinds."""
    right = torch.zeros(BATCH, SEQLEN, dtype=torch.long)
    for row, length in zip(right, LENGTHS, strict=True):
        row[:length] = 1
    holes = torch.rand(BATCH, SEQLEN) < 0.6
    holes[:, 0] = True
    return {"right": right, "left": right.flip(1), "holes": holes.long(), "ones": torch.ones_like(right)}


def ids() -> torch.Tensor:
    return torch.randint(5, 99, (BATCH, SEQLEN))


def counts(model: torch.nn.Module) -> tuple[int, int, dict[str, int]]:
    """(fused calls, packed calls, reason -> stock calls) of the whole model."""
    fused, packed, reasons = 0, 0, {}
    for site in interface.sites(model).values():
        fused, packed = fused + site.fused, packed + site.packed
        for reason, calls in site.stock.items():
            reasons[reason] = reasons.get(reason, 0) + calls
    return fused, packed, reasons


def gradients(model: torch.nn.Module, keep: torch.Tensor | None, **inputs) -> tuple[torch.Tensor, dict]:
    """(the last hidden state, the gradients of a sum over its kept tokens)."""
    out = model(**inputs)[0]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    if keep is not None:
        weight = weight * keep.unsqueeze(-1)
    (out * weight).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    """Gradients of a loss in float64. In float32 those of deep tables are only accurate to 1e-4."""
    assert b
    assert a.keys() == b.keys()
    largest = max(grad.abs().max().item() for grad in b.values())
    assert largest > 0.1
    for name, grad in b.items():
        assert (a[name] - grad).abs().max().item() <= tolerance * largest, name


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
def test_a_text_encoder_with_every_mask(name):
    model = stock(name)
    fast, x = ours(model), ids()
    layers = len(interface.sites(fast))
    assert layers == 2
    packs = name in interface.PACKED
    cases = {**masks(), "none": None}
    with torch.no_grad():
        for kind, mask in cases.items():
            before = counts(fast)
            expected, got = (m(input_ids=x, attention_mask=mask)[0] for m in (model, fast))
            keep = torch.ones_like(x) if mask is None else mask
            close(got * keep.unsqueeze(-1), expected * keep.unsqueeze(-1))
            fused, packed, reasons = counts(fast)
            assert fused - before[0] == layers
            assert not reasons
            # heads read a masked first token: with left padding all rows equal sdpa's
            assert packed - before[1] == (2 if packs and kind in ("right", "holes") else 0), kind
            if kind == "left":
                close(got, expected)
        if packs:
            mask4 = cases["right"][:, None, None, :].bool() & torch.ones(SEQLEN, 1, dtype=torch.bool)
            mask4 = mask4 | torch.eye(SEQLEN, dtype=torch.bool)
            additive = torch.zeros(mask4.shape).masked_fill(~mask4, torch.finfo(torch.float32).min)
            if name != "esm":  # which takes 2-D masks
                for mask in (mask4, additive):
                    expected, got = (m(input_ids=x, attention_mask=mask)[0] for m in (model, fast))
                    close(got, expected)


@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_of_a_text_encoder(name):
    same_training(stock(name).double(), masks()["right"], input_ids=ids())


def same_training(model: torch.nn.Module, mask: torch.Tensor | None, **inputs) -> torch.nn.Module:
    """Outputs of kept tokens and all gradients equal the stock model's; returns the accelerated one."""
    fast = ours(model)
    if "input_ids" in inputs:
        inputs["attention_mask"] = mask
    expected, grads = gradients(model, mask, **inputs)
    got, fast_grads = gradients(fast, mask, **inputs)
    keep = torch.ones(expected.shape[:2]) if mask is None else mask
    close(got * keep.unsqueeze(-1), expected * keep.unsqueeze(-1))
    same_gradients(fast_grads, grads)
    return fast


def test_a_vision_transformer():
    pixels = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    assert counts(same_training(stock("vit").double(), None, pixel_values=pixels)) == (2, 0, {})


@pytest.mark.parametrize("kind", ["none", "ones", "right", "left"])
def test_a_decoder_is_causal_and_shares_its_key_heads(kind):
    fast = same_training(stock("llama").double(), masks().get(kind), input_ids=ids(), use_cache=False)
    assert counts(fast) == (2, 0, {})


def test_generation_decodes_by_sdpa_and_gives_the_same_tokens():
    model = stock("llama", transformers.AutoModelForCausalLM)
    fast, x, mask = ours(model), ids(), masks()["left"]
    options = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(fast.generate(x, **options), model.generate(x, **options))
    fused, _, reasons = counts(fast)
    assert fused == 2  # the prompt, in two layers
    assert reasons == {"as many queries as keys are needed": 6}


@pytest.mark.parametrize("name", ["clip_text_model", "esm"])
def test_what_is_not_packed(name):
    """A model that reads padded rows (CLIP's), and little padding."""
    model, x, mask = stock(name), ids(), masks()["right"]
    if name == "esm":
        mask[:] = 1
        mask[1, -3:] = 0
    fast, keep = ours(model), mask.unsqueeze(-1) if name == "esm" else 1
    with torch.no_grad():
        close(fast(x, attention_mask=mask)[0] * keep, model(x, attention_mask=mask)[0] * keep)
    assert counts(fast) == (2, 0, {})


def test_cross_attention_never_packs():
    config = {"is_decoder": True, "add_cross_attention": True}
    fast = ours(stock("xlm-roberta-xl", **config))
    assert not any(site.packs for site in interface.sites(fast).values())
    sides = {f"{side}_{key}": size for side in ("encoder", "decoder") for key, size in BART.items()}
    model = stock("bart", d_model=32, **sides)
    fast, mask = ours(model), masks()["right"]
    inputs = {"input_ids": ids(), "attention_mask": mask, "decoder_input_ids": ids(), "use_cache": False}
    with torch.no_grad():
        close(fast(**inputs)[0], model(**inputs)[0])
    assert counts(fast) == (4, 0, {})  # two layers of the encoder, one of the decoder, its cross attention


def test_a_fully_masked_sequence_is_finite():
    model = stock("data2vec-text")
    fast, mask = ours(model), masks()["right"]
    mask[2] = 0
    out, grads = gradients(fast, mask, input_ids=ids(), attention_mask=mask)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("training", [False, True])
def test_autocast_and_half_precision(training):
    model = stock("data2vec-text").train(training)
    mask = masks()["right"]
    inputs, keep = {"input_ids": ids(), "attention_mask": mask}, mask.bool()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(**inputs)[0]
        for case in ("autocast", "bfloat16"):
            base = model if case == "autocast" else copy.deepcopy(model).bfloat16()
            fast = ours(base)
            with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
                expected, got = (m(**inputs)[0] for m in (base, fast))
            assert got.dtype == expected.dtype
            worst, allowed = ((t.double() - exact)[keep].abs().max().item() for t in (got, expected))
            assert worst <= 1.5 * allowed
            assert counts(fast)[0] == 2


# --- the functions themselves -------------------------------------------------------------------------------


class Module(torch.nn.Module):
    """A stand-in for an attention module."""

    is_causal = False


def site_of(module: torch.nn.Module, **options) -> attention.Site:
    attention.register()
    module.__dict__[attention.SITE] = attention.Site("layers.0", **options)
    return module.__dict__[attention.SITE]


def qkv(heads: int = 2, key_heads: int = 2, seqlen: int = 7, headdim: int = 8) -> list[torch.Tensor]:
    return [torch.randn(3, h, seqlen, headdim) for h in (heads, key_heads, key_heads)]


def both(module, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        ALL_ATTENTION_FUNCTIONS[name](module, *args, **kwargs)[0] for name in (attention.NAME, "sdpa")
    )


def test_the_name_can_be_asked_for_at_construction():
    """Without `apply` there are no sites: nothing is packed, and the padding mask is used."""
    attention.register()
    model = stock("esm")
    fast = transformers.AutoModel.from_config(model.config, attn_implementation=attention.NAME).eval()
    fast.load_state_dict(model.state_dict())
    x, mask = ids(), masks()["right"]
    with torch.no_grad():
        expected = model(x, attention_mask=mask)[0]
        assert fast.config._attn_implementation == attention.NAME
        close(fast(x, attention_mask=mask)[0], expected)
        assert (fast(x)[0] - expected)[mask.bool()].abs().max() > 0.1  # the mask matters


@pytest.mark.parametrize("padding", ["none", "ones", "right", "left", "holes"])
@pytest.mark.parametrize("form", [bidirectional_mask_function, causal_mask_function, "window"])
@pytest.mark.parametrize("skip", [False, True])
def test_the_mask_function_gives_what_sdpas_gives(padding, form, skip):
    attention.register()
    if form == "window":
        form = sliding_window_causal_mask_function(4)
    mask = None if padding == "none" else masks()[padding].bool()
    options = dict(
        batch_size=BATCH,
        q_length=SEQLEN,
        kv_length=SEQLEN,
        mask_function=form,
        attention_mask=mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=skip,
    )
    expected = AttentionMaskInterface()["sdpa"](**options)
    got = attention.mask_function(**options)
    assert (got is None) == (expected is None)
    if got is not None:
        assert got.dtype == torch.bool
        assert torch.equal(got, expected)
    if form is bidirectional_mask_function and padding == "right":
        with pytest.raises(RuntimeError):  # all queries share it, and it cannot be changed in place
            got &= False
        mask.zero_()
        assert torch.equal(got, expected)  # nor through the caller's mask


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [None, False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "heads", "additive", "row"])
def test_the_attention_function_against_sdpas(mask, causal, groups):
    module, (q, k, v) = Module(), qkv(4, 4 // groups)
    module.num_key_value_groups, module.is_causal = groups, True
    site = site_of(module)
    bool_mask = (torch.rand(3, 1, 7, 7) < 0.5) | torch.eye(7, dtype=torch.bool)
    given = {
        "none": None,
        "bool": bool_mask,
        "heads": bool_mask | (torch.rand(3, 4, 7, 7) < 0.3),
        "additive": torch.randn(1, 4, 7, 7),
        "row": torch.zeros(3, 1, 1, 7).masked_fill(torch.arange(7) > 4, -1e4),
    }[mask]
    learned = (given,) if mask == "additive" else ()
    tensors = [t.requires_grad_() for t in (q, k, v, *learned)]
    results = both(module, q, k, v, given, scaling=0.3, is_causal=causal)
    close(*results)
    assert results[0].shape == results[1].shape == (3, 7, 4, 8)
    assert results[0].is_contiguous()
    weight = torch.randn(results[0].shape)
    for got, expected in zip(
        *(torch.autograd.grad((out * weight).sum(), tensors) for out in results), strict=True
    ):
        close(got, expected)
    assert (site.fused, dict(site.stock)) == (1, {})


def test_a_mask_changed_in_place_counts():
    module, (q, k, v) = Module(), qkv()
    mask = torch.ones(3, 1, 7, 7, dtype=torch.bool)
    first, _ = both(module, q, k, v, mask)
    mask[:, :, :, 4:] = False
    got, expected = both(module, q, k, v, mask)
    close(got, expected)
    assert (got - first).abs().max() > 1e-2
    with torch.inference_mode():
        mask = torch.ones(3, 1, 7, 7, dtype=torch.bool)
        both(module, q, k, v, mask)
        mask[:, :, :, 4:] = False
        close(*both(module, q, k, v, mask))
    q.requires_grad_()  # the same mask in training
    close(*(torch.autograd.grad(out.square().sum(), q)[0] for out in both(module, q, k, v, mask)))


def unfit_calls() -> dict[str, tuple]:
    """reason -> (arguments, keywords) of calls that sdpa's function must take."""
    q, k, v = qkv()
    bias = torch.randn(1, 2, 7, 7)
    mask = torch.rand(7, 7) < 0.9
    mask.fill_diagonal_(True)
    return {
        "argument position_bias": ((q, k, v, None), {"position_bias": bias}),
        "argument s_aux": ((q, k, v, None), {"s_aux": torch.ones(2)}),
        "argument output_attentions": ((q, k, v, None), {"output_attentions": True}),
        "as many queries as keys are needed": ((q[:, :, :3], k, v, None), {}),
        "value of another shape than key": ((q, k, v[..., :4], None), {}),
        "query of another batch": ((q[:1], k, v, None), {}),
        "mask not 4-D": ((q, k, v, mask), {}),
        "dropout is not a number below 1": ((q, k, v, None), {"dropout": 1.0}),
        "device meta": ((*(t.to("meta") for t in (q, k, v)), None), {}),
        "a tensor of class Special": ((q.as_subclass(Special), k, v, None), {}),
    }


class Special(torch.Tensor):
    pass


@pytest.mark.parametrize("reason", unfit_calls())
def test_what_we_do_not_compute_goes_to_sdpa_and_is_counted(reason):
    args, kwargs = unfit_calls()[reason]
    module = Module()
    site = site_of(module)
    got, expected = both(module, *args, **kwargs)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if got.device.type != "meta":
        assert torch.equal(got.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    name = "key of another shape than query" if reason == "query of another batch" else reason
    assert (site.fused, dict(site.stock)) == (0, {name: 1})
    site.strict = True
    with pytest.raises(RuntimeError, match=rf"^layers\.0: .*{name}$"):
        attention.attention_function(module, *args, **kwargs)


def test_transforms_and_mixed_dtypes_take_sdpa():
    module, (q, k, v) = Module(), qkv()
    site = site_of(module)
    grad = torch.func.grad(lambda t: attention.attention_function(module, t, k, v, None)[0].square().sum())
    close(grad(q), torch.func.grad(lambda t: both(module, t, k, v, None)[1].square().sum())(q))
    assert site.stock["a torch.func transform"] >= 1
    with pytest.raises(RuntimeError, match="dtype"):  # which refuses them
        attention.attention_function(module, q, k, v.double(), None)
    assert site.stock["dtypes torch.float32, torch.float32, torch.float64 of query, key, value"] == 1


def test_dropout_drops_scales_and_repeats_by_the_seed():
    module, (q, k, _) = Module(), qkv(seqlen=64)
    v = torch.ones_like(q)
    site_of(module)

    def draw(seed):
        torch.manual_seed(seed)
        return attention.attention_function(module, q, k, v, None, dropout=0.25)[0]

    first = draw(1)
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    assert abs(first.mean().item() - 1.0) < 0.02  # sums of kept probabilities / 0.75
    torch.manual_seed(1)
    again = [attention.attention_function(module, q, k, v, None, dropout=0.25)[0] for _ in range(2)]
    assert not torch.equal(*again)  # every call draws anew


# --- apply, undo, allows ------------------------------------------------------------------------------------


def test_apply_is_idempotent_and_undo_is_bit_equal():
    model = stock("xmod")
    x, mask = ids(), masks()["right"]
    with torch.no_grad():
        before = model(x, attention_mask=mask)[0]
        kept = dict(interface.sites(interface.apply(model)).items())
        assert interface.apply(model, strict=True) is model
        assert all(interface.sites(model)[name] is site and site.strict for name, site in kept.items())
        assert (model(x, attention_mask=mask)[0] - before).abs().max() > 0
        assert interface.undo(model) is model
        assert model.config._attn_implementation == "sdpa"
        assert not interface.sites(model)
        assert torch.equal(model(x, attention_mask=mask)[0], before)
        assert interface.undo(model) is model
    assert not [n for m in model.modules() for n in m.__dict__ if n.startswith("_fastbert")]


def test_undo_of_a_model_with_parts():
    text, vision = {**SIZES, **EXTRA["clip_text_model"]}, {**SIZES, **EXTRA["vit"]}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    inputs = {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 16, 16)}
    with torch.no_grad():
        before = model(**inputs).logits_per_text
        interface.apply(model)
        close(model(**inputs).logits_per_text, before)
        assert counts(model)[0] == 4
        interface.undo(model)
        assert torch.equal(model(**inputs).logits_per_text, before)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa"] * 3
    model.set_attn_implementation({"text_config": attention.NAME})
    interface.undo(interface.apply(model))
    assert [part._attn_implementation for part in parts] == ["sdpa", attention.NAME, "sdpa"]


def test_files_copies_and_pickles(tmp_path, monkeypatch):
    """Files are vanilla, a copy has its own weights and sites, a pickle brings the name along."""
    model, x, mask = stock("data2vec-text"), ids(), masks()["right"]
    fast = ours(model)
    fast.save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()
    vanilla = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert vanilla.config._attn_implementation == "sdpa"
    assert not interface.sites(vanilla)
    other = copy.deepcopy(fast)
    with torch.no_grad():
        assert torch.equal(vanilla(x, attention_mask=mask)[0], model(x, attention_mask=mask)[0])
        expected = fast(x, attention_mask=mask)[0]
        assert torch.equal(other(x, attention_mask=mask)[0], expected)
        assert counts(other) == counts(fast) == (2, 2, {})
        for parameter in other.parameters():
            parameter.mul_(0.5)
        assert not torch.equal(other(x, attention_mask=mask)[0], expected)
        assert torch.equal(fast(x, attention_mask=mask)[0], expected)
        interface.undo(other)
        assert fast.config._attn_implementation == attention.NAME
        data = pickle.dumps(fast)
        for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
            monkeypatch.delitem(mapping, attention.NAME)
        monkeypatch.setattr(attention, "_sdpa", None)  # as in a process that has not imported fastbert
        again = pickle.loads(data)
        assert torch.equal(again(x, attention_mask=mask)[0], expected)
    assert counts(again) == (6, 6, {})


class _Named(torch.nn.Linear):
    def forward(self, x):
        return x if getattr(self, "config", None) == "sdpa" else super().forward(x)


def refused() -> dict[str, tuple]:
    """why -> (model, words of the reason)."""
    eager, wants = stock("esm"), stock("esm")
    eager.set_attn_implementation("eager")
    wants.config.__dict__["output_attentions"] = wants.config.__dict__["_output_attentions"] = True
    named = stock("esm")
    named.encoder.layer[0].attention.output.dense = _Named(32, 32)
    return {
        "eager": (eager, "EsmModel is set to the attention implementation 'eager'"),
        "weights": (wants, "output_attentions"),
        "no sdpa": (
            stock("splinter", question_token_id=4),
            "SplinterModel does not support attn_implementation='sdpa'",
        ),
        "own attention": (stock("falcon", bos_token_id=1, eos_token_id=2), "FalconModel does not let"),
        "named": (named, "_Named compares with the name 'sdpa'"),
    }


def test_models_that_are_left_alone_say_why():
    for why, (model, words) in refused().items():
        reason, chosen = interface.allows(model), model.config._attn_implementation
        assert words in (reason or ""), why
        with pytest.raises(ValueError, match=f"^model: .*{words}"):
            interface.apply(model)
        assert model.config._attn_implementation == chosen
        assert not interface.sites(model)
    assert interface.allows(stock("esm")) is None
    assert interface.allows(ours(stock("esm"))) is None
    for function in (interface.allows, interface.apply, interface.undo):
        with pytest.raises(TypeError, match=r"^model: expected a transformers\.PreTrainedModel, got Linear"):
            function(torch.nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_activation_checkpointing_draws_the_same_dropout():
    fast = ours(stock("roberta-prelayernorm", attention_probs_dropout_prob=0.3)).double().train()
    inputs = {"input_ids": ids(), "attention_mask": masks()["right"]}
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(gradients(fast, inputs["attention_mask"], **inputs)[1])
        fast.zero_grad(set_to_none=True)
        fast.gradient_checkpointing_enable({"use_reentrant": False})
    assert counts(fast)[0] == 6  # two layers, then two and again in backward
    same_gradients(*found)


# --- torch.compile and export -------------------------------------------------------------------------------


@pytest.mark.sweep
def test_compiled_without_a_graph_break():
    model = stock("data2vec-text", num_hidden_layers=1)
    fast = ours(model)
    torch._dynamo.reset()
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for length in (SEQLEN, SEQLEN - 7):
            x, mask = ids()[:, :length], masks()["right"][:, :length]
            close(compiled(x, attention_mask=mask)[0], model(x, attention_mask=mask)[0])
    assert counts(fast) == (0, 0, {})  # compiled calls are not counted


def test_export_holds_no_op_of_ours():
    fast = ours(stock("vit", num_hidden_layers=1))
    pixels = torch.randn(2, 3, 16, 16)
    program = torch.export.export(fast, (pixels,), strict=False)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("scaled_dot_product_attention" in t for t in targets)
    assert not any("fastbert" in t for t in targets)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_no_op_of_ours():
    module, inputs = Module(), tuple(qkv())
    site = site_of(module)
    attend = attention.attention_function
    traced = torch.jit.trace(lambda *qkv: attend(module, *qkv, None)[0], inputs, check_trace=False)
    assert "scaled_dot_product_attention" in str(traced.graph)
    assert (site.fused, dict(site.stock)) == (0, {"export": 1})
    shorter = [t[:, :, :4] for t in inputs]
    close(traced(*shorter), both(module, *shorter, None)[1])


def test_accelerate_applies_explains_and_takes_it_back():
    model, x, mask = stock("layoutlm"), ids(), masks()["right"]
    with torch.no_grad():
        expected = model(x, attention_mask=mask)[0]
        assert fastbert.explain(model).models[0].reason == "LayoutLMModel: not accelerated"
        with pytest.raises(ValueError, match=r"LayoutLMModel: attention alone .*gains nothing on a CPU"):
            fastbert.accelerate(model, strict=True)
        assert fastbert.explain(model).models[0].reason == "LayoutLMModel: not accelerated"
        assert fastbert.accelerate(model) is model
        actual = model(x, attention_mask=mask)[0]
        said = "LayoutLMModel: attention alone, which gains nothing on a CPU"
        report = fastbert.explain(model)
        assert str(report).splitlines()[0] == report.summary == said
        assert report.models[0].reason == f"{said} (calls: 2 fused)"
        assert (report.fused_layers, report.total_layers) == (0, 0)
        elsewhere = copy.deepcopy(model).to("meta")  # in place of a GPU
        assert fastbert.explain(elsewhere).summary == "LayoutLMModel: attention alone"
        assert fastbert.accelerate(elsewhere, strict=True) is elsewhere
        close(actual[mask.bool()], expected[mask.bool()])
        with pytest.warns(RuntimeWarning, match="LayoutLMModel: attention=False"):
            fastbert.accelerate(model, attention=False)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(model(x, attention_mask=mask)[0], expected)
        wrapper = torch.nn.Sequential(model)
        assert len(interface.sites(fastbert.accelerate(wrapper))) == 2
        assert not interface.sites(fastbert.restore(wrapper))
        assert model.config._attn_implementation == "sdpa"


def test_of_models_inside_each_other_the_outermost_is_named():
    """XmodForMaskedLM holds an XmodModel; both are PreTrainedModels."""
    model = stock("xmod", transformers.AutoModelForMaskedLM)
    assert [m.name for m in fastbert.explain(torch.nn.Sequential(model)).models] == ["0"]
