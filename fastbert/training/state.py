"""The weights and the optimizer of a run, whole on the CPU, in files, and back.

    model/, …                  each exported model, a HuggingFace directory
    heads.safetensors          all other parameters of the module that is trained, and those that a model has
                               with other values
    optimizer.safetensors      "parameter/key": the optimizer's state

All values are whole, however the processes share them. So any number and kind of processes can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

import fastbert.checkpoint.save as model_files
from fastbert.checkpoint.files import SAFETENSORS, CheckpointError
from fastbert.training.module import Losses
from fastbert.training.parallel import Parallel
from fastbert.training.update import whole

HEADS, MOMENTS = "heads.safetensors", "optimizer.safetensors"


class State:
    """A module and its optimizer.

    Args:
        parallel: the processes.
        module: the module that is trained.
        optimizer: the module's optimizer.
        names: identity of a parameter -> its name in the module.
    """

    def __init__(
        self, parallel: Parallel, module: Losses, optimizer: Optimizer, names: Mapping[int, str]
    ) -> None:
        self.parallel, self.module, self.optimizer, self.names = parallel, module, optimizer, names

    def parameters(self, everywhere: bool = True) -> dict[str, Tensor]:
        """name -> value of each parameter, whole, on the CPU; a shared parameter under its first name.

        All processes call it. Unless `everywhere`, only the first process returns the values.
        """
        found = {}
        for name, p in self.module.named_parameters():
            value = whole(p.detach())
            if everywhere or self.parallel.is_first:
                found[name] = value.cpu()
        return found

    def moments(self, everywhere: bool = True) -> dict[str, Tensor]:
        """ "name/key" -> value of the optimizer's state, whole, on the CPU; called as `parameters` is."""
        found = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                for key, value in self.optimizer.state.get(p, {}).items():
                    value = whole(value.detach())
                    if everywhere or self.parallel.is_first:
                        found[f"{self.names[id(p)]}/{key}"] = value.cpu()
        return found

    def _write_models(self, folder: Path, state: Mapping[str, Tensor]) -> set[str]:
        """Write the models that are exported; returns the names of their parameters within the module."""
        by_parameter = {id(p): name for name, p in self.module.named_parameters()}
        written = set()
        for name, model in self.module.exports.items():
            values = {}
            for key, p in model.named_parameters(remove_duplicate=False):
                values[key] = state[by_parameter[id(p)]]
                written.add(by_parameter[id(p)])
            for key, value in model.state_dict().items():
                if key not in values:  # a buffer, which no process shares with others
                    values[key] = value.cpu()
            model_files.save(model, folder / name, max_shard_size=1 << 60, state_dict=values)
        return written

    def load(self, folder: Path) -> None:
        """Fill the module and the optimizer from a checkpoint."""
        values: dict[int, Tensor] = {}
        for name, model in self.module.exports.items():
            stored = load_file(folder / name / SAFETENSORS)
            for key, p in model.named_parameters(remove_duplicate=False):
                if key in stored:
                    values[id(p)] = stored[key]
        heads = load_file(folder / HEADS)
        for name, p in self.module.named_parameters():
            value = heads.get(name, values.get(id(p)))
            if value is None or value.shape != p.shape:
                shape = None if value is None else tuple(value.shape)
                raise CheckpointError(f"{folder}: {name}: expected shape {tuple(p.shape)}, got {shape}")
            self.parallel.fill(p, value)
        self.fill_moments(load_file(folder / MOMENTS))

    def fill_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Load "name/key" -> whole value into the optimizer; a name without a value starts anew."""
        state, number = {}, 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                prefix = f"{self.names[id(p)]}/"
                own = {key.removeprefix(prefix): v for key, v in moments.items() if key.startswith(prefix)}
                if own:
                    state[number] = {
                        key: self.parallel.like(value, p) if value.shape == p.shape and value.dim() else value
                        for key, value in own.items()
                    }
                number += 1
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def write(self, folder: Path, state: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Write the files of a checkpoint.

        Args:
            folder: where to write them.
            state, moments: what `parameters` and `moments` return.
        """
        exported = self.module.exported(state)
        shared = self._write_models(folder, exported)
        heads = {k: v.contiguous() for k, v in state.items() if k not in shared or v is not exported[k]}
        save_file(heads, folder / HEADS)
        save_file({key: value.contiguous() for key, value in moments.items()}, folder / MOMENTS)
