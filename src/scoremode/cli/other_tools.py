"""What people type who know other tools, and what it is called here: the one place for such words.

Read from llama.cpp, ExLlamaV3's scripts, mlx-lm, lm-evaluation-harness and vLLM. None is accepted: the answer is the
command with our names. Words of one letter that mean the same here are flags (``SHORT`` in ``reports/command``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scoremode.cli.parser import Parser

FLAGS = {  # ours, or a sentence: theirs. Of a flag that stands twice, both are named.
    "MODEL": "-m -hf -hfr --model --model-dir --model-path --hf-repo",
    "--corpus": "--file --data-path",
    "--text": "-p",
    "--context-length": "-l --ctx --ctx-size --n-ctx --seqlen --seq-len --sequence-length --length --max-length",
    "--max-windows": "-r --chunks --rows",
    "--num-samples": "-L --limit --nsamples",
    "--batch-tokens": "--batch-size",
    "--n-batch": "-b --batch-size",
    "--n-ubatch": "-ub --ubatch-size",
    "--n-gpu-layers": "-ngl --ngl --gpu-layers",
    "--threads": "-t",
    "--cache-type-k": "-ctk",
    "--cache-type-v": "-ctv",
    "--flash-attn": "-fa",
    "--tensor-parallel-size": "-tp --tp --tp-size",
    "--out": "--output --output-dir --output-path",
    "scoremode reference MODEL --kld FILE keeps base logits, scoremode compare FILE MODEL gives the divergence": (
        "--kl-divergence --kl-divergence-base --save-all-logits"
    ),
    "tasks are run by scoremode lm-eval, with the flags of lm-eval": "--tasks --model-args --num-fewshot",
}
VERBS = {  # theirs: ours
    **{"perplexity": "ppl", "llama-perplexity": "ppl", "score": "ppl"},
    **{"kld": "compare", "kl": "compare", "diff": "compare"},
    **{"bench": "ppl compare", "benchmark": "ppl compare", "eval": "ppl lm-eval", "evaluate": "ppl lm-eval"},
}
NAMED = re.compile(r"--[\w-]+|(?<=scoremode )[\w-]+")  # the verbs and flags of a sentence
MOST_REPEATED = 250  # characters of a command that an answer repeats


def in_our_words(typed: Iterable[str], chosen: Parser, verbs: Mapping[str, Parser]) -> str | None:
    """What to type instead of the arguments of a verb; None if they have no words of other tools."""
    known, everything = chosen.flags(), {*verbs}.union(*(verb.flags() for verb in verbs.values()))
    known |= {"MODEL" for action in chosen._actions if action.dest in ("model", "baseline")}
    meant, command = list[str](), [chosen.prog]
    for word in typed:
        flag, equals, value = word.partition("=")
        names = [ours for ours, theirs in FLAGS.items() if flag.replace("_", "-") in theirs.split()]
        names = [ours for ours in names if ours in known or (" " in ours and {*NAMED.findall(ours)} <= everything)]
        if flag in known or not names:
            command.append(word)
            continue
        if " " in names[0]:
            return f"there is no flag {flag}; {names[0]}"
        meant.append(f"{flag} is {' or '.join(names)}")
        command += [value] * bool(equals) if names == ["MODEL"] else [names[0] + equals + value]
    line = f"; type {command[0]} {shlex.join(command[1:])}"
    is_clear = not any(" or " in one for one in meant) and len(line) <= MOST_REPEATED
    return f"{', '.join(meant)} here{line if is_clear else ''}" if meant else None
