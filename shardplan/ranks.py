"""Which ranks take part, and how do they take a step together?"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shardplan.dist import Comm, all_reduce, solo, torch_comm
from shardplan.planning import flatten

__all__ = [
    "default_comm",
    "device_of",
    "host_name",
    "normal_device",
    "take_step",
    "world_group",
]

# The job's group and its comm, made when it is first needed: making one is a step of its own.
_known: dict[str, tuple[Any, Comm]] = {}


def default_comm() -> Comm:
    """Return the comm of all ranks of the job; that of one rank where there is no process group.

    Every rank of the job must call the function that asks for it.

    >>> default_comm().world_size
    1
    """
    group = world_group()
    if group is None:
        _known.clear()
        return solo()
    if "job" not in _known or _known["job"][0] is not group:
        _known["job"] = (group, torch_comm(group))
    return _known["job"][1]


def world_group() -> Any:
    """Return torch's process group of all ranks; None where there is none."""
    dist = sys.modules.get("torch.distributed")  # whoever has a process group has imported it
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def take_step(
    comm: Comm,
    step: str,
    map: Callable[[], Any],
    reduce: Callable[[list[Any]], Any],
    *,
    encode: Callable[[Any], bytes] | None = None,
    decode: Callable[[bytes], Any] | None = None,
) -> Any:
    """Take a step on all ranks, as `all_reduce` does; a single rank raises its errors as they are.

    >>> take_step(solo(), "add up", lambda: 2, sum)
    2
    """
    if comm.world_size == 1:
        return reduce([map()])
    ways = {k: v for k, v in (("encode", encode), ("decode", decode)) if v is not None}
    if ways:
        from shardplan.dist.steps import decode_json, encode_json

        ways |= {"encode_result": encode_json, "decode_result": decode_json}
    return all_reduce(comm, step, map, reduce, **ways)


def device_of(sd: Mapping[Any, Any]) -> str:
    """Name the device that a state dict's tensors are on, the one way.

    >>> import torch
    >>> device_of({"step": 7, "w": torch.zeros(2)}), device_of({})
    ('cpu', 'cpu')
    """
    for value in flatten(sd)[0].values():
        device = getattr(value, "device", None)
        if getattr(device, "type", "cpu") != "cpu":
            return normal_device(device)
    return "cpu"


def normal_device(device: Any) -> str:
    """Write a device the one way: ``cpu``, ``cuda:3``.

    >>> normal_device("cpu:0"), normal_device("cuda"), normal_device("cuda:3")
    ('cpu', 'cuda:0', 'cuda:3')
    """
    kind, _, index = str(device).partition(":")
    if kind in ("cpu", "meta"):
        return kind
    torch = sys.modules.get("torch")
    if not index and torch is not None and kind == "cuda" and torch.cuda.is_available():
        index = str(torch.cuda.current_device())
    return f"{kind}:{index or 0}"


def host_name() -> str:
    """Return the name of the machine, to tell which ranks share one."""
    return socket.gethostname()
