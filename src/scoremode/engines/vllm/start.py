"""Starts vLLM in score mode, or stock vLLM to generate text, with the right arguments and environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from scoremode.core.engine import base
from scoremode.core.plan.path import DecodePath
from scoremode.engines.vllm import plugin, support
from scoremode.engines.vllm.processes import Processes, VllmLog
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
    try:
        with processes.killed_by_signals():
            if options is None:
                llm = _start_writing(model, arguments, log)
            else:
                llm = _start_scoring(model, arguments, log, options, tokenizer)
    except BaseException:
        processes.kill()
        processes.wait(5)
        raise
    processes.started(llm)
    processes.watch(llm)
    return llm, processes


def _start_writing(model: str, arguments: dict[str, Any], log: VllmLog) -> Any:
    marks = {plugin.PARENT: str(os.getpid())}
    stages = arguments.get("pipeline_parallel_size", 1)
    defaults = cpu_defaults(stages * arguments.get("tensor_parallel_size", 1))
    with log.taking_output(), support.environment(marks, QUIET):
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        dtype = choose_dtype(model, on_cpu, bool(arguments.get("trust_remote_code")))
        chosen = {"dtype": dtype, "use_tqdm_on_load": False} | arguments
        if on_cpu:
            support.check_bfloat16_on_cpu(chosen["dtype"])
            chosen.setdefault("enforce_eager", _is_eager_on_cpu(stages))
        with (
            support.environment({}, defaults if on_cpu else {}),
            plugin.guarded_start(),
            log.explaining(f"vLLM cannot start {model}", ModelError),
        ):
            return LLM(model=model, **chosen)


def _is_eager_on_cpu(stages: int) -> bool:
    """Compiling takes longer than most runs, but pipeline stages need the buffers of the compiler's warm-up."""
    return stages == 1


def _start_scoring(
    model: str, arguments: dict[str, Any], log: VllmLog, options: LaunchArguments, tokenizer: bool
) -> Any:
    marks = {plugin.SWITCH: "1", plugin.PARENT: str(os.getpid())}
    marks |= support.plugin_filter() | support.copied_to_ray(plugin.SWITCH)
    with log.taking_output(), support.environment(marks, QUIET):
        from vllm import LLM
        from vllm.platforms import current_platform

        plugin.register()  # this process may have loaded its plugins before score mode was turned on
        _forget_model_classes()
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            support.check_int4_on_cpu(quantization_of(model, options.trust_remote_code))
        arguments = {"dtype": choose_dtype(model, on_cpu, options.trust_remote_code)} | arguments
        if on_cpu:
            support.check_bfloat16_on_cpu(arguments["dtype"])
            arguments.setdefault("enforce_eager", _is_eager_on_cpu(options.pipeline_parallel_size))
        elif options.path is None and can_plan_ahead(arguments):
            # vLLM plans the next batch while this one runs. For pooling models this is off by default
            arguments.setdefault("async_scheduling", True)
        runner = runner_arguments(options.path, arguments.pop("hf_overrides", {}))
        settings = {
            "exact": options.head == "exact",
            "head_bytes": options.head_bytes,
            "head_kernel": options.head_kernel,
            "whole_divergence": options.divergence == "all",
            "step_keeper": options.step_keeper,
        }
        try:
            with (
                support.environment({}, device_defaults(on_cpu, options)),
                plugin.guarded_start(),
                log.explaining(f"vLLM cannot start {model}", ModelError),
            ):
                return LLM(
                    model=model,
                    skip_tokenizer_init=not tokenizer,
                    enable_prefix_caching=options.prefix_caching,  # explicit: the default differs by architecture
                    additional_config={KEY: settings},
                    **({"use_tqdm_on_load": False, "enable_chunked_prefill": True} | arguments | runner),
                )
        finally:
            _forget_model_classes()


def runner_arguments(path: DecodePath | None, hf_overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``vllm.LLM`` that choose its runner, and connect it with our code in its workers."""
    if path is None:
        from vllm.config import PoolerConfig

        return {
            "runner": "pooling",
            "convert": "embed",
            # pooling heads default to float32, which a quantized head refuses and a CPU casts at every call
            "hf_overrides": {"head_dtype": "model", **hf_overrides},
            "pooler_config": PoolerConfig(task="token_classify", seq_pooling_type="LAST", tok_pooling_type="ALL"),
        }
    replay = "scoremode.engines.vllm.replay"
    return {
        "runner": "generate",
        "hf_overrides": dict(hf_overrides),
        "max_num_seqs": path.sequences,
        "logits_processors": [f"{replay}:ReplayProcessor"],
        "worker_extension_cls": f"{replay}.ReplayWorker",
    }


def can_plan_ahead(arguments: dict[str, Any]) -> bool:
    """Does the executor that vLLM will choose support asynchronous scheduling? If not, vLLM would refuse to start."""
    ranks = int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))
    backend = arguments.get("distributed_executor_backend")
    return backend == "mp" or (ranks == 1 and backend is None)


def choose_dtype(model: str, on_cpu: bool, trust_remote_code: bool) -> str:
    """Returns the dtype in which vLLM would serve this checkpoint.

    By default the pooling runner casts float32 checkpoints to float16, but the serving runner casts them to bfloat16.
    On a CPU float32 is not changed: most CPUs have no fast bfloat16, and float32 is more exact.
    """
    config = _config_of(model, trust_remote_code)
    if config is None:
        return "float32" if on_cpu else "bfloat16"
    if on_cpu:
        return "bfloat16" if _needs_bfloat16_on_cpu(config) else "float32"
    text = config.get_text_config()
    said = str(getattr(text, "dtype", None) or getattr(config, "dtype", None)).removeprefix("torch.")
    return said if said in ("bfloat16", "float16") else "bfloat16"


def quantization_of(model: str, trust_remote_code: bool) -> Any:
    """Returns the ``quantization_config`` of a checkpoint; None if it has none, or if Transformers cannot read it."""
    return getattr(_config_of(model, trust_remote_code), "quantization_config", None)


def _config_of(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception:  # vLLM knows more formats, and gives a better error message
        return None


def _needs_bfloat16_on_cpu(config: Any) -> bool:
    """Is bfloat16 needed? vLLM's kernels for int4 weights and, with AMX, int8 activations do not support float32."""
    import torch

    quantization = getattr(config, "quantization_config", None)
    int4 = any(support.is_integer(scheme.get("weights"), 4) for scheme in support.schemes_of(quantization) or ())
    return int4 or (support.is_w8a8(quantization) and bool(torch.cpu._is_amx_tile_supported()))


def device_defaults(on_cpu: bool, options: LaunchArguments) -> dict[str, str]:
    defaults: dict[str, str] = {}
    if support.version_numbers(support.installed_version()) < (0, 32):
        # in older versions the V2 model runner can only embed, and never calls a pooler
        defaults[support.SECOND_RUNNER] = "0"
    if on_cpu:
        defaults |= cpu_defaults(options.tensor_parallel_size * options.pipeline_parallel_size)
    return defaults


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
    with contextlib.suppress(ImportError):
        from vllm.model_executor.model_loader import utils

        getattr(utils, "_MODEL_ARCH_BY_HASH", {}).clear()
