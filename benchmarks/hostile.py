"""Tests what a hostile user can do to scoremode: bad inputs from a table, and ``kill -9`` at random moments.

inputs   every row of tests/hostile/cases.py on the real command line, and every flag with numbers at the ends of their
         range or names that are not UTF-8: the right exit code, one line on standard error, no traceback, no hang, no
         file lost or changed
kills    ppl, prob, reference and compare, on a table and on a small Llama in Transformers, killed at moments drawn over
         the time that an undisturbed run takes, then repeated: results equal to the bit, no traceback, no wrong exit
         code, no process left behind
servers  every lie of tests/engines/server/lies.py, and honest servers, each so many times: what becomes of the runs
vllm     the same with vLLM, whose engine's processes are killed too: the mean within 1e-4 nats

    python benchmarks/hostile.py [--kills 100] [--servers [RUNS]] [--vllm [KILLS]] [--seed 0] [--inputs 0]
                                 [--only "ppl table"]

Exit code 1 if any check fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import say
from tests.hostile.cases import all_cases
from tests.hostile.harness import problems
from tests.hostile.inputs import Stock
from tests.hostile.kills import Assault, Figures, Job, model_jobs, table_jobs, vllm_job

TABLE_BYTES, MODEL_BYTES, VLLM_BYTES = 200_000, 40_000, 200_000  # length of the texts: seconds of scoring each
ALL = 1 << 30
COLUMNS = (
    *("seconds", "kills", "while_scoring", "ended_first"),
    *("wrong_numbers", "wrong_exits", "tracebacks", "orphans"),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--vllm", type=int, nargs="?", const=6, default=0, metavar="KILLS")
    parser.add_argument("--servers", type=int, nargs="?", const=20, default=0, metavar="RUNS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="jobs that are killed side by side (default: 2)")
    parser.add_argument("--inputs", type=int, default=ALL, metavar="CASES", help="so many of them; 0: none")
    parser.add_argument("--only", default="", metavar="WORDS", help="of the jobs that are killed, those of this name")
    parser.add_argument("--bytes", type=int, help="of text for each job (default: seconds of scoring)")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="hostile.") as name:
        folder = Path(name)
        os.environ["SCOREMODE_CACHE"] = str(folder / "cache")
        good = not given.inputs or run_inputs(folder / "inputs", given.inputs)
        if given.servers:
            good &= run_servers(given.servers)
        if given.kills:
            jobs = table_jobs(folder / "table", given.bytes or TABLE_BYTES)
            jobs += model_jobs(folder / "model", given.bytes or MODEL_BYTES)
            jobs = [job for job in jobs if given.only in job.name]
            good &= run_kills(jobs, given.kills, folder / "kills", given.seed, given.at_once)
        if given.vllm:
            job = vllm_job(folder / "vllm", given.bytes or VLLM_BYTES)
            good &= run_kills([job], given.vllm, folder / "vllm-kills", given.seed, 1)
    return 0 if good else 1


def run_inputs(folder: Path, most: int) -> bool:
    """Run the cases; print the failures, then the number of failures in each group."""
    stock = Stock.make(folder / "stock")
    cases, wrong, begun = all_cases(every=True)[:most], Counter[str](), time.monotonic()
    for number, case in enumerate(cases):
        found = problems(case, folder / str(number), stock)
        if found:
            wrong[case.group] += 1
            say(f"{case}\n    {'; '.join(found)}")
    counts = Counter(case.group for case in cases)
    print(f"{'inputs':<20}{'cases':>8}{'wrong':>8}")
    for group, count in sorted(counts.items()):
        print(f"{group:<20}{count:>8}{wrong[group]:>8}")
    print(f"{'all':<20}{len(cases):>8}{wrong.total():>8}   {time.monotonic() - begun:.0f} s\n", flush=True)
    return not wrong


def run_servers(runs: int) -> bool:
    """Let servers lie, and honest ones answer; print what became of each, and what an honest one did wrong."""
    from tests.conftest import DATA
    from tests.engines.server.lies import HONEST, LIES, Stories, is_good, outcome

    stories = Stories(DATA / "stories260K")
    text, good = stories.text(), True
    _, truth = outcome(stories, text)
    print(f"{'servers':<55}{'refused':>9}{'noted':>9}{'believed':>9}{'perplexity':>12}")
    for name in (*LIES, *HONEST):
        lie, how = LIES.get(name), HONEST.get(name, {})
        found = [outcome(stories, text, lie, first=1000 * run, **how) for run in range(runs)]
        ends = Counter(words.partition(":")[0] for words, _ in found)
        values = [value / truth for _, value in found if value > 0]
        print(f"{name:<55}{ends['refused']:>9}{ends['noted']:>9}{ends['another model']:>9}", end="")
        print(f"{sum(values) / len(values):>12.3f}" if values else f"{'':>12}", flush=True)
        good &= all(is_good(lie, *one, truth) for one in found) if lie else not ends["refused"]
    return good


def run_kills(jobs: list[Job], kills: int, folder: Path, seed: int, at_once: int) -> bool:
    """Distribute the kills over the jobs; print one line of figures for each."""
    shares = [kills // len(jobs) + (i < kills % len(jobs)) for i in range(len(jobs))]

    def attack(job: Job, share: int) -> Figures:
        figures = Assault(job, folder / job.name.replace(" ", "-"), seed).run(share, seconds=3600)
        for complaint in figures.complaints:
            say(f"{job.name}: {complaint}")
        return figures

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(attack, jobs, shares))
    print(f"{'kill -9':<20}" + "".join(f"{name.replace('_', ' '):>15}" for name in COLUMNS))
    for job, figures in zip(jobs, found, strict=True):
        print(f"{job.name:<20}" + "".join(f"{round(getattr(figures, name), 1):>15}" for name in COLUMNS), end="")
        print(f"   {figures.victims}" if len(job.victims) > 1 else "")
    totals = [round(sum(getattr(figures, name) for figures in found), 1) for name in COLUMNS[1:]]
    print(f"{'all':<20}{'':>15}" + "".join(f"{total:>15}" for total in totals) + "\n", flush=True)
    return all(figures.clean for figures in found) and sum(figures.kills for figures in found) >= kills


if __name__ == "__main__":
    sys.exit(main())
