"""Train a small model, and log its exact validation perplexity and its KL from the start every few steps.

    python examples/training_loop.py                     # a tiny Llama on the text of Python's own documentation
    python examples/training_loop.py --steps 200 --every 50

``sm.wrap`` scores with the model in memory, between two steps: it is put into evaluation mode and back, and nothing is
copied. The reference has the hidden states of the model before training, so KL is exact, over the whole vocabulary.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import scoremode as sm
from scoremode.core.text.corpus import load


def small_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE with 1,024 tokens, learnt from the texts themselves."""
    learnt = ByteLevelBPETokenizer()
    learnt.train_from_iterator(texts, vocab_size=1024, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learnt._tokenizer)


def tiny_llama(vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=10, help="steps between two validations")
    given = parser.parse_args()

    topics = list(load("python-docs").texts())
    tokenizer = small_tokenizer(topics[:40])
    training = torch.tensor(tokenizer("\n\n".join(topics[20:40]))["input_ids"])
    question: Any = {"text": "\n\n".join(topics[:4])[:4000], "context_length": 128, "stride": 128}

    hf_model = tiny_llama(len(tokenizer))
    optimizer = torch.optim.AdamW(hf_model.parameters(), lr=3e-3)
    model = sm.wrap(hf_model, tokenizer, name="tiny llama")
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "before training"
        model.reference(reference, **question)
        for step in range(given.steps + 1):
            if step % given.every == 0:
                found = model.compare(reference).statistics()
                numbers = f"perplexity {found['ppl_candidate']:10.2f}  KL from the start {found['kl_mean']:.4f}"
                print(f"step {step:4}  {numbers}")
            hf_model.train()
            at = torch.randint(0, len(training) - 129, (8,)).tolist()
            batch = torch.stack([training[i : i + 129] for i in at])
            loss = hf_model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
