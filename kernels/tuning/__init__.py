"""Launch configurations as data: one JSON table per card, read once; while serving there is only a look-up.

{"card": "NVIDIA H200", "measured": "...", "kernels": {"mla_decode": [{"up_to": {...}, "use": {...}}, ...]}}

A kernel's entries are tried in order. `up_to` bounds facts of the call from above (an entry without bounds always
fits) and `use` is the configuration of the first entry that fits. What a card's table leaves out is taken from
default.json, which holds every kernel. `python -m kernels.tune` measures a card and writes such a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
DEFAULT_FILE = "default.json"
Config = Mapping[str, Any]

# What a call may be told apart by, and the configuration it gets: names and types are checked when a table is read.
FACTS: dict[str, frozenset[str]] = {
    "fused_experts": frozenset({"bits", "rows_per_expert", "dim", "inter"}),
    "fp8_experts": frozenset({"rows_per_expert", "dim", "inter"}),
    "mla_decode": frozenset({"bits", "num_heads"}),
    "mla_prefill": frozenset({"bits"}),
    "gather_blocks": frozenset({"row_bytes"}),
}
_GEMM = frozenset({"columns", "depth", "num_warps", "num_stages", "programs", "group"})
_USES: dict[str, dict[str, frozenset[str]]] = {  # kernel -> setting -> its own settings; empty: a number
    "fused_experts": {"rows": frozenset(), "gate_up": _GEMM, "down": _GEMM},
    "fp8_experts": {"rows": frozenset(), "gate_up": _GEMM, "down": _GEMM},
    "mla_decode": dict.fromkeys(("tile", "num_warps", "num_stages"), frozenset()),
    "mla_prefill": dict.fromkeys(("queries", "keys", "num_warps", "num_stages"), frozenset()),
    "gather_blocks": dict.fromkeys(("tokens", "num_warps"), frozenset()),
}


@dataclass(frozen=True, slots=True)
class Table:
    """The entries of some kernels for one card, best first."""

    card: str
    entries: Mapping[str, tuple[tuple[Config, Config], ...]]  # kernel -> (up_to, use), ...

    @classmethod
    def read(cls, path: Path) -> Table:
        """Raises ValueError that names the file and what is wrong in it, OSError if it cannot be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: is no JSON ({error})") from None
        try:
            return cls.of(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of(cls, values: Any) -> Table:
        """From a parsed file. Raises ValueError on an unknown kernel, fact or setting, or a value of the wrong type."""
        if not isinstance(values, dict) or not isinstance(values.get("card"), str):
            raise ValueError("expected an object with the name of a card")
        kernels = values.get("kernels")
        if not isinstance(kernels, dict):
            raise ValueError("kernels: expected an object")
        return cls(values["card"], {kernel: _entries(kernel, entries) for kernel, entries in kernels.items()})

    def find(self, kernel: str, facts: Mapping[str, float]) -> Config | None:
        """The first entry whose bounds hold; None if there is none."""
        for up_to, use in self.entries.get(kernel, ()):
            if all(facts[name] <= bound for name, bound in up_to.items()):
                return use
        return None


def _entries(kernel: str, entries: Any) -> tuple[tuple[Config, Config], ...]:
    if kernel not in FACTS:
        raise ValueError(f"kernels.{kernel}: is no tuned kernel, expected one of {', '.join(FACTS)}")
    if not isinstance(entries, list):
        raise ValueError(f"kernels.{kernel}: expected a list")
    checked = []
    for index, entry in enumerate(entries):
        where = f"kernels.{kernel}[{index}]"
        if not isinstance(entry, dict) or entry.keys() != {"up_to", "use"}:
            raise ValueError(f"{where}: expected an object of up_to and use")
        _check_numbers(f"{where}.up_to", entry["up_to"], FACTS[kernel], is_complete=False)
        uses = _USES[kernel]
        plain = {name for name, inner in uses.items() if not inner}
        if not isinstance(entry["use"], dict) or entry["use"].keys() != uses.keys():
            raise ValueError(f"{where}.use: expected {', '.join(uses)}")
        _check_numbers(f"{where}.use", {name: entry["use"][name] for name in plain}, plain)
        for name in uses.keys() - plain:
            _check_numbers(f"{where}.use.{name}", entry["use"][name], uses[name])
        checked.append((entry["up_to"], entry["use"]))
    return tuple(checked)


def _check_numbers(where: str, values: Any, names: frozenset[str] | set[str], *, is_complete: bool = True) -> None:
    if not isinstance(values, dict) or values.keys() - names or (is_complete and values.keys() != names):
        raise ValueError(f"{where}: expected an object of {', '.join(sorted(names))}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{where}.{name}: expected a positive number, got {value!r}")


@lru_cache
def _default() -> Table:
    return Table.read(FOLDER / DEFAULT_FILE)


_chosen: dict[str, Table] = {}  # "table" -> what `use` was given, ahead of every card's own


@lru_cache
def _shipped(card: str) -> Table:
    path = FOLDER / file_name(card)
    return Table.read(path) if path.exists() else _default()


def file_name(card: str) -> str:
    """`NVIDIA H200` -> `NVIDIA_H200.json`"""
    return "".join(letter if letter.isalnum() else "_" for letter in card) + ".json"


def use(table: Table | None) -> None:
    """Put a table ahead of the shipped ones, for this process; None: the shipped ones alone."""
    _chosen.clear()
    if table is not None:
        _chosen["table"] = table
    find.cache_clear()


@lru_cache
def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@lru_cache(maxsize=4096)
def find(kernel: str, device: torch.device, **facts: float) -> Config:
    """The configuration of a call: of the table in use, else of the device's card, else the default."""
    for table in (*_chosen.values(), _shipped(_card(device)), _default()):
        if (found := table.find(kernel, facts)) is not None:
            return found
    raise ValueError(f"{DEFAULT_FILE} holds nothing for {kernel} with {facts}")
