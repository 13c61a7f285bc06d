# /// script
# requires-python = ">=3.11"
# dependencies = ["scoremode"]
# ///
"""Which is the smallest quantization that is good enough? One file, for a rented machine that has nothing but uv.

    uv run compare_quantizations.py org/model-GGUF:BF16 'org/model-GGUF:*' --kl 0.01
    uv run compare_quantizations.py org/model model-Q4_K_M.gguf model-Q5_K_M.gguf --corpus wikitext2 --out results

``org/model-GGUF:*`` is every quantization of a repository. Each is fetched, scored and removed before the next, the
smallest first. With ``--out``, an interrupted command goes on where it ended. From a checkout, before scoremode is
released: ``python examples/compare_quantizations.py``.
"""

from __future__ import annotations

import argparse
import math
import sys

import scoremode as sm
from scoremode.errors import CandidatesError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", help="the original, or the largest quantization")
    parser.add_argument("candidates", nargs="+", help="files, names on the hub, or patterns of them")
    parser.add_argument("--corpus", help="the text (default: 20 short documents)")
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--kl", type=float, default=0.01, help="the mean KL that is allowed, in nats (default: 0.01)")
    parser.add_argument("--out", help="keep the runs in this folder")
    parser.add_argument("--report", default="quantizations.html", help="where the page is written")
    given = parser.parse_args()

    failed = 0
    question = {"corpus": given.corpus, "context_length": given.context_length}
    asked = {name: value for name, value in question.items() if value is not None}
    try:
        found = list(sm.compare(given.baseline, *given.candidates, out=given.out, **asked))
    except CandidatesError as error:  # the others are finished
        print(error, file=sys.stderr)
        found, failed = list(error.found.values()), 2
    except sm.ScoremodeError as error:
        print(error, file=sys.stderr)
        return 2
    good = []
    for one in sorted(found, key=lambda one: one.manifest.get("bytes") or math.inf):
        its = one.statistics()
        kl, high, size = its["kl_mean"], its["kl_mean_high"], one.manifest.get("bytes")
        shown = "unknown" if kl is None else f"{kl:.4f}"
        bound = "" if high is None else f" (95 %: at most {high:.4f})"
        print(f"{one.name:40} {f'{size / 1e9:8.3f} GB' if size else 'size unknown'}   KL {shown}{bound}")
        if kl is not None and (kl if high is None else high) <= given.kl:
            good.append(one.name)
    print(f"the smallest with KL up to {given.kl}: {good[0] if good else 'none'}")
    if found:
        sm.report(given.report, *found)
    return failed or (0 if good else 1)


if __name__ == "__main__":
    sys.exit(main())
