"""A release gate: exit code 1 if a quantized model has surely lost more than 1 % of its original's accuracy.

    python examples/release_gate.py ORIGINAL CANDIDATE --tasks arc_easy,hellaswag,piqa
    python examples/release_gate.py ORIGINAL CANDIDATE --tasks arc_easy --task-data rows/ --report gate.html

"Surely" means that the upper 95 % bound of recovery lies below the limit. A small loss that few documents cannot show
passes, and is printed with its bounds: ask more documents to be sure. The same as one command:

    scoremode tasks ORIGINAL CANDIDATE --tasks … --fail-if "recovery < 0.99 surely"
"""

from __future__ import annotations

import argparse
import sys

import scoremode as sm


def main() -> int:
    parser = argparse.ArgumentParser(description="Fail a release that has surely lost accuracy.")
    parser.add_argument("original")
    parser.add_argument("candidate")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--task-data", help="folder with local data")
    parser.add_argument("--limit", type=int, help="only the first documents of each task")
    parser.add_argument("--recovery", type=float, default=0.99, help="the least that is allowed (default: 0.99)")
    parser.add_argument("--report", help="write the HTML report there")
    given = parser.parse_args()

    try:
        found = sm.tasks(
            given.original, given.candidate, tasks=given.tasks, task_data=given.task_data, limit=given.limit
        )[0]
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
