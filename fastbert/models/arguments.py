"""Arguments of transformers' `from_pretrained` and `save_pretrained` that have a single legal value here.

Scripts pass many of them out of habit. A value that asks for what is done anyway is accepted. Any other value
is refused, and the error names the argument and the reason.
"""

from __future__ import annotations

from typing import Any

import torch

from fastbert.runtime.devices import device_of

_ONE_DEVICE = "the whole model is on one device, without offloading"
_INT8 = "load the floating-point checkpoint and call quantize()"
_WEIGHTS = "weights are read from safetensors and .bin files"

# Argument -> (accepted values, why no other value is)
LOADING: dict[str, tuple[tuple[Any, ...], str]] = {
    "attn_implementation": (
        (None, "eager", "sdpa"),
        "attention is this package's own, with the mathematics of 'eager' and 'sdpa'; "
        "fastbert.use_backend chooses the kernels",
    ),
    "trust_remote_code": ((None, False), "no code of a checkpoint is ever run"),
    "weights_only": ((None, True), "a pickle is read for its tensors only"),
    "low_cpu_mem_usage": ((None, True, False), "loading never holds the weights twice"),
    "code_revision": ((None,), "no code of a checkpoint is ever run"),
    "quantization_config": ((None,), _INT8),
    "load_in_8bit": ((None, False), _INT8),
    "load_in_4bit": ((None, False), _INT8),
    "max_memory": ((None,), _ONE_DEVICE),
    "offload_folder": ((None,), _ONE_DEVICE),
    "offload_buffers": ((None, False), _ONE_DEVICE),
    "offload_state_dict": ((None, False), _ONE_DEVICE),
    "tp_plan": ((None,), _ONE_DEVICE),
    "tp_size": ((None,), _ONE_DEVICE),
    "device_mesh": ((None,), _ONE_DEVICE),
    "distributed_config": ((None,), _ONE_DEVICE),
    "from_tf": ((None, False), _WEIGHTS),
    "from_flax": ((None, False), _WEIGHTS),
    "gguf_file": ((None,), _WEIGHTS),
    "variant": ((None,), "weights are read under their usual names; rename the files or take another folder"),
    "key_mapping": ((None,), "old spellings of keys are known; rename other keys in the file"),
    "adapter_kwargs": ((None,), "load a PEFT adapter with peft, around the model"),
    "use_kernels": ((None, False), "kernels of the hub are not used"),
    "kernel_config": ((None,), "kernels of the hub are not used"),
    "proxies": ((None,), "set HTTPS_PROXY in the environment"),
    "use_auth_token": ((None,), "its name is token"),
}

SAVING: dict[str, tuple[tuple[Any, ...], str]] = {
    "push_to_hub": (
        (None, False),
        "uploading is huggingface_hub's: save, then huggingface_hub.upload_folder(repo_id=…, folder_path=…)",
    ),
    "safe_serialization": ((True,), "only safetensors files are written, no pickles"),
    "variant": ((None,), "files are written under their usual names"),
    "token": ((None,), "nothing is uploaded"),
    "save_peft_format": ((None, True, False), "there are no adapters in the model"),
    "save_original_format": ((True,), "keys are HuggingFace's own"),
    "distributed_checkpoint": ((None, False), "only safetensors files are written"),
}


def check_loading(given: dict[str, Any]) -> None:
    """Refuse a value of `from_pretrained`'s arguments that asks for another behaviour.

    Raises:
        ValueError: naming the argument, what came, what was expected and the reason.
    """
    _check(LOADING, given)


def check_saving(given: dict[str, Any]) -> None:
    """Refuse a value of `save_pretrained`'s arguments likewise.

    Raises:
        ValueError: as in `check_loading`.
    """
    _check(SAVING, given)


def _check(table: dict[str, tuple[tuple[Any, ...], str]], given: dict[str, Any]) -> None:
    for name, value in given.items():
        taken, reason = table[name]
        if not any(value is t or (isinstance(t, str) and value == t) for t in taken):
            expected = " or ".join(repr(t) for t in taken)
            raise ValueError(f"{name}: {value!r} is not supported, expected {expected}: {reason}")


def single_device(device: torch.device | str | int | None, device_map: Any) -> torch.device:
    """The device that `device` or transformers' `device_map` names; the CPU if neither is given.

    Args:
        device: the device of the whole model.
        device_map: a device, a mapping of parts to one device, or "auto" ("balanced", "balanced_low_0",
            "sequential"): the GPU if there is one, else the CPU.

    Raises:
        ValueError, TypeError: a value is no device, both are given, or `device_map` asks for several devices.
    """
    if device_map is None:
        return device_of("cpu" if device is None else device)
    if device is not None:
        raise ValueError(f"device, device_map: expected one of the two, got {device!r} and {device_map!r}")
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        count = torch.cuda.device_count()
        if count > 1:
            raise ValueError(
                f"device_map: {device_map!r} spreads a model over the {count} GPUs here, which is not "
                "supported; expected one device, such as 'cuda:0'"
            )
        return torch.device("cuda:0" if count else "cpu")
    if isinstance(device_map, dict):
        named = list(dict.fromkeys(str(value) for value in device_map.values()))
        if len(named) != 1:
            raise ValueError(
                f"device_map: expected one device for the whole model, got {', '.join(named) or 'none'}"
            )
        device_map = next(iter(device_map.values()))
    if isinstance(device_map, int) and not isinstance(device_map, bool):
        return torch.device("cuda", device_map)
    try:
        chosen = torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device_map: expected a device or 'auto', got {device_map!r}") from error
    if chosen.type == "meta":
        raise ValueError("device_map: 'meta' has no weights; expected a device such as 'cpu' or 'cuda:0'")
    return chosen
