"""A release gate: exit code 1 if a quantized model has surely lost more than 1 % of its original's accuracy.

    scoremode lm-eval --tasks arc_easy,piqa --model_args model=ORIGINAL --output_path logs/original --log_samples
    scoremode lm-eval --tasks arc_easy,piqa --model_args model=CANDIDATE --output_path logs/candidate --log_samples
    python examples/release_gate.py logs/original logs/candidate --report gate.html

"Surely" means that the upper 95 % bound of recovery lies below the limit. A small loss that few documents cannot show
passes, and is printed with its bounds: ask more documents to be sure. The same as one command:

    scoremode tasks logs/original logs/candidate --fail-if "recovery < 0.99 surely"
"""

from __future__ import annotations

import argparse
import sys

import scoremode as sm


def main() -> int:
    parser = argparse.ArgumentParser(description="Fail a release that has surely lost accuracy.")
    parser.add_argument("original", help="folder that lm-eval wrote with --log_samples")
    parser.add_argument("candidate", help="the same of the quantized model")
    parser.add_argument("--tasks", help="only these tasks and groups")
    parser.add_argument("--recovery", type=float, default=0.99, help="the least that is allowed (default: 0.99)")
    parser.add_argument("--report", help="write the HTML report there")
    given = parser.parse_args()

    try:
        found = sm.tasks(given.original, given.candidate, tasks=given.tasks)[0]
    except sm.ScoremodeError as error:
        print(error, file=sys.stderr)
        return 2
    for row in found.rows:
        low, high = row["recovery_low"], row["recovery_high"]
        bounds = f"95 %: {low:.4f} to {high:.4f}" if high is not None else "too few documents for bounds"
        value = "undefined" if row["recovery"] is None else f"{row['recovery']:.4f}"
        print(f"{row['name']:24} recovery {value} ({bounds}), {row['lost_documents']} lost")
    if given.report:
        sm.report(given.report, found)
    high = found.overall["recovery_high"]
    if high is None:
        print("the gate cannot be judged: ask at least five documents", file=sys.stderr)
        return 2
    if high < given.recovery:
        print(f"FAILED: recovery is surely below {given.recovery}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
