"""Which layers suffer most when a model is rounded to 4 bits, and what a mixture of 3, 4 and 6 bits gains.

Run it with: python examples/which_layer.py [MODEL]
"""

import sys

import scoremode as sm


def main(model: str = "smollm2-135m") -> None:
    question = {"corpus": "python-docs", "num_samples": 12, "context_length": 256, "max_windows": 8}
    try:
        found = sm.attribute(model, "rtn:4:32", **question)
    except sm.ScoremodeError as refused:  # as of a model without weights
        print(refused)
        return
    four = found[0]
    for one in sorted(four.units, key=lambda one: -found.kl(one).value)[:5]:
        print(f"{one.name:10} KL {found.kl(one)}")
    print("sum of parts over all weights together:", found.account(four).ratio)

    mixed = sm.attribute(model, "rtn:3:32", "rtn:4:32", "rtn:6:32", bits_budget=four.bits_per_weight, **question)
    assert mixed.recipe is not None
    print(mixed.recipe.verdict(mixed.cells))
    sm.report("layers.html", mixed)


if __name__ == "__main__":
    main(*sys.argv[1:])
