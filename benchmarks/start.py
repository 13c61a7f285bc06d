"""Time to answer: how long it takes from typing a command to reading a number, and where the time goes.

    python benchmarks/start.py --engine transformers
    python benchmarks/start.py --engine vllm --tokens 204800 --context 2048

Two fresh processes in turn: the whole answer by scoremode, and the stock start of the library that it runs on (imports,
``from_pretrained`` or ``vllm.LLM`` with the same settings, one forward pass). scoremode's process is split by phase.
The last lines time further questions to an engine that is already open. ``--first`` removes what earlier runs left
(stored hashes, compiled kernels, results of self-tests), as in a first run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SENTENCE = "the model reads a long text and gives every token its own share of it"
PHASES = {  # function -> phase; the time of inner phases is subtracted from outer ones
    "scoremode.core.models.facts._fingerprint": "hashing the checkpoint",
    "scoremode.core.text.tokenizer.HuggingFaceTokenizer.load": "loading the tokenizer",
    "scoremode.core.verbs.planned.tokenize": "tokenizing",
    "scoremode.core.verbs.planned.make_plan": "planning",
    "scoremode.engines.transformers.loading.load_model": "loading weights",
    "scoremode.engines.transformers.engine.load_model": "loading weights",
    "scoremode.engines.transformers.model.choose": "head kernel: compilation and self-test",
    "scoremode.engines.vllm.engine.start": "starting vLLM",
    "scoremode.engines.vllm.engine.VllmEngine._self_test": "vLLM self-test and compilation",
    "scoremode.core.engine.registry.open_engine": "opening the engine, the rest",
    "scoremode.core.verbs.scoring.UnfinishedRun.score": "scoring",
    "scoremode.core.store.runs.Claim.save": "saving",
    "scoremode.core.verbs.scoring.make_manifest": "statistics",
}

TIMED = """
import sys, time
began = time.perf_counter()
stack, spent = [], {}
def timed(function, phase):
    def call(*a, **k):
        stack.append([phase, 0.0]); start = time.perf_counter()
        try:
            return function(*a, **k)
        finally:
            took = time.perf_counter() - start; _, inner = stack.pop()
            spent[phase] = spent.get(phase, 0.0) + took - inner
            if stack: stack[-1][1] += took
    return call
import importlib, json, os
def patch(path, phase):
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:-1]:
            owner = getattr(owner, name)
        found = owner.__dict__.get(parts[-1])
        static = isinstance(found, staticmethod)
        function = timed(found.__func__ if static else found, phase)
        setattr(owner, parts[-1], staticmethod(function) if static else function)
        return
imported = time.perf_counter()
for module in json.loads(os.environ["MODULES"]):
    importlib.import_module(module)
spent["imports"] = time.perf_counter() - imported
for path, phase in json.loads(os.environ["PHASES"]).items():
    patch(path, phase)
from scoremode.cli.main import main
code = main(json.loads(os.environ["ARGUMENTS"]))
spent["the rest"] = time.perf_counter() - began - sum(spent.values())
spent["in all, in the process"] = time.perf_counter() - began
print("PHASES " + json.dumps(spent), file=sys.stderr)
sys.stdout.flush(); sys.stderr.flush()
os._exit(code)
"""

STOCK = {
    "transformers": """
import sys, time, json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, text, context, dtype, device = sys.argv[1:6]
tokenizer = AutoTokenizer.from_pretrained(model)
loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=device)
ids = tokenizer(open(text).read()[:20000], return_tensors="pt").input_ids[:, : int(context)].to(loaded.device)
with torch.inference_mode():
    print(float(loaded(ids).logits.float().log_softmax(-1).sum()))
""",
    "vllm": """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, text, context, dtype, device = sys.argv[1:6]
    eager = {"enforce_eager": True} if device == "eager" else {}
    llm = LLM(model=model, dtype=dtype, max_model_len=int(context), **eager)
    prompt = {"prompt_token_ids": llm.get_tokenizer()(open(text).read()[:20000]).input_ids[: int(context) - 1]}
    print(llm.generate([prompt], SamplingParams(max_tokens=1))[0].outputs[0].token_ids)
""",
}

SESSION = """
import sys, time, json
import scoremode as sm
model, text, context, engine, options = *sys.argv[1:5], json.loads(sys.argv[5])
def main():
    with sm.open(model, engine=engine, **options) as m:
        times = []
        for part in range(4):
            begin = time.perf_counter()
            words = open(text).read()[10 * part:]  # another text
            run = m.ppl(text=words, context_length=int(context), stride=int(context), fresh=True)
            times.append((time.perf_counter() - begin, run.manifest["seconds"]))
    print("SESSION " + json.dumps(times), file=sys.stderr)
if __name__ == "__main__":
    sys.exit(main())
