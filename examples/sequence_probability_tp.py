"""P(answer | question) with the model cut over several devices: only a few numbers a token cross between them.

    python examples/sequence_probability_tp.py MODEL --tensor-parallel-size 2
    python examples/sequence_probability_tp.py                          the embedded model, one process

The heads of the model must divide by the size: the embedded smollm2-135m has 9, so 3 works and 2 does not. Float32
agrees between sizes to about 1e-5 nats; lower precision does not, and ``scoremode noise`` says by how much.

Needs vLLM beside scoremode: see docs/vllm.md.
"""

from __future__ import annotations

import argparse

import scoremode as sm

QUESTIONS = {
    "The capital of France is": [" Paris", " London", " Berlin"],
    "The opposite of hot is": [" cold", " warm", " blue"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", help="default: the checkpoint's own on a GPU, float32 on a CPU")
    parser.add_argument("--max-model-len", type=int, default=512, help="the longest prompt and answer, in tokens")
    given = parser.parse_args()

    with sm.SequenceProbability(
        given.model,
        engine="vllm",
        dtype=given.dtype,
        tensor_parallel_size=given.tensor_parallel_size,
        max_model_len=given.max_model_len,
    ) as lm:
        prompts = [prompt for prompt, answers in QUESTIONS.items() for _ in answers]
        results = lm.get_log_prob(prompts, [answer for answers in QUESTIONS.values() for answer in answers])
        facts = lm.engine.facts
    for r in results:
        print(f"{r.prompt}{r.target:9} log_prob {r.log_prob:9.5f}  prob {r.prob:.4g}")
    print(f"tensor parallel size {given.tensor_parallel_size}, {facts.dtype}, head {facts.head}, {facts.device}")


if __name__ == "__main__":
    main()
