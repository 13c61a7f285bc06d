"""What people type who know other tools, and what it is called here: the one place for such words.

Read from llama.cpp, ExLlamaV3's scripts, mlx-lm, lm-evaluation-harness and vLLM. None of these words is accepted: the
answer is the command with our names. Those with one letter that mean the same here are flags (``reports/command``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

FLAGS = {  # ours (of several words, a sentence): theirs. Where two are named, both are offered.
    "MODEL": "-m -hf -hfr --model --model-dir --model-path --hf-repo",
    "--corpus": "--file --text-file --data-path --input",
    "--prompts": "-f",
    "--prompt": "-p",
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
    "--pipeline-parallel-size": "-pp --pp --pp-size",
    "--out": "--output --output-dir --output-path",
    "--help": "-help",
    "scoremode reference MODEL --kld FILE keeps base logits, scoremode compare FILE MODEL gives the divergence": (
        "--kl-divergence --kl-divergence-base --save-all-logits"
    ),
    "tasks are run by scoremode lm-eval, with the flags of lm-eval": "--tasks --model-args --num-fewshot",
}
VERBS = {  # theirs: ours
    **dict.fromkeys(("perplexity", "llama-perplexity", "score"), ("ppl",)),
    **dict.fromkeys(("kld", "kl", "diff"), ("compare",)),
    **dict.fromkeys(("bench", "benchmark"), ("ppl", "compare")),
    **dict.fromkeys(("eval", "evaluate"), ("ppl", "lm-eval")),
}
NAMED = re.compile(r"--[\w-]+|(?<=scoremode )[\w-]+")  # the verbs and flags of a sentence


def translated(
    words: Iterable[str], known: Collection[str], everything: Collection[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """The words of other tools in a command, each with ours that it knows, and the command with the first of these.

    A sentence counts if ``everything``, all verbs and flags, has those that it names.
    """
    renamed: dict[str, list[str]] = {}
    command: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        names = [name for name, theirs in FLAGS.items() if flag.replace("_", "-") in theirs.split()]
        names = [name for name in names if name in known or (" " in name and {*NAMED.findall(name)} <= {*everything})]
        if flag in known or not names:
            command.append(word)
            continue
        renamed[flag] = names
        command += [value] * bool(equals) if names[0] == "MODEL" else [names[0] + equals + value]
    return renamed, command
