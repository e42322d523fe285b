"""Memory that the GPUs of one host share, for collectives too small to be worth a library's."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from kernels import peer_exchange
from kernels.peer_exchange import WORDS, Mailbox

logger = logging.getLogger(__name__)
T = TypeVar("T")
# What a rank sends in one collective; flags double it. Between two H200s NCCL is slower up to here.
MAX_BYTES = 4 * 1024 * 1024
TRIAL_S = 30.0
# For as long as the process lives: freeing them waits for the device, and that may wait for a rank that is gone.
_KEPT: list[torch.Tensor] = []


def open_mailbox(group: dist.ProcessGroup, device: torch.device) -> Mailbox | None:
    """This rank's mailbox for its group of CUDA devices. All ranks of all groups open theirs at the same time.

    None on all of them where one cannot: ranks on several hosts, or GPUs that do not reach each other's memory. Then
    none may try again with another group: torch's counts of exchanged addresses differ where one rank failed. One that
    fails in the midst of that exchange leaves the others waiting for as long as loading may take.
    """
    import torch.distributed._symmetric_memory as symmetric_memory  # of no use, and 30 ms, on a CPU

    # Ray shows each rank its own GPU only, so that all of them call theirs number 0. (It turns multicast off as well.)
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    size, places = dist.get_world_size(group), _everyones(_place())
    inbox, problem = torch.empty(0), ""
    if len({places[rank] for rank in dist.get_process_group_ranks(group)}) > 1:
        problem = "ranks of one group on several hosts"
    else:
        capacity = MAX_BYTES // (size - 1) // (4 * WORDS) * WORDS
        try:
            # `symmetric_memory.empty` would import sympy and make a memory pool first, 2 s of every start.
            shape, strides = (2, size, capacity), (size * capacity, capacity, 1)
            allocate = symmetric_memory._SymmetricMemory.empty_strided_p2p  # type: ignore[attr-defined]
            inbox = allocate(shape, strides, torch.int64, device).zero_()
            _KEPT.append(inbox)
            torch.cuda.synchronize(device)  # empty before another rank writes
        except Exception as error:
            problem = _first_line(error)
    if _has_problem(problem):
        return None
    mailbox = None
    try:
        addresses = symmetric_memory.rendezvous(inbox, group).buffer_ptrs
        mailbox = Mailbox.around(dist.get_rank(group), inbox, addresses)
        problem = _try(mailbox)
    except Exception as error:
        problem = _first_line(error)
    return None if _has_problem(problem) else mailbox


def _try(mailbox: Mailbox) -> str:
    """What is wrong with a first exchange; empty if nothing is."""
    numbers = torch.full((2,), mailbox.rank + 1.0, device=mailbox.inbox.device)
    # All that may be needed is there before: nothing is loaded or allocated while a kernel waits in vain.
    zeros_came, beside = torch.full_like(mailbox.inbox, 1 << 32), torch.cuda.Stream()
    torch.cuda.synchronize()
    peer_exchange.all_reduce(numbers, mailbox)
    done = torch.cuda.Event()
    done.record()
    deadline_s = time.monotonic() + TRIAL_S
    while not done.query():
        if time.monotonic() > deadline_s:
            with torch.cuda.stream(beside):
                mailbox.inbox.copy_(zeros_came)  # so the kernel ends
            torch.cuda.synchronize()
            return "what one GPU writes does not reach another"
        time.sleep(0.001)
    expected = float(sum(range(mailbox.size + 1)))
    return "" if numbers.tolist() == [expected] * 2 else f"a first sum is {numbers.tolist()}, not {expected}"


def _place() -> str:
    """Processes that say the same can hand each other memory: one kernel, which numbers them and shows files alike."""
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), *namespaces])
    except OSError as error:
        return f"unknown: {error} {os.urandom(8).hex()}"


def _has_problem(problem: str) -> bool:
    """Whether any rank has one."""
    problems = [found for found in _everyones(problem) if found]
    if problems:
        logger.warning("GPUs share no memory, all collectives go by NCCL: %s", problems[0])
    return bool(problems)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _everyones(value: T) -> list[T]:
    """Each rank's, by rank; on the hosts, with the patience that loading takes."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
