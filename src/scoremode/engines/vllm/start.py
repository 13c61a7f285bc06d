"""Starts vLLM in score mode, or stock vLLM to generate text, with the right arguments and environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from scoremode.core.engine import base
from scoremode.engines.vllm import plugin, support
from scoremode.engines.vllm.processes import Processes, VllmLog, end_openmp_threads
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.engines.vllm.wire import KEY
from scoremode.errors import ModelError

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # in the processes that vLLM starts
}
KV_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB; by default, vLLM on a CPU takes almost all memory, or does not start


def start(
    model: str,
    arguments: dict[str, Any],
    log: VllmLog,
    options: LaunchArguments | None = None,
    *,
    tokenizer: bool = True,
) -> tuple[Any, Processes]:
    """Starts ``vllm.LLM``, in score mode if there are ``options``, else to generate text. Also returns its processes.

    If vLLM refuses to start, the error has one line. After an error or an interruption, none of its processes is left.
    """
    base.may_hang_at_exit = True
    processes = Processes()
    marks = {plugin.PARENT: str(os.getpid())}
    if options is not None:
        marks |= {plugin.SWITCH: "1", **support.plugin_filter(), **support.copied_to_ray(plugin.SWITCH)}
    try:
        with processes.killed_by_signals(), log.taking_output(), support.environment(marks, QUIET):
            llm = _start(model, arguments, log, options, tokenizer)
    except BaseException:
        processes.kill()
        processes.wait(5)
        raise
    processes.started(llm)
    return llm, processes


def _start(
    model: str, arguments: dict[str, Any], log: VllmLog, options: LaunchArguments | None, tokenizer: bool
) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu, trusted = current_platform.is_cpu(), bool(arguments.get("trust_remote_code"))
    arguments = {"dtype": choose_dtype(model, on_cpu, trusted), "use_tqdm_on_load": False} | arguments
    defaults = cpu_defaults(ranks_of(arguments)) if on_cpu else {}
    if on_cpu:
        support.check_int4_on_cpu(quantization_of(model, trusted))
        support.check_bfloat16_on_cpu(arguments["dtype"])
        # compiling takes longer than most runs, but pipeline stages need the buffers of the compiler's warm-up
        arguments.setdefault("enforce_eager", arguments.get("pipeline_parallel_size", 1) == 1)
    if options is not None:
        plugin.register()  # this process may have loaded its plugins before score mode was turned on
        if not on_cpu and options.path is None and can_plan_ahead(arguments):
            # vLLM plans the next batch while this one runs. For pooling models this is off by default
            arguments.setdefault("async_scheduling", True)
        arguments = scoring_arguments(arguments, options, tokenizer)
        defaults = defaults | runner_defaults()
    _forget_model_classes()
    try:
        end_openmp_threads()
        with (
            support.environment({}, defaults),
            plugin.guarded_start(),
            log.explaining(f"vLLM cannot start {model}", ModelError),
        ):
            return LLM(model=model, **arguments)
    finally:
        _forget_model_classes()


def scoring_arguments(arguments: dict[str, Any], options: LaunchArguments, tokenizer: bool) -> dict[str, Any]:
    """Adds the arguments of ``vllm.LLM`` that choose its runner, and connect it with our code in its workers."""
    settings = {
        "exact": options.head != "as-served",
        "head_bytes": options.head_bytes,
        "head_kernel": options.head_kernel,
        "whole_divergence": options.divergence == "all",
        "step_keeper": options.step_keeper,
    }
    overrides = arguments.get("hf_overrides", {})
    additions: dict[str, Any] = {
        "skip_tokenizer_init": not tokenizer,
        "enable_prefix_caching": options.prefix_caching,  # explicit: the default differs by architecture
        "additional_config": {KEY: settings},
    }
    if options.path is None:
        from vllm.config import PoolerConfig

        additions |= {
            "runner": "pooling",
            "convert": "embed",
            # pooling heads default to float32, which a quantized head refuses and a CPU casts at every call
            "hf_overrides": {"head_dtype": "model", **overrides},
            "pooler_config": PoolerConfig(task="token_classify", seq_pooling_type="LAST", tok_pooling_type="ALL"),
        }
    else:
        replay = "scoremode.engines.vllm.replay"
        additions |= {
            "runner": "generate",
            "hf_overrides": dict(overrides),
            "max_num_seqs": options.path.sequences,
            "logits_processors": [f"{replay}:ReplayProcessor"],
            "worker_extension_cls": f"{replay}.ReplayWorker",
        }
    return {"enable_chunked_prefill": True, **arguments, **additions}


def ranks_of(arguments: Mapping[str, Any]) -> int:
    """The number of processes that share one model."""
    return math.prod(int(arguments.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline"))


def can_plan_ahead(arguments: Mapping[str, Any]) -> bool:
    """Does the executor that vLLM will choose support asynchronous scheduling? If not, vLLM would refuse to start."""
    backend = arguments.get("distributed_executor_backend")
    return backend == "mp" or (ranks_of(arguments) == 1 and backend is None)


def choose_dtype(model: str, on_cpu: bool, trust_remote_code: bool) -> str:
    """Returns the dtype in which vLLM would serve this checkpoint.

    By default the pooling runner casts float32 checkpoints to float16, but the serving runner casts them to bfloat16.
    On a CPU float32 is not changed: most CPUs have no fast bfloat16, and float32 is more exact.
    """
    config = _config_of(model, trust_remote_code)
    if config is None:
        return "float32" if on_cpu else "bfloat16"
    if on_cpu:
        import torch

        quantization = getattr(config, "quantization_config", None)
        # vLLM's kernels for int4 weights and, with AMX, int8 activations do not support float32
        int4 = any(support.is_integer(scheme.get("weights"), 4) for scheme in support.schemes_of(quantization) or ())
        needs_bfloat16 = int4 or (support.is_w8a8(quantization) and torch.cpu._is_amx_tile_supported())
        return "bfloat16" if needs_bfloat16 else "float32"
    text = config.get_text_config()
    dtype = str(getattr(text, "dtype", None) or getattr(config, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else "bfloat16"


def quantization_of(model: str, trust_remote_code: bool) -> Any:
    """Returns the ``quantization_config`` of a checkpoint; None if it has none, or if Transformers cannot read it."""
    return getattr(_config_of(model, trust_remote_code), "quantization_config", None)


def _config_of(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception:  # vLLM knows more formats, and gives a better error message
        return None


def runner_defaults() -> dict[str, str]:
    """The variable that chooses vLLM's first runner for scoring: before 0.32, the second one never calls a pooler."""
    is_old = support.version_numbers(support.installed_version()) < (0, 32)
    return {support.SECOND_RUNNER: "0"} if is_old else {}


def cpu_defaults(ranks: int) -> dict[str, str]:
    if ranks == 1:
        return KV_CACHE
    return KV_CACHE | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding fails if there are fewer cores than vLLM wants
        # ranks spin while they wait for each other, so more threads than cores would waste most of the time
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }


def _forget_model_classes() -> None:
    """Clears vLLM's cache of model classes. Otherwise it would use a class made for scoring to embed, or vice versa."""
    from vllm.model_executor.model_loader import utils

    utils._MODEL_ARCH_BY_HASH.clear()
