"""A GGUF file before llama.cpp opens it: its header, and its own tokenizer."""

from __future__ import annotations

import hashlib
import json
import math

from scoremode.disk.files import remembered_sha256
from scoremode.engines.llamacpp.tokenizer import LlamaTokenizer
from scoremode.errors import ModelError
from scoremode.models.gguf import GgufFacts, read_gguf
from scoremode.models.subject import Subject
from scoremode.text.tokenizer import HuggingFaceTokenizer, TextTokenizer


def gguf_subject(model: str, tokenizer: str | None) -> Subject:
    """What is known of a GGUF file before it is opened."""
    facts = read_gguf(model)
    _require_sound(facts)
    files = {path.name: remembered_sha256(path) for path in facts.files}
    sizes = facts.sizes
    return Subject(
        name=model,
        tokenizer=_tokenizer(facts, tokenizer),
        fingerprint=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        vocabulary=facts.vocabulary or facts.number("vocab_size"),
        context_length=facts.number("context_length"),
        hidden_size=facts.number("embedding_length"),
        dtype=facts.quantization,
        weight_bytes=sizes.bytes,
        bits_per_weight=sizes.bits_per_weight,
        files=files,
        format=f"GGUF {facts.quantization}",
        sizes=sizes,
    )


def _require_sound(facts: GgufFacts) -> None:
    """Refuse numbers in a header with which llama.cpp would end the process."""
    layers = facts.values.get(f"{facts.architecture}.block_count")
    if isinstance(layers, int) and not 0 < layers <= len(facts.tensors):
        raise ModelError(
            f"{facts.files[0]} has {len(facts.tensors)} tensors, and its header says {layers} layers",
            fix="download it again",
        )
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        epsilon = facts.values.get(f"{facts.architecture}.{key}", 0.0)
        if not isinstance(epsilon, float) or not 0 <= epsilon < math.inf:  # written so that NaN is refused
            raise ModelError(f"{facts.files[0]} gives {epsilon} as its {key}", fix="download it again")


def _tokenizer(facts: GgufFacts, other: str | None) -> TextTokenizer:
    if other is not None:
        return HuggingFaceTokenizer.load(other)
    template = facts.values.get("tokenizer.chat_template")
    return LlamaTokenizer(facts.files[0], template if isinstance(template, str) else None)
