"""From configuration to a running engine: numerics, model, cache, self-test. Derived values stay in here."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton

from app.cache.layout import LATENT_BLOCK_SIZE, CacheLayout
from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.graphs import StepGraphs
from app.engine.kernel_check import check_fp8_attention
from app.engine.limits import Limits
from app.engine.prompt_cost import PromptCost
from app.engine.runner import Runner
from app.engine.sampler import Sampler
from app.engine.scheduler import Scheduler
from app.engine.workspace import workspace_bytes
from app.errors import CheckpointError, ConfigError, PreflightError
from app.model.checkpoint import checkpoint_digest
from app.model.config import ModelConfig
from app.model.parallel import RankPlace, Ranks
from app.model.sharding import Shard
from app.model.transformer import Transformer
from app.model.weights import load_weights, random_weights
from app.protocol import GenerateRequest, SamplingParams
from kernels import invariance, native, tuning

logger = logging.getLogger(__name__)
CPU_CACHE_BYTES = 256 * 2**20
MAX_STEP_S = {"cpu": 0.2, "cuda": 0.11}
ATTENTION_TILE = 128  # prompt tokens that one multiprocessor attends for one head at a time
WHOLE_ROUNDS = 4  # of smaller chunks cutting to whole ones would leave too little
CUDA_CACHE_SHARE = 0.9  # of the memory free after the weights are loaded


def load_engine(source: ModelSource, config: EngineConfig, place: RankPlace | None = None) -> Engine:
    """Load the checkpoint, allocate the cache and run the self-test; the engine's thread is not started yet.

    place: of rank 0, where other ranks share the model; they run `run_rank` meanwhile, on the same configuration.
    Raises CheckpointError, ConfigError (a limit the model cannot meet) or PreflightError (no such device, no memory).
    """
    start = time.monotonic()
    version = checkpoint_digest(source.folder, expected=source.digest)
    model = load_model(source, config, place)
    device, dtype = model.device, model.dtype
    engine = build_engine(model, config, version=version)
    engine.warm_up()
    self_test(engine, must_be_invariant=is_batch_invariant(config, device, dtype))
    logger.info(
        "engine ready in %.1f s: %s, %s on %s, %d cache blocks",
        time.monotonic() - start, source.name, str(dtype).removeprefix("torch."), device, engine.stats().num_blocks,
    )  # fmt: skip
    return engine


def load_model(source: ModelSource, config: EngineConfig, place: RankPlace | None = None) -> Transformer:
    """The model, or the part of it that the rank at `place` holds, which joins the others first. Raises as above."""
    device = _device(config)
    dtype = _dtype(config, device)
    if device.type == "cuda" and config.kernel_backend == "torch":
        raise ConfigError("engine.kernel_backend: torch runs on the CPU only", field="engine.kernel_backend")
    if device.type == "cpu" and config.kernel_backend == "triton" and not triton.knobs.runtime.interpret:
        raise ConfigError("engine.kernel_backend: triton needs a GPU", field="engine.kernel_backend")
    if device.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    prepare_kernels(config)
    model_config = ModelConfig.from_folder(source.folder)
    shard, ranks = Shard(), Ranks.alone()
    if place is not None:
        if config.batch_invariant and device.type == "cuda":
            _check_order_of_sums(place, dtype, model_config)
        shard = Shard.of(model_config, place.rank, place.tensor, place.expert, place.expert_placement)
        ranks = Ranks.join(place, device)
    if source.weights == "random":
        fill = partial(random_weights, model_config, seed=0)
    else:
        fill = partial(load_weights, source.folder, model_config)
    weights = fill(device=device, dtype=dtype, backend=config.kernel_backend, shard=shard)
    is_invariant = is_batch_invariant(config, device, dtype)
    invariance.require(is_invariant and device.type == "cuda")
    return Transformer(
        model_config, weights, device=device, dtype=dtype, backend=config.kernel_backend, ranks=ranks,
        absorbed_prefill=is_invariant,
    )  # fmt: skip


def _check_order_of_sums(place: RankPlace, dtype: torch.dtype, model: ModelConfig) -> None:
    """Raises ConfigError where a row's bits would depend on how many others NCCL sums up with it."""
    if place.tensor > 2 and (dtype != torch.float32 or model.is_fp8):
        problem = (
            "NCCL adds three ranks or more up in an order that depends on the size, and only float32 models "
            "without FP8 experts are summed in fp64; parallel.tensor: 2 at most"
        )
        raise ConfigError(f"engine.batch_invariant: {problem}", field="engine.batch_invariant")


