"""The bit operations that widen e4m3 to bf16 inside the Hopper decode kernel, run as its PTX says, on every code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import mla_decode_hopper

SOURCE = Path(mla_decode_hopper.__file__).read_text(encoding="utf-8")
ASSEMBLY = re.findall(r"^\s+((?:mov|prmt|shr|and|lop3|mul)\.\S+ .*);$", SOURCE, flags=re.MULTILINE)
U32 = np.uint32


def prmt(a: np.ndarray, b: int, selector: int) -> np.ndarray:
    """Four bytes chosen from the eight of b:a."""
    source = [(a >> U32(8 * i)) & U32(0xFF) for i in range(4)] + [U32(b >> (8 * i) & 0xFF) for i in range(4)]
    chosen = [source[selector >> (4 * i) & 0xF] for i in range(4)]
    return sum((byte.astype(U32) << U32(8 * i) for i, byte in enumerate(chosen)), np.zeros_like(a))


def lop3(a: np.ndarray, b: int, c: np.ndarray, table: int) -> np.ndarray:
    """Bit by bit: the table's entry at a * 4 + b * 2 + c."""
    out = np.zeros_like(a)
    for bit in map(U32, range(32)):
        index = ((a >> bit) & U32(1)) * U32(4) + (U32(b) >> bit & U32(1)) * U32(2) + ((c >> bit) & U32(1))
        out |= ((U32(table) >> index) & U32(1)) << bit
    return out


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pairs of bf16, rounded to nearest even."""
    pairs = [torch.from_numpy(x.astype("<u4").view("<i2").copy()).view(torch.bfloat16).float() for x in (a, b)]
    product = (pairs[0] * pairs[1]).to(torch.bfloat16)
    return product.view(torch.int16).numpy().view("<u4").astype(U32)


def run(packed: np.ndarray) -> np.ndarray:
    """[N] words of four e4m3 -> [N, 4] bf16 bits."""
    registers: dict[str, np.ndarray] = {"$2": packed}

    def value(name: str) -> np.ndarray | int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for line in ASSEMBLY:
        name, *operands = re.split(r",?\s+", line.strip())
        target, *rest = [operand.strip(",") for operand in operands]
        arguments = [value(operand) for operand in rest]
        match name.split(".")[0]:
            case "mov":
                registers[target] = np.full_like(packed, arguments[0])
            case "prmt":
                registers[target] = prmt(*arguments)  # type: ignore[arg-type]
            case "shr":
                registers[target] = arguments[0] >> U32(arguments[1])  # type: ignore[arg-type]
            case "and":
                registers[target] = arguments[0] & U32(arguments[1])  # type: ignore[arg-type]
            case "lop3":
                registers[target] = lop3(*arguments)  # type: ignore[arg-type]
            case "mul":
                registers[target] = multiply(*arguments)  # type: ignore[arg-type]
    words = np.stack([registers["$0"], registers["$1"]], axis=1)
    return np.ascontiguousarray(words).astype("<u4").view("<u2").reshape(-1, 4)


@pytest.mark.parametrize("place", range(4))
def test_every_code_becomes_its_value(place: int) -> None:
    """In each of the four places, beside other codes; the two NaN codes become 480, which masks may multiply."""
    assert len(ASSEMBLY) == 11
    codes = np.arange(256, dtype=np.uint8)
    fours = np.stack([np.roll(codes, 37 * index) for index in range(4)], axis=1)
    fours[:, place] = codes
    bits = run(fours.copy().view("<u4").reshape(-1).astype(U32))
    actual = torch.from_numpy(bits.astype("<i2")).view(torch.bfloat16).float()
    expected = torch.from_numpy(fours).view(torch.float8_e4m3fn).float()
    sign = torch.where(torch.from_numpy(fours) >= 128, -1.0, 1.0)
    assert torch.equal(actual, torch.where(expected.isnan(), 480 * sign, expected))
