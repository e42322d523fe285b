"""Which part of a model one rank holds: cut along heads, widths and vocabulary, and by experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.errors import ConfigError
from app.model.checkpoint import Span
from app.model.config import FP8_BLOCK, ModelConfig
from app.model.placement import ExpertPlacement

WIDTH_UNIT = 8  # values: rows of 16 bytes in 16-bit weights, as the expert kernels want them
EXACT_TENSOR = (2, 3, 4)  # so many tensor ranks give the bits of one, on a CPU in fp32


@dataclass(frozen=True, slots=True)
class Shard:
    """Number `tensor_rank` of the tensor group `expert_rank`; the default is the whole model.

    placement: of the routed experts, if there are several tensor groups. Their widths are cut like everything else, so
    that a rank of T x E holds 1 / (T E) of the routed experts' bytes and 1 / T of the others'.
    """

    tensor_rank: int = 0
    num_tensor: int = 1
    expert_rank: int = 0
    placement: ExpertPlacement | None = None
    width_unit: int = WIDTH_UNIT  # widths are cut at multiples of it, where every rank gets one

    @classmethod
    def of(cls, config: ModelConfig, rank: int, tensor: int, expert: int, placement_file: str | None = None) -> Shard:
        """Raises ConfigError if such a model cannot be cut this way."""
        if config.num_heads % tensor:
            divisors = [str(size) for size in range(1, config.num_heads + 1) if config.num_heads % size == 0]
            raise ConfigError(
                f"parallel.tensor: {tensor} does not divide the model's {config.num_heads} heads;"
                f" these do: {', '.join(divisors)}",
                field="parallel.tensor",
            )
        placement = None
        if expert > 1:
            if config.moe is None or config.moe.num_experts < expert:
                count = config.moe.num_experts if config.moe else 0
                problem = f"{expert} ranks for a model of {count} routed experts"
                raise ConfigError(f"parallel.expert: {problem}", field="parallel.expert")
            if placement_file is None:
                placement = ExpertPlacement.even(config.moe.num_experts, expert)
            else:
                placement = ExpertPlacement.read(Path(placement_file), config.moe.num_experts, expert)
        return cls(rank % tensor, tensor, rank // tensor, placement, _width_unit(config))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.num_ranks}"

    @property
    def num_ranks(self) -> int:
        return self.num_tensor * (self.placement.num_ranks if self.placement else 1)

    @property
    def rank(self) -> int:
        return self.expert_rank * self.num_tensor + self.tensor_rank

    @property
    def has_head(self) -> bool:
        """Whether this rank computes logits: those of the first tensor group do, for all rows."""
        return self.expert_rank == 0

    def heads(self, num_heads: int, dim: int) -> Span:
        """Rows or columns of this rank's heads."""
        count = num_heads // self.num_tensor * dim
        return Span(num_heads * dim, self.tensor_rank * count, count)

    def width(self, size: int, count: int = 1) -> Span:
        """Of a gated MLP, or of `count` of them side by side."""
        first, end = (
            _cut(size, count, rank, self.num_tensor, self.width_unit)
            for rank in (self.tensor_rank, self.tensor_rank + 1)
        )
        return Span(size * count, first, end - first)

    def vocabulary(self, size: int) -> tuple[Span, int]:
        """This rank's range, and the size to which every rank's is padded."""
        padded = -(-size // self.num_tensor)
        first = min(self.tensor_rank * padded, size)
        return Span(size, first, min(padded, size - first)), padded


def piece_ends(config: ModelConfig, span: Span, *, count: int = 1, head_dim: int | None = None) -> list[int]:
    """Where the pieces of a span end which no number of ranks in EXACT_TENSOR takes apart, counted from its start.

    span: of the inputs of a projection that tensor ranks split: of heads of `head_dim` values, or of the width of an
        MLP or of `count` of them side by side
    """
    size, unit = span.total // count, head_dim or _width_unit(config)
    num_ranks = [tensor for tensor in EXACT_TENSOR if config.num_heads % tensor == 0]
    inside = {0, *(_cut(size, 1, rank, tensor, unit) for tensor in num_ranks for rank in range(tensor))}
    ends = {start + cut - span.start for start in range(0, span.total, size) for cut in inside}
    return [*sorted(end for end in ends if 0 < end < span.count), span.count]


def _cut(size: int, count: int, rank: int, num_ranks: int, unit: int) -> int:
    """Where the part of `rank` begins: at a multiple of `unit`, else of WIDTH_UNIT, where an MLP has enough of them."""
    units = (each for each in (unit, WIDTH_UNIT) if size % each == 0 and size // each >= num_ranks)
    chosen = next(units, 1)
    return size // chosen * count * rank // num_ranks * chosen


def _width_unit(config: ModelConfig) -> int:
    """Blocks of FP8 stay whole: a rank with a part of one could not use its scale."""
    return FP8_BLOCK if config.is_fp8 else WIDTH_UNIT
