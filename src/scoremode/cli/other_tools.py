"""What people type who know other tools, and what it is called here: the one place for such words.

Read from llama.cpp, ExLlamaV3's scripts, mlx-lm and lm-evaluation-harness. None is accepted: the answer is the
command with our names. Words of one letter that mean the same here are flags (``SHORT`` in ``console``).
"""

from __future__ import annotations

import re

FLAGS = {  # ours, or a sentence: theirs. Of a flag that stands twice, both are named.
    "MODEL": "-m -hf -hfr --model --model-dir --model-path --hf-repo",
    "--corpus": "--file --data-path",
    "--text": "-p",
    "--context-length": "-l --ctx --ctx-size --n-ctx --seqlen --seq-len --sequence-length --length --max-length",
    "--max-windows": "-r --chunks --rows",
    "--num-samples": "-L --limit --nsamples",
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
