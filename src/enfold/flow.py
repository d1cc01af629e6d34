"""encode(): pack -> split -> forward -> all_gather -> unpack. The step that is the system.

A `Spread` is one encoder set up on this rank's mesh. Its `encode` stands in for the module's own forward: same
arguments, same output class, the same result on every rank.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from enfold.blocks import Packing, pack_rows, split_rows, unpack_rows
from enfold.comm import Mesh
from enfold.errors import EncodeError
from enfold.exact import Current
from enfold.plan import Plan

logger = logging.getLogger("enfold")

MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values")
"""The arguments whose first dimension is the batch; the first one given counts."""

CACHES = ("cache", "past_key_values")
"""What Transformers calls a key-value cache (the second name is the older one)."""

NOT_ROWS = frozenset({*CACHES, "cache_position", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"})
"""Arguments that don't hold one entry per row of the batch: a call that has one is not split."""


class Spread:
    """One encoder on one rank of its mesh; holds what a call needs and nothing of who started the rank.

    forward: the module's own, which `encode` stands in for.
    """

    def __init__(self, forward: Callable[..., Any], mesh: Mesh, plan: Plan, current: Current) -> None:
        self.forward = forward
        self.signature = inspect.signature(forward)
        self.mesh = mesh
        self.plan = plan
        self.current = current
        self.said: set[str] = set()

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Encode a batch with the ranks of the replica; every rank passes the same batch and gets the same output.

        Takes what the module's forward takes, returns what it returns, key-value caches left out unless the call asks
        for one. No gradient flows back through ranks: where dp or tp is above 1 the output carries none.
        Raises EncodeError (or one of its kinds) with the same text on every rank.
        """
        with self.mesh.watch.call():
            output = self._encode(args, kwargs)
        is_alone = self.mesh.dp.size == self.mesh.tp.size == 1
        return output if is_alone or not torch.is_grad_enabled() else map_tensors(output, torch.Tensor.detach)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._arguments(args, kwargs)
        self.mesh.watch.agree(partial(describe, call))
        num_rows = count_rows(call)
        if num_rows == 0:
            return map_tensors(self.forward(**one_row(call)), lambda x: x[:0])
        packing = pack_rows(num_rows or 1, self.mesh.dp.size)
        if packing is None:
            return self.forward(**call)
        dims = row_dims(call, num_rows)
        if isinstance(dims, str):
            self._say_declined(dims)
            return self.forward(**call)
        mine = split(call, dims, packing, self.mesh.dp.index)
        features = self._forward(mine, packing)
        return all_gather(features, packing, self.mesh)

    def _forward(self, call: Mapping[str, Any], packing: Packing) -> Any:
        self.current.packing = packing
        try:
            return self.forward(**call)
        finally:
            self.current.packing = None

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name. An encoder keeps no key-value cache unless the call asks for one."""
        bound = self.signature.bind_partial(*args, **kwargs).arguments
        call: dict[str, Any] = {}
        for name, value in bound.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                call.update(value)
            else:
                call[name] = value
        if "use_cache" in self.signature.parameters and all(call.get(name) is None for name in CACHES):
            call.setdefault("use_cache", False)
        return call

    def _say_declined(self, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            logger.warning("dp does not split this call, every rank encodes all of it: %s", reason)


def count_rows(call: Mapping[str, Any]) -> int | None:
    """Return the number of rows of the batch; None where no main input is given."""
    for name in MAIN_INPUTS:
        if isinstance(call.get(name), torch.Tensor):
            return int(call[name].shape[0])
    return None


def why_whole(call: Mapping[str, Any]) -> str | None:
    """Return why a call is not split whatever its sizes; None where nothing speaks against it."""
    given = {name for name, value in call.items() if value is not None}
    if call.get("use_cache"):
        return "it asks for a key-value cache"
    if "pixel_values" in given and given & {"input_ids", "inputs_embeds"}:
        return "it has texts and images, and how many images go with each text is not known"
    return next((f"{name} does not hold one entry per row" for name in call if name in NOT_ROWS & given), None)


def row_dims(call: Mapping[str, Any], num_rows: int | None) -> dict[str, int] | str:
    """Return along which dimension each tensor holds the rows of the batch, or why the batch can't be split."""
    if num_rows is None:
        return f"it has none of {', '.join(MAIN_INPUTS)}"
    if reason := why_whole(call):
        return reason
    dims: dict[str, int] = {}
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.dim():
            if name == "position_ids" and value.dim() == 3 and value.shape[1] == num_rows:
                dims[name] = 1  # one plane per rotary axis
            elif value.shape[0] == num_rows:
                dims[name] = 0
            elif value.shape[0] != 1:
                return f"{name} has shape {list(value.shape)}, which does not go with {num_rows} rows"
        elif isinstance(value, list | tuple | dict) and _may_hold_rows(value, num_rows):
            return f"{name} is a {type(value).__name__} that may hold one entry per row"
    return dims


def _may_hold_rows(value: Any, num_rows: int) -> bool:
    return len(value) == num_rows or any(isinstance(leaf, torch.Tensor) for leaf in leaves(value))


def split(call: Mapping[str, Any], dims: Mapping[str, int], packing: Packing, share: int) -> dict[str, Any]:
    """Return the arguments with only the rows of rank `share`; the inverse, for outputs, is all_gather."""
    return {
        name: split_rows(value, packing, share, dims[name]) if name in dims else value for name, value in call.items()
    }


def all_gather(features: Any, packing: Packing, mesh: Mesh) -> Any:
    """Return the outputs with the rows of all dp ranks, padding rows dropped. What occurs twice is sent once."""
    done: dict[int, torch.Tensor] = {}

    def whole(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 0 or x.shape[0] != packing.share_size:
            raise EncodeError(f"an output of shape {list(x.shape)} does not hold {packing.share_size} rows; use fold")
        if id(x) not in done:
            done[id(x)] = unpack_rows(mesh.dp.gather_rows(x), packing)
        return done[id(x)]

    return map_tensors(features, whole)


def one_row(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an empty batch with one row of ones, so that a module can say what its outputs are."""
    return {
        name: value.new_ones(1, *value.shape[1:])
        if isinstance(value, torch.Tensor) and value.dim() and not value.shape[0]
        else value
        for name, value in call.items()
    }


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `tree` with `function` applied to each tensor; dataclasses, dicts, tuples and lists keep their class."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        return type(tree)(**{name: map_tensors(value, function) for name, value in fields.items()})
    if isinstance(tree, dict):
        return type(tree)({name: map_tensors(value, function) for name, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def leaves(tree: Any) -> list[Any]:
    """Return the values of nested lists, tuples and dicts, one after another."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def describe(call: Mapping[str, Any]) -> str:
    """Return what a call is made of: names, shapes, dtypes and a checksum of the values. Equal calls describe alike."""
    return "; ".join(f"{name}={_describe(value)}" for name, value in sorted(call.items()))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        content = value.detach().to("cpu").contiguous().view(-1)
        # A checksum, not a hash: nobody attacks here, and pixels of many images take a while to read as it is.
        checksum = zlib.crc32(content.view(torch.uint8).numpy().data) if content.numel() else 0
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} #{checksum:08x}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__}({', '.join(_describe(leaf) for leaf in leaves(value))})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__
