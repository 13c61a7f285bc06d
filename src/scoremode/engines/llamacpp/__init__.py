"""GGUF files as llama.cpp serves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.arguments import user_path
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, MemoryNeed, Placement, SelfTest, Work
from scoremode.core.plan.path import CHUNKED, PATHS
from scoremode.engines.llamacpp.llamacpp_options import LlamaCppOptions, LlamaCppParameters

if TYPE_CHECKING:
    from scoremode.core.models.subject import Subject
    from scoremode.engines.llamacpp.engine import LlamaCppEngine

USUAL_CONTEXT = 2048  # tokens that a context is opened for if the length of windows is not known


class LlamaCppPlugin(EnginePlugin):
    """The engine for a GGUF file, or a folder with one."""

    contract = 1
    name = "llamacpp"
    summary = "GGUF files as llama.cpp serves them"
    models = "a GGUF file"
    capabilities: ClassVar[Capabilities] = Capabilities.all(hidden_states=False, logits=True, paths=(*PATHS, CHUNKED))
    options = LlamaCppOptions
    packages = ("llama-cpp-python", "xllamacpp", "gguf")

    def problem(self) -> str | None:
        from scoremode.engines.llamacpp.library import how_to_install, installed

        return None if installed() else f"llama.cpp is not installed; {how_to_install()}"

    def claims(self, model: str) -> bool:
        from scoremode.core.models.names import reader_of

        path = user_path(model)
        if model.lower().endswith(".gguf") or reader_of(model) is not None:
            return True
        if not path.is_dir() or any(path.glob("*.safetensors")):
            return False
        from scoremode.core.models.gguf import gguf_models

        return bool(gguf_models(path))

    def subject(self, model: str, options: LlamaCppOptions, tokenizer: str | None) -> Subject:
        from scoremode.engines.llamacpp.gguf_subject import gguf_subject

        return gguf_subject(model, tokenizer)

    def settings(self, subject: Subject, options: LlamaCppOptions) -> dict[str, Any]:
        from scoremode.engines.llamacpp.library import library

        brought = f"{library().package} {library().version}"
        return {**options.identity(), **LlamaCppParameters.of(options).settings(), "library": brought}

    def open(self, subject: Subject, options: LlamaCppOptions, work: Work) -> LlamaCppEngine:
        from scoremode.core.models.gguf import read_gguf
        from scoremode.engines.llamacpp.engine import LlamaCppEngine

        longest = context_for(subject, work)
        return LlamaCppEngine(read_gguf(subject.name), subject.vocabulary or 0, options, longest, work.path)

    def memory_need(self, subject: Subject, options: LlamaCppOptions, work: Work) -> MemoryNeed:
        from scoremode.core.models.gguf import read_gguf
        from scoremode.engines.llamacpp.gguf_subject import cache_bytes, memory_of
        from scoremode.engines.llamacpp.library import library

        facts, choices = read_gguf(subject.name), LlamaCppParameters.of(options)
        size = super().memory_need(subject, options, work).size
        size += memory_of(facts, subject.vocabulary or 0, choices, work.longest or 0)
        may_offload = options.n_gpu_layers != 0 and library().call.llama_supports_gpu_offload()
        return MemoryNeed(size, None if may_offload else False, cache_bytes(facts, choices, work.cached_tokens))

    def chunked(self, options: LlamaCppOptions, tokens: int) -> LlamaCppOptions:
        return replace(options, n_ubatch=tokens, n_batch=max(tokens, LlamaCppParameters.of(options).n_batch))

    def placement(self, options: LlamaCppOptions) -> Placement:
        # a build for GPUs uses them without being asked: give --gpus-per-replica 1
        return Placement(on_gpus=bool(options.n_gpu_layers))

    def self_test(self, checkpoint: Path) -> SelfTest:
        from scoremode.engines.llamacpp.small_gguf import write_small_gguf

        file = write_small_gguf(checkpoint, checkpoint / "small.gguf")
        return SelfTest(str(file), {"cache_type_k": "f32", "cache_type_v": "f32"})  # the exact scores round neither


def context_for(subject: Subject, work: Work) -> int:
    """The tokens that a context is opened for."""
    return work.longest or min(subject.context_length or USUAL_CONTEXT, USUAL_CONTEXT)


PLUGIN = LlamaCppPlugin
