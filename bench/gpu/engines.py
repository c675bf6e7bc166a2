"""Every way to run the encoder's forward on a GPU that the benchmark compares: ours and the peers.

One `Bank` per model holds the weights, drawn on the device and shared by all engines. `Bank.forward(name)`
builds an engine, or raises with the reason.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastbert
from bench.lib import workloads
from bench.lib.engines import DTYPES, Forward, config_of, theirs, torch_forward

T = TypeVar("T")
# torch_compile comes last: it takes a minute or more per shape
ENGINES = (
    "fastbert-bf16",
    "fastbert_graphs-bf16",
    "accelerated-bf16",
    "transformers_eager-bf16",
    "transformers_sdpa-bf16",
    "transformers_sdpa_cudnn-bf16",
    "transformers_sdpa_graphs-bf16",
    "transformers_flash2-bf16",
    "torch_encoder-bf16",
    "torch_encoder_graphs-bf16",
    "torch_compile-bf16",
)
MOST_TOKENS = 32768  # of a batch that our graphs serve
ATTENTION = {
    "accelerated": "sdpa",
    "transformers_eager": "eager",
    "transformers_sdpa": "sdpa",
    "transformers_sdpa_cudnn": "sdpa",
    "transformers_flash2": "flash_attention_2",
    "torch_compile": "sdpa",
}


class TorchEncoder(torch.nn.Module):
    """BERT's sizes in torch's own nn.TransformerEncoder."""

    def __init__(self, model: workloads.Model):
        super().__init__()
        self.word = torch.nn.Embedding(model.vocab, model.hidden)
        self.position = torch.nn.Embedding(512, model.hidden)
        self.segment = torch.nn.Embedding(2, model.hidden)
        self.norm = torch.nn.LayerNorm(model.hidden, eps=1e-12)
        layer = torch.nn.TransformerEncoderLayer(
            model.hidden, model.heads, model.intermediate, 0.1, "gelu", 1e-12, batch_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, model.layers)

    def forward(self, input_ids, token_type_ids, attention_mask=None):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word(input_ids) + self.position(positions) + self.segment(token_type_ids)
        padding = None if attention_mask is None else attention_mask == 0
        return self.encoder(self.norm(x), src_key_padding_mask=padding)


def torch_encoder_state(state: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """BERT's weights under the names of `TorchEncoder`."""
    table = "embeddings.{}_embeddings.weight"
    found = {
        "word.weight": state[table.format("word")],
        "position.weight": state[table.format("position")],
        "segment.weight": state[table.format("token_type")],
    }
    plain = {
        "self_attn.out_proj": "attention.output.dense",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm1": "attention.output.LayerNorm",
        "norm2": "output.LayerNorm",
    }
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = state[f"embeddings.LayerNorm.{kind}"]
        for i in range(layers):
            ours, to = f"encoder.layer.{i}.", f"encoder.layers.{i}."
            qkv = [state[f"{ours}attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            found[f"{to}self_attn.in_proj_{kind}"] = torch.cat(qkv)
            found |= {f"{to}{name}.{kind}": state[f"{ours}{other}.{kind}"] for name, other in plain.items()}
    return found


def graph_of(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A call as a CUDA graph, and its output, which every replay writes anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what is compiled, made or chosen at a first call
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = call()
    return graph, output


def captured(forward: Forward) -> Forward:
    """`forward` as one CUDA graph per batch shape: inputs are copied in, the graph's own output comes back.

    So a peer gets what our graphs have, at its best: no lengths are sorted into buckets. A forward that looks
    at its inputs cannot be captured, and raises.
    """
    graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor], torch.Tensor]] = {}

    def call(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        key = tuple((name, value.shape) for name, value in inputs.items())
        if key not in graphs:
            static = {name: value.clone() for name, value in inputs.items()}
            graph, output = graph_of(lambda: forward(static))
            graphs[key] = graph, static, output
        graph, static, output = graphs[key]
        for name, value in inputs.items():
            static[name].copy_(value)
        graph.replay()
        return output

    return call


class Bank:
    """The engines of one model on one device."""

    def __init__(self, model: workloads.Model, device: torch.device | str):
        self.model, self.device = model, torch.device(device)
        torch.manual_seed(0)
        self.config = config_of(model)
        with self.device:  # on a CPU drawing a large model's weights takes seconds
            master = fastbert.AutoModel.from_config(self.config, add_pooling_layer=False)
        self.state = master.state_dict()
        self._peers: dict[str, torch.nn.Module] = {}

    def _placed(self, module: torch.nn.Module, dtype: torch.dtype, state: dict | None = None):
        module.load_state_dict(self.state if state is None else state)
        return module.to(dtype).eval()

    @functools.cached_property
    def ours(self) -> fastbert.BertModel:
        with self.device:
            module = fastbert.AutoModel.from_config(self.config, add_pooling_layer=False)
        return self._placed(module, torch.bfloat16)

    def _theirs(self, attention: str) -> torch.nn.Module:
        if attention not in self._peers:
            self._peers[attention] = self._made(attention)
        return self._peers[attention]

    def _made(self, attention: str) -> torch.nn.Module:
        with self.device:
            module = theirs(self.config, attention)
        return self._placed(module, torch.bfloat16)

    def forward(self, name: str) -> Forward:
        """The engine `name` of ENGINES, ready to run. Raises with the reason where it cannot be built."""
        engine, tag = name.split("-")
        if name not in ENGINES:
            raise ValueError(f"name: got {name!r}, expected one of {', '.join(ENGINES)}")
        if engine == "fastbert":
            return torch_forward(self.ours)
        if engine == "fastbert_graphs":
            return self._graphs()
        if engine == "accelerated":  # a model of its own: transformers' others stay as they are
            return torch_forward(fastbert.accelerate(self._made(ATTENTION[engine]), strict=True))
        if engine.endswith("_graphs"):
            if self.device.type != "cuda":
                raise RuntimeError(f"CUDA graphs need a GPU, not {self.device.type}")
            return captured(self.forward(name.replace("_graphs", "")))
        if engine == "torch_encoder":
            with self.device:
                module = TorchEncoder(self.model)
            module = self._placed(module, DTYPES[tag], torch_encoder_state(self.state, self.model.layers))
            return torch.inference_mode()(lambda inputs: module(**inputs))
        if engine == "transformers_flash2" and importlib.util.find_spec("flash_attn") is None:
            raise RuntimeError("flash_attn is not installed")
        module = self._theirs(ATTENTION[engine])
        if engine == "torch_compile":
            module = torch.compile(module, mode="max-autotune", dynamic=False)
            return torch.no_grad()(lambda inputs: module(**inputs).last_hidden_state)
        if engine == "transformers_sdpa_cudnn":
            if self.device.type != "cuda":
                raise RuntimeError(f"cuDNN's attention runs on cuda, not on {self.device.type}")
            return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(torch_forward(module))
        return torch_forward(module)

    def _graphs(self) -> Forward:
        from fastbert.graphs import recorder as recorders
        from fastbert.graphs.model import graph

        # on a CPU there are no graphs: there this tries the code only
        recorder = recorders.recorder_for if self.device.type == "cuda" else recorders.EagerRecorder
        graphed = graph(self.ours, max_tokens=MOST_TOKENS, recorder=recorder)

        def forward(inputs):
            with torch.inference_mode():
                hidden = graphed(**inputs).last_hidden_state
            if graphed.last_fallback is not None:
                raise RuntimeError(f"no graph was replayed: {graphed.last_fallback}")
            return hidden

        return forward
