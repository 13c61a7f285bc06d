"""Which answer does the model prefer? P(answer | question) for several answers; the prompt is fed only once.

Run it with: python examples/sequence_probability.py [MODEL]
"""

import sys

import scoremode as sm

QUESTIONS = {
    "The capital of France is": ["Paris", "London", "Berlin"],
    "The opposite of hot is": ["cold", "warm", "blue"],
}


def main(model: str = "smollm2-135m") -> None:
    lm = sm.SequenceProbability(model, leading_space="add")
    for prompt, answers in QUESTIONS.items():
        results = lm.get_log_prob(prompt, answers)
        total = sum(r.prob for r in results)
        print(prompt)
        for r in sorted(results, key=lambda r: -r.log_prob):
            print(f"  {r.target:8} log_prob {r.log_prob:8.4f}  share {r.prob / total:6.1%}  boundary {r.boundary}")


if __name__ == "__main__":
    main(*sys.argv[1:])
