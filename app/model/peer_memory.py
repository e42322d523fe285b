"""Memory that the GPUs of one host share, for collectives too small to be worth a library's."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from kernels.peer_exchange import Mailbox

logger = logging.getLogger(__name__)
# What a rank sends in one collective; flags double it. NCCL's rings use the link better from there on.
MAX_BYTES = 4 * 1024 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_mailbox(group: dist.ProcessGroup, device: torch.device) -> Mailbox | None:
    """This rank's mailbox for the group, or None on all of its ranks: on a CPU, on several hosts, or if the GPUs cannot
    reach each other's memory."""
    if device.type != "cuda":
        return None
    import torch.distributed._symmetric_memory as symmetric_memory  # of no use, and 30 ms, on a CPU

    size = dist.get_world_size(group)
    if len(set(_everyones(f"{socket.gethostname()} {_BOOT_ID.read_text()}", group))) > 1:
        return None
    # Ray shows each rank its own GPU only, so that all of them call theirs number 0.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    mailbox, problem = None, ""
    try:
        capacity = MAX_BYTES // (size - 1) // 4
        inbox = symmetric_memory.empty(2, size, capacity, dtype=torch.int64, device=device).zero_()
        addresses = symmetric_memory.rendezvous(inbox, group).buffer_ptrs
        mailbox = Mailbox.around(dist.get_rank(group), inbox, addresses)
        torch.cuda.synchronize(device)  # empty before another rank writes
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    if any(problems := _everyones(problem, group)):
        logger.warning("no memory shared between GPUs, NCCL does it all: %s", next(filter(None, problems)))
        return None
    return mailbox


def _everyones(value: str, group: dist.ProcessGroup) -> list[str]:
    found = [""] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