"""


def write_text(path: Path, tokens: int) -> None:
    """Words that a tokenizer encodes as about one token each."""
    words = SENTENCE.split()
    dice = random.Random(3)
    path.write_text(" ".join(dice.choice(words) for _ in range(tokens)))


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return took, done.stderr


def answer(given: argparse.Namespace, text: Path, environment: dict[str, str]) -> tuple[float, dict[str, float]]:
    """One question from the command line, in a fresh process."""
    arguments = ["ppl", given.model, "--corpus", str(text), "--context-length", str(given.context)]
    arguments += ["--stride", str(given.context), "--engine", given.engine, "--fresh", "--json", *given.option]
    wanted = {path: phase for path, phase in PHASES.items() if given.engine in path or ".engines." not in path}
    wanted |= {"scoremode.core.engine.registry.open_engine": "opening the engine, the rest"}
    modules = ["torch", "transformers"] if given.engine == "transformers" else ["torch", "transformers", "vllm"]
    more = {"PHASES": json.dumps(wanted), "ARGUMENTS": json.dumps(arguments), "MODULES": json.dumps(modules)}
    script = text.with_name("timed.py")
    script.write_text(f"if __name__ == '__main__':\n{_indented(TIMED)}")
    took, said = seconds([sys.executable, str(script)], {**environment, **more})
    line = next(line for line in said.splitlines() if line.startswith("PHASES "))
    return took, json.loads(line.removeprefix("PHASES "))


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


def stock(given: argparse.Namespace, text: Path) -> float:
    script = text.with_name("stock.py")
    script.write_text(STOCK[given.engine])
    device = "eager" if "--enforce-eager" in given.option else "cpu" if given.cpu else "cuda"
    command = [sys.executable, str(script), str(given.folder), str(text), str(given.context), given.dtype, device]
    return seconds(command, {"VLLM_LOGGING_LEVEL": "ERROR"})[0]


def session(given: argparse.Namespace, text: Path, environment: dict[str, str]) -> list[tuple[float, float]]:
    script = text.with_name("session.py")
    script.write_text(SESSION)
    options = {"enforce_eager": True} if "--enforce-eager" in given.option else {}
    command = [sys.executable, str(script), given.model, str(text), str(given.context), given.engine]
    _, said = seconds([*command, json.dumps(options)], environment)
    line = next(line for line in said.splitlines() if line.startswith("SESSION "))
    return [tuple(pair) for pair in json.loads(line.removeprefix("SESSION "))]


def measure(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="scoremode-start-") as folder:
        text = Path(folder) / "text.txt"
        write_text(text, given.tokens)
        kept = {"TRITON_CACHE_DIR": f"{folder}/triton"} if given.first else {}
        ours, phases, theirs = [], [], []
        for number in range(given.repeat):
            if given.first and number:
                shutil.rmtree(f"{folder}/triton", ignore_errors=True)
            theirs.append(stock(given, text))
            took, split = answer(given, text, kept)
            ours.append(took)
            phases.append(split)
        _print(given, ours, theirs, phases)
        for number, (took, scoring) in enumerate(session(given, text, kept), 1):
            rest = took - scoring
            print(f"question {number} to an open engine: {took:.2f} s; scoring {scoring:.2f}, the rest {rest:.2f}")


def _print(given: argparse.Namespace, ours: list[float], theirs: list[float], phases: list[dict[str, float]]) -> None:
    a, b = statistics.median(ours), statistics.median(theirs)
    scoring = statistics.median(split.get("scoring", 0.0) for split in phases)
    print(f"{given.engine}, {given.model}, {given.tokens:,} words, context {given.context}, {given.repeat} runs each")
    print(f"scoremode, whole process  {a:7.2f} s    {' '.join(f'{s:.2f}' for s in ours)}")
    print(f"stock, whole process      {b:7.2f} s    {' '.join(f'{s:.2f}' for s in theirs)}")
    print(f"beyond stock, less scoring {a - b - scoring:6.2f} s")
    for phase in dict.fromkeys(phase for split in phases for phase in split):
        print(f"  {phase:42}{statistics.median(split.get(phase, 0.0) for split in phases):7.2f} s")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers", choices=sorted(STOCK))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", default=None, help="of the stock start (default: float32 on a CPU, else bfloat16)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="without kernels that were compiled before")
    parser.add_argument(
        "--option", action="append", default=[], help="a flag for scoremode, as in --option=--enforce-eager"
    )
    given = parser.parse_args(words)
    import torch

    from scoremode.core.models.facts import resolve

    given.cpu = not torch.cuda.is_available()
    given.dtype = given.dtype or ("float32" if given.cpu else "bfloat16")
    given.folder = resolve(given.model)
    if not given.cpu and "--dtype" not in given.option:
        given.option += ["--dtype", given.dtype]
    measure(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