def prepare_kernels(config: EngineConfig) -> None:
    """Say where compiled kernels lie and how they are launched, before the first of them runs in this process.

    Raises ConfigError on a folder that cannot be written or a table that cannot be used.
    """
    if config.kernel_cache is not None:
        try:
            Path(config.kernel_cache).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            field = "engine.kernel_cache"
            raise ConfigError(f"{field}: {config.kernel_cache}: {error.strerror}", field=field) from None
        triton.knobs.cache.dir = config.kernel_cache
    try:
        tuning.use(None if config.tuning_table is None else tuning.Table.read(Path(config.tuning_table)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.tuning_table: {error}", field="engine.tuning_table") from None


def build_engine(model: Transformer, config: EngineConfig, *, version: str) -> Engine:
    """An engine around a model in memory. Raises ConfigError, CheckpointError or PreflightError as load_engine does."""
    runner, layout = build_runner(model, config)
    limits = _limits(config, model)
    capacity = runner.num_blocks * layout.block_size
    if capacity < limits.max_model_len:
        logger.warning("max_model_len %d cut to %d, which the cache holds", limits.max_model_len, capacity)
        limits = replace(limits, max_model_len=capacity)
    scheduler = Scheduler(limits, layout, runner.num_blocks, version)
    sampler = Sampler(limits.eos_token_ids, config.kernel_backend, timeout_s=model.ranks.timeout_s)
    return Engine(scheduler, runner, sampler, version=version)


def build_runner(model: Transformer, config: EngineConfig) -> tuple[Runner, CacheLayout]:
    """What runs steps on this rank; every rank makes one, with as many cache blocks as each of them has room for."""
    device, ranks = model.device, model.ranks
    if device.type == "cuda" and ranks.world.size == 1:  # NCCL in graphs takes a buffer for one piece of memory
        # Steps want memory of ever other sizes: segments that grow leave no gaps, and none must be returned on the way.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    layout = _cache_layout(config, model.config, device, model.dtype)
    limits = _limits(config, model)
    workspace = workspace_bytes(model.config, limits, model.dtype.itemsize)
    num_blocks = ranks.loading.smallest(_num_blocks(config, layout, device, workspace))
    cache = layout.allocate(num_blocks, device)
    graphs = None
    if device.type == "cuda":
        graphs = StepGraphs(
            model, cache, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len,
            max_batched_tokens=limits.max_batched_tokens,
        )  # fmt: skip
    runner = Runner(model, cache, graphs)
    if ranks.loading.size > 1:
        with native.compiling():
            runner.rehearse()
        ranks.loading.smallest(0)  # everybody is there
        logger.info(
            "%d cache blocks: %.3f GB of latents on each of %d ranks, the same on all",
            num_blocks, num_blocks * layout.bytes_per_block / 1e9, ranks.loading.size,
        )  # fmt: skip
    return runner, layout


def is_batch_invariant(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    default = device.type == "cpu" and dtype == torch.float32
    return default if config.batch_invariant is None else config.batch_invariant


def self_test(engine: Engine, *, must_be_invariant: bool) -> None:
    """Generate two short sequences together and alone. Raises PreflightError if the results cannot be right."""
    capacity = min(engine.limits.max_model_len, engine.stats().num_blocks * LATENT_BLOCK_SIZE)
    num_outputs = min(2, capacity - 1)
    prompts = [
        tuple((7 * index + start) % engine.limits.vocab_size for index in range(min(length, capacity - num_outputs)))
        for start, length in ((3, 21), (5, 66))
    ]
    with native.compiling():
        together = _generate(engine, prompts, num_outputs)
        alone = [tokens for prompt in prompts for tokens in _generate(engine, [prompt], num_outputs)]
    engine.reset()
    if must_be_invariant and together != alone:
        raise PreflightError(
            "batch_invariant: this machine's matrix library gives a token different logits in another batch; "
            "set batch_invariant: false to serve without the guarantee"
        )


def _generate(engine: Engine, prompts: list[tuple[int, ...]], num_outputs: int) -> list[tuple[int, ...]]:
    sampling = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)
    tokens: dict[str, tuple[int, ...]] = {f"self-test-{index}": () for index in range(len(prompts))}
    waiting = list(zip(tokens, prompts, strict=True))
    while waiting or engine.has_work:
        if waiting:  # one a step: the queue may have room for one only
            name, prompt = waiting.pop(0)
            engine.add(GenerateRequest(name, prompt, sampling, cache_salt="self-test"))
        for chunk in engine.step():
            tokens[chunk.request_id] += chunk.token_ids
    return list(tokens.values())


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise PreflightError("engine.device: cuda was asked for, and torch sees no CUDA device")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _chunk_steps(model: ModelConfig, device: torch.device) -> tuple[int, ...]:
    """Tokens whose attention keeps most multiprocessors at work once, and all of them to the end."""
    if device.type == "cpu":
        return (1,)
    num_multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
    most = ATTENTION_TILE * max(1, num_multiprocessors // model.num_heads)
    whole = ATTENTION_TILE * num_multiprocessors // math.gcd(num_multiprocessors, model.num_heads)
    return most, WHOLE_ROUNDS * whole


def _limits(config: EngineConfig, transformer: Transformer) -> Limits:
    model, device = transformer.config, transformer.device
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len: {max_model_len} exceeds the model's context of {model.max_position_embeddings}",
            field="engine.max_model_len",
        )
    if unknown := [token_id for token_id in model.eos_token_ids if token_id >= model.vocab_size]:
        raise CheckpointError(f"eos_token_id: {unknown[0]} is outside the vocabulary of {model.vocab_size}")
    return Limits(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_chunk_tokens=min(config.max_chunk_tokens, config.max_batched_tokens),
        max_waiting_seqs=config.max_waiting_seqs,
        chunk_steps=_chunk_steps(model, device),
        max_step_s=config.max_step_s or MAX_STEP_S[device.type],
        prompt_cost=PromptCost.of_model(model, absorbed=transformer.absorbed_prefill),
        max_passed_over_s=config.max_passed_over_s,
        prefix_caching=config.prefix_caching,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
    )


def _cache_layout(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> CacheLayout:
    is_fp8 = config.cache_dtype == "fp8"
    if is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise PreflightError(f"engine.cache_dtype: fp8 needs compute capability 8.9 or more, {name} has less")
    try:
        layout = CacheLayout.of(model, dtype, is_fp8=is_fp8)
    except ValueError as error:
        raise ConfigError(f"engine.cache_dtype: {error}", field="engine.cache_dtype") from None
    if is_fp8:
        check_fp8_attention(model, device, dtype, config.kernel_backend)
    return layout


def _num_blocks(config: EngineConfig, layout: CacheLayout, device: torch.device, workspace: int) -> int:
    if config.cache_blocks:
        return config.cache_blocks
    memory = config.cache_memory_bytes
    if memory is None:
        memory = CPU_CACHE_BYTES
        if device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
            memory = min(int(free * CUDA_CACHE_SHARE), free - workspace)
    num_blocks = layout.num_blocks_in(memory)
    if num_blocks < 1:
        raise PreflightError(
            f"engine.cache_memory_bytes: {max(memory, 0)} bytes hold no block of {layout.bytes_per_block} bytes"
        )
    return num_blocks
