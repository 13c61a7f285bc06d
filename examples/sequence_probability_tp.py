"""P(answer | question) with the model split over several devices, which exchange only a few numbers per token.

    python examples/sequence_probability_tp.py MODEL --tensor-parallel-size 2
    python examples/sequence_probability_tp.py                          the embedded model, one process

The size must divide the number of attention heads: the embedded smollm2-135m has 9, so 3 works and 2 does not. In
float32, different sizes agree to about 1e-5 nats. In lower precision they do not;
``scoremode paths --vary noise`` measures it.

Needs vLLM: see docs/vllm.md.
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
