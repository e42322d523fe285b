"""Groups of one rank do nothing, and a rehearsal has every result's shape. Real groups: tests/engine/test_ranks.py."""

from __future__ import annotations

import pytest
import torch

from app.errors import RankLostError
from app.model.parallel import Group, Pending, RankPlace, Ranks
from kernels.peer_exchange import WORDS, Mailbox
from tests.kernels.cases import CUDA, Target
from tests.kernels.conftest import TRITON_ON_CPU


def test_one_rank_returns_what_it_is_given() -> None:
    group, x = Group(), torch.randn(3, 2)
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.broadcast(x) is x
    assert group.smallest(7) == 7
    ranks = Ranks.join(RankPlace(0, 1, 1, "tcp://nowhere:1"), torch.device("cpu"))
    assert ranks.tensor.size == ranks.expert.size == ranks.host.size == 1


def test_a_rehearsal_has_the_results_shapes() -> None:
    group = Group()
    group.size = 3
    x = torch.arange(8.0).view(4, 2)
    with group.rehearsing():
        assert group.all_reduce(x) is x
        assert group.all_gather(x).shape == (12, 2)
        assert group.start_all_to_all(x, None, None).wait().shape == (4, 2)
        assert group.start_all_to_all(x, [4, 0, 0], [1, 2, 3]).wait().shape == (6, 2)


@pytest.mark.parametrize("target", [*TRITON_ON_CPU, pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def test_a_rehearsal_runs_the_kernels_of_small_collectives(target: Target) -> None:
    """By a mailbox of its own: the others must find this rank's calls counted as theirs are."""
    inbox = target.place(torch.zeros(2, 3, WORDS, dtype=torch.int64))
    mailbox = Mailbox.around(1, inbox, [inbox.data_ptr()] * 3)
    group = Group(mailbox=mailbox)
    group.size, group.rank = 3, 1
    x = target.place(torch.arange(24.0).view(6, 4))
    with group.rehearsing():
        assert group.all_reduce(x.clone()).equal(3 * x)
        assert group.all_gather(x).equal(torch.cat([x] * 3))
        assert group.start_all_to_all(x, None, None).wait().equal(x)
        assert group.broadcast(x.clone()).equal(x)
        # Too large, of a type it does not sum, or uneven: by the library, which a rehearsal leaves out.
        large = target.place(torch.ones(WORDS + 2))
        assert group.all_reduce(large).equal(torch.ones_like(large))
        assert group.all_reduce(large[:8].double()).equal(torch.ones_like(large[:8]).double())
        assert group.start_all_to_all(x, [4, 1, 1], [1, 2, 3]).wait().equal(torch.zeros_like(x))
    assert not inbox.any() and not mailbox.num_calls.any()


def test_a_failed_collective_is_a_lost_rank() -> None:
    class Failing:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer [1.2.3.4]:5. This is typically caused by a crash.\nmore")

    with pytest.raises(RankLostError) as error:
        Pending(torch.empty(0), Failing()).wait()
    assert error.value.message == "a collective failed: Connection closed by peer [1.2.3.4]:5"
