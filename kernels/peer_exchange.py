"""Small collectives between the GPUs of one host: every rank writes into the others' memory and none asks a library.

A word of 32 bits travels beside a flag of 32 bits in one store of 64. So the receiver needs no barrier and no fence:
it reads a word again until its flag is that of this call. (NCCL's LL protocol does the same.)

    inbox of one rank    [2, ranks, words]    call n of a tile of words uses half n % 2

A rank that writes call n + 2 has got the answer to its call n + 1, which the receiver sent after it had read call n. So
two halves are enough. Calls are counted on the device, tile by tile, and CUDA graphs may replay them. That a rank
leaves a call out is not noticed: the others take its next one for the answer. So one that fails within a step must end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import check_contiguous
from kernels.dependent_launch import dependent_launch, wait_for_previous

WORDS = 512  # of a tile
# All of them run at once on any GPU that is served, as they must: a program waits for its like on the other ranks.
MAX_PROGRAMS = 264
_SUMMED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One rank's end of the exchange. All ranks make the same calls, with equal shapes and in the same order."""

    rank: int
    inbox: torch.Tensor  # [2, ranks, capacity] int64, zero at first, which the other ranks write
    addresses: torch.Tensor  # [ranks] int64, on the device: where every rank's inbox lies
    num_calls: torch.Tensor  # [tiles] int32, zero at first

    @classmethod
    def around(cls, rank: int, inbox: torch.Tensor, addresses: Sequence[int]) -> Mailbox:
        """inbox: zeros [2, ranks, capacity] int64, of whole tiles; addresses: every rank's, as this device sees them"""
        check_contiguous("inbox", inbox)
        if inbox.shape[2] % WORDS:
            raise ValueError(f"inbox: {inbox.shape[2]} words are not whole tiles of {WORDS}")
        device = inbox.device
        counts = torch.zeros(inbox.shape[2] // WORDS, dtype=torch.int32, device=device)
        return cls(rank, inbox, torch.tensor(addresses, dtype=torch.int64, device=device), counts)

    def to_itself(self) -> Mailbox:
        """Another one whose letters to any rank come back as from that one: the same kernels, run by one rank alone."""
        inbox, part = torch.zeros_like(self.inbox), self.inbox[0, 0].nbytes
        # What a rank sends lies in the part of its own number, so each address is off by the other's.
        addresses = [inbox.data_ptr() + (to - self.rank) * part for to in range(self.size)]
        addresses[self.rank] = inbox.data_ptr()
        return Mailbox.around(self.rank, inbox, addresses)

    @property
    def size(self) -> int:
        return self.inbox.shape[1]

    def holds(self, x: torch.Tensor, num_parts: int = 1) -> bool:
        """Whether `all_gather` takes x, or `all_to_all` with as many parts as there are ranks: whole pairs of words
        that fit."""
        at, unit = x.storage_offset() * x.dtype.itemsize, 8 * num_parts
        return 0 < x.nbytes <= unit * self.inbox.shape[2] // 2 and x.nbytes % unit == at % 8 == 0

    def sums(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` takes it."""
        return x.dtype in _SUMMED and self.holds(x)


def all_reduce_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition: ranks in order, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@triton.jit
def _values(words, DTYPE: tl.constexpr):
    """Words -> fp32 of the values in their low and their high half; of 32-bit values there is no high half."""
    if DTYPE.primitive_bitwidth == 32:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _words(low, high, DTYPE: tl.constexpr):
    """The way back, rounded."""
    if DTYPE.primitive_bitwidth == 32:
        words = low.to(tl.int32, bitcast=True)
    else:
        high_bits = high.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32) << 16
        words = low.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32) | high_bits
    return words


@triton.jit
def _inbox_of(addresses_ptr, rank):
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _tile_of(tile, num_words, WORDS: tl.constexpr):
    """Where the words of a tile lie, [WORDS / 2, 2], and which of them exist: both of a pair, which moves at once."""
    pair = tile * (WORDS // 2) + tl.arange(0, WORDS // 2)
    at = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
    return at, (pair < num_words // 2)[:, None]


# Of any size alike: a size that comes first while others wait must not be compiled then.
@triton.jit(do_not_specialize=["num_words", "num_tiles"])
def _exchange_kernel(
    x_ptr, out_ptr, addresses_ptr, num_calls_ptr, num_words, num_tiles,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, WORDS: tl.constexpr, IS_SPLIT: tl.constexpr,
    SUMMED: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Send `num_words` of `x` to each rank, a part of its own (IS_SPLIT) or all the same; `out`: what came, rank after
    rank, or as a sum."""
    wait_for_previous(PDL)
    if SENDS:
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            at, mask = _tile_of(tile, num_words, WORDS)
            call = tl.load(num_calls_ptr + tile) + 1
            flag = call.to(tl.int64) << 32
            slots = ((call & 1) * SIZE + RANK) * CAPACITY + at
            for distance in tl.static_range(1, SIZE):
                to = (RANK + distance) % SIZE
                words = tl.load(x_ptr + (to * num_words if IS_SPLIT else 0) + at, mask=mask, other=0)
                inbox = _inbox_of(addresses_ptr, to)
                tl.store(inbox + slots, words.to(tl.int64) & 0xFFFFFFFF | flag, mask=mask)
    if RECEIVES:
        inbox = _inbox_of(addresses_ptr, RANK)
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            at, mask = _tile_of(tile, num_words, WORDS)
            call = tl.load(num_calls_ptr + tile) + 1
            for sender in tl.static_range(SIZE):
                if sender == RANK:
                    words = tl.load(x_ptr + (RANK * num_words if IS_SPLIT else 0) + at, mask=mask, other=0)
                else:
                    came = inbox + ((call & 1) * SIZE + sender) * CAPACITY + at
                    flagged = tl.load(came, mask=mask, other=0, volatile=True)
                    while tl.max((((flagged >> 32).to(tl.int32) != call) & mask).to(tl.int32)) > 0:
                        flagged = tl.load(came, mask=mask, other=0, volatile=True)
                    words = flagged.to(tl.int32)
                if SUMMED is None:
                    tl.store(out_ptr + sender * num_words + at, words, mask=mask)
                elif sender == 0:
                    low, high = _values(words, SUMMED)
                else:
                    more_low, more_high = _values(words, SUMMED)
                    low, high = low + more_low, high + more_high
            if SUMMED is not None:
                tl.store(out_ptr + at, _words(low, high, SUMMED), mask=mask)
            tl.store(num_calls_ptr + tile, call)


def _launch(
    mailbox: Mailbox, x: torch.Tensor, out: torch.Tensor, num_words: int, *,
    is_split: bool = False, summed: tl.dtype | None = None, sends: bool = True, receives: bool = True,
) -> torch.Tensor:  # fmt: skip
    num_tiles = triton.cdiv(num_words, WORDS)
    _exchange_kernel[(min(num_tiles, MAX_PROGRAMS),)](
        x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), mailbox.addresses, mailbox.num_calls,
        num_words, num_tiles,
        RANK=mailbox.rank, SIZE=mailbox.size, CAPACITY=mailbox.inbox.shape[2], WORDS=WORDS, IS_SPLIT=is_split,
        SUMMED=summed, SENDS=sends, RECEIVES=receives, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _num_words(mailbox: Mailbox, x: torch.Tensor, num_parts: int) -> int:
    check_contiguous("x", x)
    if not mailbox.holds(x, num_parts):
        raise ValueError(
            f"x: {x.nbytes} bytes in {num_parts} parts are not aligned pairs of words that fit, see Mailbox.holds"
        )
    return x.nbytes // (4 * num_parts)


def all_reduce(x: torch.Tensor, mailbox: Mailbox, **phases: bool) -> torch.Tensor:
    """Sum over the ranks, in place: the same bits on all of them.

    Args:
        x:       contiguous, fp32, fp16 or bf16, at most as large as the mailbox holds; not empty
        phases:  `sends` or `receives` False leaves that half out, for tests in one process
    Returns: x
    Raises:  ValueError on layout, dtype or size
    Accuracy: to the bit all_reduce_reference
    """
    if x.dtype not in _SUMMED:
        raise ValueError(f"x: {x.dtype} is not summed")
    return _launch(mailbox, x, x, _num_words(mailbox, x, 1), summed=_SUMMED[x.dtype], **phases)


def all_gather(x: torch.Tensor, mailbox: Mailbox, **phases: bool) -> torch.Tensor:
    """[N, ...] of every rank -> [ranks * N, ...], freshly allocated; else as in `all_reduce`, of any dtype."""
    out = x.new_empty(mailbox.size * x.shape[0], *x.shape[1:])
    return _launch(mailbox, x, out, _num_words(mailbox, x, 1), **phases)


def all_to_all(x: torch.Tensor, mailbox: Mailbox, **phases: bool) -> torch.Tensor:
    """[ranks * N, ...], the r-th N rows for rank r -> the same shape, the r-th N rows from rank r; as `all_gather`."""
    return _launch(mailbox, x, torch.empty_like(x), _num_words(mailbox, x, mailbox.size), is_split=True, **phases)
