"""The arguments of verbs by name, for editors, type checkers and ``help()``: written by ``make format``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from scoremode.core.options import Pairs, Plain
from scoremode.core.text.corpus import Corpus, CorpusSource, Spec


class QuestionArguments(TypedDict, total=False):
    """A text, and the method that scores it. None means: the default."""

    corpus: Spec | Sequence[Spec] | Corpus | CorpusSource | None
    """wikitext2, wikitext2:FILE, python-docs, a file (.txt .md .jsonl .parquet), folder, pattern, rollouts:DIR,
    answers:FILE, - for stdin"""
    text: str | None
    """a text given here (without any: python-docs-short)"""
    dataset: str | None
    """a dataset on the Hugging Face hub"""
    dataset_config: str | None
    """of the dataset"""
    split: str | None
    """of the dataset (default: test)"""
    field: str | None
    """of .jsonl or .parquet rows (default: text, or messages)"""
    num_samples: int | None
    """only the first N rows (of one plain text: lines)"""
    document_tokens: int | None
    """only the first N tokens of each document"""
    assistant_only: bool | None
    """of chat rows, score the assistant's tokens alone"""
    slice: str | Sequence[str] | None
    """show the text between two markers apart; may be given again (chats: roles always)"""
    method: str | None
    """see scoremode info methods (default: sliding-once)"""
    context_length: int | None
    """tokens per window (default: the method's)"""
    stride: int | None
    """tokens between windows (default: the method's)"""
    max_windows: int | None
    """0 for all (default: the method's own limit)"""
    path: str | None
    """prefill (default), or decode: one token per step, as text is generated"""
    sequences: int | Sequence[int] | None
    """windows that are decoded side by side (default: 16)"""
    prefill_tokens: int | None
    """tokens of each window that are fed at once before decoding starts (default: 1)"""


class SpreadArguments(TypedDict, total=False):
    """One model as several replicas. None of them is part of a run's identity."""

    replicas: int | None
    """engines at a time (default: one, in this process)"""
    ray: str | None
    """auto, or HOST:PORT of a Ray cluster (default: Ray is started here)"""
    gpus_per_replica: float | None
    """GPUs of each, also a share (default: what it needs)"""
    cpus_per_replica: float | None
    """CPU cores of each (default: 1 for each process of the engine)"""


class EngineOptionArguments(TypedDict, total=False):
    """Options of an engine. None means: the engine's own choice."""

    adapter: str | None
    """folder of a PEFT adapter to put on the model"""
    allow_untested: bool | None
    """use a version of vLLM that scoremode was not tested with"""
    api_key_env: str | None
    """environment variable that holds the server's API key; the key itself is never typed or kept"""
    attn_implementation: str | None
    """attention code of Transformers: eager, sdpa, flash_attention_2, … (default: its own choice)"""
    batch_tokens: int | None
    """tokens in one forward pass"""
    cache_bits_k: int | Sequence[int] | None
    """bits of cached keys, 2 to 8, with path="decode" (default: float16)"""
    cache_bits_v: int | Sequence[int] | None
    """bits of cached values, 2 to 8, with path="decode" (default: float16)"""
    cache_type_k: str | Sequence[str] | None
    """type of the cache of keys (default: f16)"""
    cache_type_v: str | Sequence[str] | None
    """type of the cache of values (default: f16)"""
    concurrency: int | None
    """requests at a time (default: 32; 8 of many windows to a scoring service)"""
    device: str | None
    """cpu, cuda, cuda:N, or auto for several GPUs"""
    divergence: str | None
    """transformers: columns of a comparison: KL alone, or all, with the other direction, overlap and first choices
    (default: kl) (kl, all); llamacpp: columns of a comparison: always all of them (all); mlx: columns of a comparison:
    KL alone, or all, with the other direction, overlap and first choices (default: kl) (kl, all); vllm: columns of a
    comparison: KL alone, or all, with the other direction, overlap and first choices (default: kl) (kl, all)"""
    dtype: str | None
    """float32, bfloat16, float16, float64 (also fp32, bf16, …) or auto (default: auto; float32 on a CPU)"""
    enforce_eager: bool | None
    """no CUDA graphs, no compilation"""
    engine_args: Mapping[str, Plain] | Pairs | None
    """any other argument of vllm.LLM"""
    flash_attn: str | None
    """flash attention (default: off, because logits depend on the length of the batch with it)"""
    gpu_memory_utilization: float | None
    """share of a GPU's memory that vLLM may take"""
    head: str | None
    """logits in float32, or as the model rounds them"""
    head_kernel: str | None
    """fused, rows, blocked or plain (default: the fastest kernel that passes its self-test on this device)"""
    kv_cache_dtype: str | Sequence[str] | None
    """transformers: type of the K/V cache, with path="decode" (default: auto, the model's dtype) (auto, int8, int4,
    int2); mlx: type of the K/V cache, with path="decode" (default: auto, the model's dtype) (auto, int8, int4, int2);
    vllm: dtype of the KV cache, such as fp8"""
    kv_group_size: int | None
    """values of a quantized K/V cache that share a scale: 32, 64 or 128 (default: 64)"""
    max_model_len: int | None
    """default: the longest window of the plan"""
    max_num_batched_tokens: int | None
    """tokens in one forward pass"""
    n_batch: int | None
    """most tokens in one decode (default: 2048)"""
    n_gpu_layers: int | None
    """layers on a GPU (default: all that fit)"""
    n_ubatch: int | None
    """most tokens that are computed at once (default: 512)"""
    patience: float | None
    """seconds that a request is tried again when the server is busy, fails or is gone (default: 300); if given, also
    waits for a server that is starting"""
    pipeline_parallel_size: int | None
    """GPUs that the layers are divided among"""
    prefill_step_size: int | None
    """most tokens in one pass of a prefill (default: a window is one pass)"""
    quantization: str | None
    """quantization method, if the checkpoint does not declare one"""
    quantized_kv_start: int | None
    """tokens after which the K/V cache is quantized (default: 0; mlx-lm's command line has 5000)"""
    revision: str | None
    """branch, tag or commit of a model on the hub (default: main)"""
    tensor_p: bool | None
    """ExLlamaV3's own tensor parallelism over all visible GPUs"""
    tensor_parallel_size: int | None
    """GPUs that share every layer"""
    threads: int | None
    """threads of llama.cpp (default: all cores)"""
    timeout: float | None
    """seconds to wait for one answer (default: 600)"""
    token: str | None
    """access token for the hub (default: `HF_TOKEN`, or the one that `hf auth login` stored)"""
    trust_remote_code: bool | None
    """execute Python code shipped with the model; off unless given"""
