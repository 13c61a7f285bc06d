"""Perplexity of a short text by two methods, and the tokens that the model expected least.

Run it with: python examples/perplexity.py [MODEL]
"""

import sys

import scoremode as sm

TEXT = """The quick brown fox jumps over the lazy dog. The dog does not mind, because it has seen the fox before.
In the evening both of them lie down beside the river, and the river goes on as rivers do."""


def main(model: str = "smollm2-135m") -> None:
    for method, settings in (("sliding-once", {"stride": 16}), ("gptq", {})):
        run = sm.ppl(model, text=TEXT, method=method, context_length=32, **settings)
        print(f"{method:13} perplexity {run.perplexity}  from {len(run.scores)} targets, plan {run.plan_digest[:8]}")

    run = sm.ppl(model, text=TEXT)
    print("\nleast expected:")
    for i in run.scores.logprob.argsort(kind="stable")[:5]:
        print(f"  {run.facts.text[i]!r:12} logprob {run.scores.logprob[i]:7.2f}  rank {run.scores.rank[i]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
