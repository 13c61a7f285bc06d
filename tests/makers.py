"""Small checkpoints made on the spot, so that tests need no download."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scoremode.core.engine.registry import choose
from scoremode.core.plan.question import Question
from scoremode.core.verbs.planned import PlannedQuestion, plan_question

# for the first line of a process: a suite that runs in the background has SIGINT ignored, one under nohup SIGHUP, and
# both hand that on
OBEY_INTERRUPTS = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
)

TRITON = Path(__file__).resolve().parents[1] / ".venv-triton"  # where `make test` puts it, unless told otherwise


def with_triton() -> dict[str, str]:
    """The environment of a process that finds Triton: in this environment or in a folder of its own. Skips without."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if importlib.util.find_spec("triton") is not None:
        return environment
    folder = Path(os.environ.get("SCOREMODE_TRITON", TRITON))
    if not (folder / "triton").is_dir():
        pytest.skip("needs Triton")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "In 1999 there were 12345 cats; naïve people said “déjà-vu” about 東京.",
    "A model is a function from tokens to distributions over tokens.\n\nNothing more.",
]
VOCABULARY = 311  # not a multiple of anything


def make_tokenizer(folder: Path, *, adds_bos: bool, size: int = VOCABULARY) -> Any:
    """A byte-level BPE tokenizer trained on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 10, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_tiny_model(folder: Path, *, adds_bos: bool, **changes: Any) -> Path:
    """A seeded Llama whose weights are large enough that its predictions are peaked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder, adds_bos=adds_bos)
    config = LlamaConfig(
        **{
            **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 128},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.4, "tie_word_embeddings": False},
            **changes,
        }
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_successor_model(folder: Path, size: int = 64) -> Path:
    """Embeddings are unit vectors, the layers add nothing, and the head's row v answers to token v - 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": size, "hidden_size": size, "intermediate_size": 16, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(100 * torch.eye(size).roll(1, dims=0))
    model.save_pretrained(folder)
    return folder


def make_small_llama(folder: Path, vocabulary: int = 1003) -> Path:
    """4 heads of 64, which divide by 2 and by 4, peaked predictions, and a vocabulary that vLLM must pad."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 1024}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25 if "lm_head" in name else 0.08)
    model.save_pretrained(folder)
    return folder


def make_family(kind: str, hidden: int = 32) -> Any:
    """Seeded models whose heads differ: a cap, a divisor, a factor, a bias."""
    import transformers as t

    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48, "initializer_range": 0.3}
    if kind == "gemma2":
        caps: dict[str, Any] = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None, "sliding_window": 8}
        return t.Gemma2ForCausalLM(t.Gemma2Config(**common, **heads, **caps, head_dim=hidden // 2))
    if kind == "granite":
        return t.GraniteForCausalLM(t.GraniteConfig(**common, **heads, logits_scaling=4.0))
    if kind == "cohere":
        return t.CohereForCausalLM(t.CohereConfig(**common, **heads, logit_scale=0.25))
    if kind == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": 2, "n_head": 2, "n_positions": 64}
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, **sizes, initializer_range=0.3))
    if kind == "phi":
        model = t.PhiForCausalLM(t.PhiConfig(**common, **{**heads, "num_key_value_heads": 2}))
        torch.nn.init.normal_(model.lm_head.bias)
        return model
    raise AssertionError(kind)


def ask(model: str, *, engine: str | None = None, **question: Any) -> PlannedQuestion:
    """A question to the model of that name, as the verbs make it."""
    return plan_question(choose(model, engine).subject, Question(**question))


class Phases:
    """A progress that remembers the words of its phases, and how much is done."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.done = 0

    def __call__(self, done: int, total: int, /) -> None:
        self.done = done

    def phase(self, words: str) -> None:
        self.words.append(words)


def make_deep_model(folder: Path, **changes: Any) -> Path:
    """A seeded Llama of six layers, whose layers add about as much as trained ones, for profiles by layer."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "initializer_range": 0.08}
    return make_tiny_model(folder, adds_bos=False, **{**sizes, **changes})


def with_changed_tensors(folder: Path, copy: Path, change: Callable[[str, Any], Any]) -> Path:
    """A copy of a checkpoint of one file, with every tensor as ``change(name, tensor)`` returns it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, copy, dirs_exist_ok=True)
    file = copy / "model.safetensors"
    changed = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    return copy


def make_mixture(folder: Path, **changes: Any) -> Path:
    """A seeded Mixtral of three layers and four experts, of which a token has two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    make_tokenizer(folder, adds_bos=False)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    more = {"max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(3)
    MixtralForCausalLM(MixtralConfig(**{**sizes, **heads, **more, **changes})).save_pretrained(folder)
    return folder


def checkpoint_maker() -> Callable[[str, Path, str], Path]:
    """``make(model, folder, name)`` from the example script, which writes compressed-tensors checkpoints."""
    script = Path(__file__).resolve().parents[1] / "examples" / "make_checkpoints.py"
    spec = importlib.util.spec_from_file_location("make_checkpoints", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make: Callable[[str, Path, str], Path] = module.make
    return make
