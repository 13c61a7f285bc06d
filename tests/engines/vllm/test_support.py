"""What is refused before anything is started, and what is read from a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, find_engine
from scoremode.engines.vllm import plugin, support
from scoremode.engines.vllm.processes import VllmLog
from scoremode.engines.vllm.start import can_plan_ahead, choose_dtype
from scoremode.engines.vllm.support import LaunchArguments, VllmOptions
from scoremode.errors import ModelError, OptionError


@pytest.mark.parametrize(
    ("arguments", "alternative"),
    [
        ({"data_parallel_size": 2}, "scoremode serve MODEL --data-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "tensor-parallel-size"),
        ({"kv_sharing_fast_prefill": True}, "leave kv_sharing_fast_prefill out"),
        ({"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 2}, "mp"),
        ({"runner": "generate"}, "leave runner out"),
        ({"logits_processors": ["a.b"]}, "leave logits_processors out"),
        ({"logprobs_mode": "processed_logits"}, "leave logprobs_mode out"),
    ],
)
def test_what_breaks_pooling_is_refused_with_an_alternative(arguments: dict[str, Any], alternative: str) -> None:
    with pytest.raises(OptionError, match=alternative):
        LaunchArguments.named(arguments).arguments()
    LaunchArguments.named({"logits_processors": None, "logprobs_mode": "raw_logprobs"}).arguments()


@pytest.mark.parametrize("version", ["0.24.0", "0.28.3", "0.32.0", "0.32.0+cpu", "0.23.1", "0.33.0", "1.0.0", "0.9.2"])
def test_versions_that_were_not_tested_are_refused_unless_allowed(version: str) -> None:
    support.check_version(version, allow_untested=True)
    if version[:4] in ("0.24", "0.28", "0.32"):
        support.check_version(version, allow_untested=False)
    else:
        with pytest.raises(ModelError, match="--allow-untested"):
            support.check_version(version, allow_untested=False)


def test_options_become_arguments_and_the_plans_longest_window_the_models_length() -> None:
    given = VllmOptions(tensor_parallel_size=2, kv_cache_dtype="fp8", engine_args=(("max_num_seqs", 7),))
    options = LaunchArguments.for_work(given, Work(longest=2048, shares_prompts=True))
    assert options.prefix_caching
    arguments = options.arguments()
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["max_num_seqs"] == 7
    assert arguments["max_model_len"] == 2048
    assert LaunchArguments.for_work(VllmOptions(max_model_len=99), Work(longest=2048)).max_model_len == 99


def test_a_log_tells_the_cause_and_running_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v.log"
    monkeypatch.setenv("SCOREMODE_VLLM_LOG", str(path))
    path.write_text(
        "(EngineCore pid=1) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    log = VllmLog()
    assert log.cause() == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert log.ran_out_of_memory()
    path.write_text("ValueError: Unsupported quantization\n")
    assert log.cause() == "ValueError: Unsupported quantization"
    assert not log.ran_out_of_memory()
    for said, cause in ((" (exit code: -4)", " of SIGILL"), (" (exit code: None)", ""), ("", "")):
        path.write_text(f"ERROR Worker proc VllmWorker-0 died unexpectedly{said}, …\nRuntimeError: cancelled\n")
        assert log.cause() == f"a worker process died{cause}"


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_bfloat16_is_refused_on_an_arm_cpu_without_it(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would die of an illegal instruction, in the middle of its first batch."""
    monkeypatch.setattr(support, "has_bfloat16_instructions", lambda: False)
    with pytest.raises(OptionError, match="bfloat16 with instructions that this CPU does not have"):
        support.check_bfloat16_on_cpu(dtype)
    support.check_bfloat16_on_cpu("float32")
    monkeypatch.setattr(support, "has_bfloat16_instructions", lambda: True)
    support.check_bfloat16_on_cpu(dtype)


@pytest.mark.parametrize(("bits", "dtype"), [(4, "bfloat16"), (8, "float32"), (None, "float32")])
def test_int4_weights_are_served_in_bfloat16_on_a_cpu(tmp_path: Path, bits: int | None, dtype: str) -> None:
    """vLLM's kernel for them does not support float32; everything else stays in float32."""
    weights = {"num_bits": bits, "type": "int"}
    quantized = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    config = {"model_type": "llama", **({"quantization_config": quantized} if bits else {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert choose_dtype(str(tmp_path), on_cpu=True, trust_remote_code=False) == dtype


def test_variables_that_choose_kernels_are_part_of_what_a_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command with a different value gives different numbers, and must not find the stored ones."""
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    subject = choose("table:uniform").subject
    settings = find_engine("vllm").settings(subject, VllmOptions())
    assert settings["VLLM_CPU_INT4_W4A8"] == "0"
    assert "secret" not in settings.values()


@pytest.mark.parametrize(
    ("arguments", "ahead"),
    [
        ({}, True),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, True),
        ({"tensor_parallel_size": 2}, False),  # vLLM may choose Ray, and would refuse to start
        ({"pipeline_parallel_size": 2}, False),
        ({"distributed_executor_backend": "ray"}, False),
    ],
)
def test_batches_are_planned_ahead_where_the_executor_is_known_to_allow_it(
    arguments: dict[str, Any], ahead: bool
) -> None:
    assert can_plan_ahead(arguments) is ahead


@pytest.mark.parametrize("already", [None, "", "MINE", "MINE,SCOREMODE_VLLM"])
def test_the_switch_is_among_the_variables_that_vllm_copies_to_workers_of_ray(
    already: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of vLLM itself: without this, workers on other machines would embed instead of score."""
    ray_env = pytest.importorskip("vllm.ray.ray_env", reason="needs vLLM")
    monkeypatch.setenv(plugin.SWITCH, "1")
    if already is not None:
        monkeypatch.setenv(support.RAY_COPIES, already)
    wanted = {plugin.SWITCH} | ({"MINE"} if already and "MINE" in already else set())
    with support.environment(support.copied_to_ray(plugin.SWITCH), {}):
        copied = ray_env.get_env_vars_to_copy()
    assert wanted <= copied
    assert plugin.PARENT not in copied, "a process id means nothing on another machine"
