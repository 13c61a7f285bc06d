"""The table of bad inputs: what is typed, and what the one line must say.

A row is (command, words of the line; a|b is either of them). ``{name}`` is an input of inputs.py, made afresh for the
case; ``<name>`` a value of VALUES that cannot be typed in a table. Unless a row says otherwise the exit code is 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from scoremode.cli.commands import build_parser
from tests.hostile.gguf_inputs import ABORTING, GGUFS
from tests.hostile.inputs import JOURNALS, KLDS, MODELS, QUESTION, RECORDS, REFERENCES, ROLLOUTS, RUNS

VALUES = {
    "empty": "",
    "space": " ",
    "half-pair": "\ud800",
    "nul": "a\0b",
    "escape": "\x1b[2J",
    "long-name": "n" * 300,
    "bad-byte": "\udcff",  # of a name that is not UTF-8
    "digits": "9" * 5000,
    "question": QUESTION,
}


@dataclass(frozen=True)
class Case:
    """A command that must be answered with one line."""

    group: str
    command: str
    says: tuple[str, ...]
    codes: tuple[int, ...] = (2,)  # exit codes that are right
    same: bool = False  # where the exit code is 0: it was resumed, to the numbers of an undisturbed run
    stdin: bytes = b""
    process: bool = False  # in a process of its own
    seconds: float = 10.0  # of processor time that it may take
    streams: str = ""  # a process of its own, with a stream that is closed or an odd environment: see harness.py

    def __str__(self) -> str:
        streams = f" [{self.streams}]" if self.streams else ""
        return f"{self.group}: {self.command or '(nothing)'}{streams}"


FEW = "--batch-tokens 48 --json"  # as the interrupted run was asked
RESUMED = f"ppl {{stock:model}} <question> {FEW} --out"
PPL = "ppl table:uniform"
ABC = f"{PPL} --text abcdef"
PATHS = "paths table:uniform --text abcdef"
WRITE = "rollouts table:uniform --prompt ab --out {nothing-here}"

URIS = [
    (f"{ABC} --out s4://bucket/x", "does not know the scheme s4://"),
    (f"{ABC} --out s3://", "names no bucket"),
    (f"{ABC} --out s3://bucket/a/../b", "an empty part"),
    (f"{ABC} --out s3://key:word@bucket/x", "a user name or a secret"),
    (f"{ABC} --out s3://bucket/x?secret_key=word", "the setting 'secret_key'"),
    (f"{ABC} --out 's3://bucket/x?scheme=gopher'", "unusable scheme"),
    ("prob table:uniform --file 's3://bucket/x?scheme=gopher'", "unusable scheme"),
    (f"{ABC} --out ftp://127.0.0.1:1/x", "Connection refused; check the host"),
    (f"{ABC} --out file:/some/x", "neither a URI nor a path"),
    (f"{ABC} --out memory://x", "lost with this process"),
    (f"{PPL} --corpus file:/some/x", "neither a URI nor a path"),
    ("report {stock:run} -o file:/some/x.html", "neither a URI nor a path"),
    ("compare table:uniform table:uniform --text abc --out dir::memory://x", "neither a URI nor a path"),
    ("prob table:uniform --prompt a --target b --out memory://x", "lost with this process"),
    (f"{ABC} --out https://example.org/x", "only read"),
    (f"{ABC} --out file://host/x", "three slashes"),
    (f"{PPL} --corpus memory://nothing/x.txt", "there is no file"),
    (f"{PPL} --corpus memory://nothing/*.txt", "there is no text at"),
    (f"{PPL} --corpus http://127.0.0.1:1/x.txt", "check the URI, the network"),
    ("ppl s3://bucket/model --text abc", "MODEL takes no URI"),
    (f"{ABC} --tokenizer s3://bucket/x", "--tokenizer takes no URI"),
    ("reference table:uniform --text abcdef --kld s3://bucket/x", "--kld takes no URI"),
    ("report memory://nothing/x", "is not a run"),
    ("compare memory://nothing/x table:uniform --text abc", "no finished run or reference"),
    ("tasks s3://bucket/a s3://bucket/b", "is not a folder that lm-eval wrote"),
]

WRITTEN = {"out", "records", "report", "output", "write", "kld", "write_recipe"}  # flags that name what is written
REPLICAS = [
    (f"{ABC} --replicas 0", "--replicas 0 leaves nobody to score"),
    (f"{ABC} --replicas two", "'two' is not a whole number"),
    (f"{ABC} --replicas 1000000", "--replicas 1000000 is too many"),
    (f"{ABC} --replicas 2 --ray <empty>", "--ray is empty"),
    (f"{ABC} --replicas 2 --ray nowhere", "--ray nowhere is not HOST:PORT|Ray, which is not installed"),
    (f"{ABC} --replicas 2 --ray h:99999", "--ray h:99999 is not HOST:PORT|Ray, which is not installed"),
    (f"{ABC} --ray ray://h:10001", "is not HOST:PORT|Ray, which is not installed"),
    (f"{ABC} --gpus-per-replica 1", "give --replicas N as well"),
    (f"{ABC} --replicas 2 --gpus-per-replica 1.5", "neither a share of one nor a whole number"),
    (f"{ABC} --replicas 2 --gpus-per-replica -1", "-1 is negative|expected one argument"),
    (f"{ABC} --replicas 2 --cpus-per-replica 0", "too small"),
    (f"{ABC} --replicas 2 --cpus-per-replica many", "'many' is not a number"),
    ("plan table:uniform --text abcdef --replicas 2", "--replicas"),
]

FLAGS = [
    ("serve", "MODEL is missing"),
    ("serve <empty>", "MODEL is empty"),
    ("serve --port 8000 m", "the model comes first"),
    ("serve m --head x", "invalid choice"),
    ("serve m --head exact --head exact", "given twice"),
    ("serve m --most-windows many", "--most-windows cannot be given|vLLM is not installed"),
    ("serve m --api-key-env NO_SUCH_VARIABLE", "names is not set"),
    (f"{ABC} --engine-arg hf_token=secret", "set HF_TOKEN in the environment"),
    ("completion tcsh", "invalid choice"),
    ("serve nowhere", "there is no model or folder 'nowhere'|vLLM is not installed"),
    ("serve {good.txt}", "is a file|vLLM is not installed"),
    ("serve {empty-folder}", "has no config.json|vLLM is not installed"),
    ("", "VERB"),
    ("pll x", "did you mean 'ppl'"),
    ("cache pruen", "did you mean 'prune'"),
    ("cache prune", "--older-than"),
    ("cache prune --older-than <empty>", "is empty"),
    ("cache prune --older-than x", "is not an age"),
    ("cache prune --larger-than <escape>", "is not a size"),
    ("cache prune --larger-than 1GB --larger-than 2GB", "twice"),
    ("cache prune --larger-than 1GB --kind corpora", "corpora"),
    ("<empty>", "command"),
    (f"{ABC} --corpus python-docs", "together"),
    (f"{ABC} --dataset x", "together"),
    (f"{PPL} --text <half-pair>", "UTF-8"),
    (f"{PPL} --text x", "token"),
    (f"{ABC} --context-length 4 --stride 5", "give --stride 4 or less"),
    ("paths table:uniform --num-samples 0", "leaves no text"),
    (f"{PATHS} --sequences many", "not a whole number"),
    (f"{PATHS} --vary sideways", "known: chunked, decode"),
    (f"{PATHS} --vary chunked", "no chunked path"),
    (f"{ABC} --path decode --prefill-tokens x", "--prefill-tokens"),
    (f"{ABC} --engine transformers", "--engine table"),
    (f"{ABC} --engine server", "http://HOST:PORT"),
    (f"{ABC} --engine http://<escape>", "http://HOST:PORT"),
    (f"{ABC} --engine http://a..b:8000", "http://HOST:PORT"),
    (f"{ABC} --engine http://me:secret@127.0.0.1:1", "--api-key-env"),
    (f"{ABC} --engine http://127.0.0.1:1", "nothing answers"),
    (f"{ABC} --engine http://127.0.0.1:1 --api-key-env NO_SUCH_VARIABLE", "--api-key-env"),
    (f"{ABC} --engine http://127.0.0.1:1 --concurrency 0", "--concurrency"),
    (f"{ABC} --engine http://127.0.0.1:1 --timeout nan", "--timeout"),
    (f"{ABC} --engine http://127.0.0.1:1 --patience -1", "--patience"),
    (f"{ABC} --api-key-env HOME", "--api-key-env"),
    ("info --test --engine http://127.0.0.1:1", "scoremode ppl"),
    ("prob small --engine http://127.0.0.1:1 --prompt a --target b", "nothing answers"),
    (f"{ABC} --dtype float16", "--dtype does not apply to the table engine"),
    (f"{ABC} --batch-tokens 5", "--batch-tokens"),
    (f"{ABC} --tensor-parallel-size 2", "--tensor-parallel-size does not apply to the table engine"),
    (f"{ABC} --engine-arg nonsense", "NAME=VALUE"),
    (f"{ABC} --head nope", "--head"),
    (f"{ABC} --tokenizer {{empty-folder}}", "--tokenizer"),
    (f"{ABC} --split test", "--split"),
    (f"{ABC} --dataset-config x", "--dataset-config"),
    (f"{ABC} --assistant-only", "--assistant-only"),
    (f"{ABC} --slice x", "NAME=START..END"),
    (f"{ABC} --slice a=[a]..[/a]", "matches nothing"),
    ("ppl table:unifrom --text abc", "uniform"),
    ("ppl table: --text abc", "table"),
    ("info methods gptq hf-stride", "hf-stride"),
    ("info engines nope", "nope"),
    ("info --test --engine transformer", "did you mean 'transformers'"),
    ("report a b", "b"),
    ("plan nothing-like-this --text abc", "nothing-like-this"),
    ("paths table:uniform --text abcdef --vary noise --repeat 0", "--repeat"),
    ("paths table:uniform --text abcdef --repeat 3", "leave --repeat out"),
    ("paths table:uniform --text abcdef --vary noise --out {nothing-here}", "leave --out out"),
    ("paths table:uniform --text abcdef --vary noise,decode", "one after the other"),
    ("paths table:uniform --text abcdef --vary decode --vary dtype=float32,bfloat16", "one after the other"),
    ("noise table:uniform --text abcdef", "type scoremode paths table:uniform --text abcdef --vary noise"),
    ("show {stock:run} --json", "type scoremode report"),
    ("mismatch", "type scoremode compare rollouts:DIR TRAINER"),
    ("doctor --engine nope", "type scoremode info --test --engine nope"),
    ("paths {model:good} --text abcdef --vary dtype=float32,floot", "floot"),
    ("reference table:uniform --text abcdef", "--out"),
    ("ppl {model:good} --text abcdef --dtype float99", "give one of auto, float32"),
    ("ppl {model:good} --text abcdef --device tpu", "give cpu, cuda"),
    ("ppl {model:good} --text abcdef --tensor-parallel-size 2", "does not apply to the transformers engine"),
    ("ppl {model:good} --text abcdef --device cuda:99", "cuda"),
    ("ppl {model:good} --text abcdef --batch-tokens 0", "--batch-tokens"),
    ("ppl {model:good} --text abcdef --head-kernel nope", "nope"),
    ("ppl {model:good} --text abcdef --engine table", "table"),
    ("ppl {good.txt} --text abcdef", "is a file"),
    ("ppl {model:good} --corpus {long.txt} --context-length 500", "give --context-length 128"),
    ("ppl {model:good} --text abcdef --tokenizer {nothing-here}", "nothing-here"),
    ("ppl {model:good} --text abcdef --engine vllm --engine-arg runner=generate", "runner"),
    ("ppl {model:good} --text abcdef --engine vllm --engine-arg data_parallel_size=2", "data_parallel_size"),
]

TEXTS = [
    ("wikitxt2", "wikitext2"),
    ("wikitext2:{nothing-here}", "nothing-here"),
    ("wikitext2:{empty.txt}", "empty.txt"),
    ("wikitext2:{no-text.parquet}", "no-text.parquet"),
    ("<empty>", ""),
    ("<escape>", ""),
    ("<nul>", ""),
    ("{one-byte.txt}", "token"),
    ("{good.txt} {empty.txt}", "pattern"),
    ("{good.txt} --corpus {good.txt}", "twice"),
    ("{good.txt} --corpus {nothing-here}", "nothing-here"),
    ("{mixed-folder}", "chat"),
    ("{nothing-here}/*.txt", "no file matches"),
    ("{empty-folder}/**/*.txt", "no file matches"),
    ("{not-json.jsonl}", "line 2"),
    ("{number.jsonl}", "line 1"),
    ("{text-empty.jsonl}", "text"),
    ("{later-number.jsonl}", "line 2"),
    ("{bad-utf8.jsonl}", "line 1"),
    ("{chat-null.jsonl}", "content of message 1 is null"),
    ("{chat-image.jsonl}", "Invalid enum value 'image_url'"),
    ("{chat-part.jsonl}", "missing required field `type`"),
    ("{no-text.jsonl} --field nope", "nope"),
]

MODEL_LINES = {  # words of the line, where more can be asked than that there is one
    "context-1": ("context of 1 token",),
    **dict.fromkeys(("config-deep", "config-deep-inside"), ("is not a config in JSON (nested too deeply)",)),
    "config-list": ("is not a config in JSON (not an object)",),
    "config-binary": ("is not a config in JSON (not UTF-8)",),
    **dict.fromkeys(("tokenizer-deep", "tokenizer-escape", "tokenizer-config-deep"), ("the tokenizer in",)),
    "config-layers-fewer": ("layer|tensor",),
    "no-config": ("config.json",),
    "config-unknown-type": ("nobody-knows-this",),
    "no-weights": ("contains no weights; give a folder with .safetensors files",),
    **dict.fromkeys(("weights-empty", "weights-cut"), ("download it again",)),
    "weights-pickled": ("pickled weights",),
    "tensor-missing": ("lm_head.weight",),
    "no-tokenizer": ("--tokenizer",),
    "tensor-nan": ("NaN",),
    "tokenizer-more-ids": ("vocabulary",),
}
NOTED = {"config-layers-fewer"}  # a note that says so will do, with exit code 0
NOT_TO_SCORE = {"good", "other-vocabulary"}  # nothing is wrong with them alone
NEEDING_LIMITS = {"config-endless", "tokenizer-endless", "tokenizer-doubling"}  # see LIMITED
ONLY_FOR_CHAT = {name for name in MODELS if name.startswith("template-")}

PROB = "prob table:uniform"
PAIRS = [
    (PROB, "prompt"),
    (f"{PROB} --prompt ab", "target"),
    (f"{PROB} --target ab", "prompt"),
    (f"{PROB} --prompt ab --target <empty>", "a target is empty"),
    (f"{PROB} --prompt <half-pair> --target b", "UTF-8"),
    (f"{PROB} --prompt a --target <half-pair>", "UTF-8"),
    (f"{PROB} --prompt <empty> --target ab", "no context"),
    (f"{PROB} --file {{pairs.jsonl}} --prompt x", "give one or the other"),
    (f"{PROB} --file {{pairs.jsonl}} --target x", "--file"),
    (f"{PROB} --file {{nothing-here}}", "nothing-here"),
    (f"{PROB} --file {{empty-folder}}", "empty-folder"),
    (f"{PROB} --file {{empty.jsonl}}", "holds no pairs"),
    (f"{PROB} --file {{not-json.jsonl}}", "line 1"),
    (f"{PROB} --file {{number.jsonl}}", "line 1"),
    (f"{PROB} --file {{deep.jsonl}}", "line 1"),
    (f"{PROB} --file {{bad-utf8.jsonl}}", "line 1"),
    (f"{PROB} --file {{no-prompt.jsonl}}", "line 1"),
    (f"{PROB} --file {{no-target.jsonl}}", "line 1"),
    (f"{PROB} --file {{number-prompt.jsonl}}", "line 1"),
    (f"{PROB} --file {{empty-target.jsonl}}", "target"),
    (f"{PROB} --file {{no-targets.jsonl}}", "line 1"),
    (f"{PROB} --file {{text-targets.jsonl}}", "line 1"),
    (f"{PROB} --file {{second-bad.jsonl}}", "line 2"),
    (f"{PROB} --file {{half-pair-target.jsonl}}", "UTF-8"),
    (f"{PROB} --prompt a --target b --leading-space maybe", "--leading-space"),
    (f"{PROB} --prompt a --target b --spanning maybe", "--spanning"),
    (f"{PROB} --prompt a --target b --engine nope", "nope"),
    (f"{PROB} --prompt a --target b --add-bos", "leave --add-bos out"),
    (f"{PROB} --prompt a --target b --fresh", "leave --fresh out"),
    (f"{PROB} --prompt a --target b --out {{a-device}} --fresh", "is not a plain file"),
    (f"{PROB} --prompt a --target b --out {{empty-folder}}", "folder"),
    (f"{PROB} --prompt a --target b --out {{nothing-here}}/x/y", "folder"),
    (f"{PROB} --prompt a --target b --out {{notes.jsonl}}", "notes.jsonl"),
    (f"{PROB} --prompt a --target b --out {{good.txt}}/x", "good.txt"),
    (f"{PROB} --prompt a --target b --out {{stock:run}}/manifest.json", "manifest.json"),
    (f"{PROB} --prompt a --target b --out {{foreign-folder}}/thesis.txt", "thesis.txt"),
    (f"{PROB} --file {{pairs.jsonl}} --out {{pairs.jsonl}}", "--file"),
    ("prob nothing-like-this --prompt a --target b", "nothing-like-this"),
    ("prob {model:good} --prompt <empty> --target b", "prompt"),
    ("prob {model:good} --prompt mi --target nd --spanning refuse", "span"),
    ("prob {model:tensor-nan} --prompt a --target b", "NaN"),
]

HARNESS = [
    ("lm-eval --tasks arc_easy", "no model was given"),
    ("lm-eval --tasks arc_easy --model_args model=nothing-like-this", "nothing-like-this"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,engine=nope", "nope"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,max_lenght=5", "did you mean 'max_length'"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,max_length=0", "max_length 0"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,prefix_token_id=999", "prefix_token_id 999"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,greedy=perhaps", "$.greedy"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,dtype=float32", "table engine"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,out=scores", "no argument out"),
    ("lm-eval --tasks arc_easy --model_args model={model:config-cut}", "config.json"),
]

PLACES = [
    (f"{PPL} <question> --out {{good.txt}}", "good.txt"),
    (f"{PPL} <question> --out {{good.txt}}/run", "good.txt"),
    (f"{PPL} <question> --out {{foreign-folder}} --fresh", "thesis.txt"),
    (f"{PPL} <question> --out {{stock:other-run}}", "--fresh"),
    (f"{PPL} <question> --out {{stock:reference}}", "another"),
    (f"{PPL} <question> --out {{model:good}}", "model-good"),
    (f"{PPL} <question> --out <nul>", ""),
    (f"{PPL} <question> --out {{nothing-here}}/<long-name>", ""),
    (f"{PPL} <question> --out /proc/nothing/run", "/proc/nothing/run"),
    (f"{PPL} <question> --out {{a-device}}", "a-device"),
    ("reference {model:good} --text abc --kld {nothing-here}", "--context-length"),
    ("reference {model:good} <question> --kld {nothing-here} --method exl3-2025", "--method llamacpp"),
    ("reference {model:good} <question> --kld {nothing-here}", "stride"),
    ("reference {model:good} --corpus {good.txt} --kld {good.txt}", "exists"),
    ("reference {model:good} --corpus {good.txt} --kld {good.txt} --fresh", "not a .kld file"),
    ("reference {model:good} --corpus {good.txt} --kld {model:good}/model.safetensors --fresh", "not a .kld file"),
    (
        "reference {model:good} --corpus {good.txt} --kld {nothing-here} --out {nothing-here}",
        "run a second command",
    ),
    ("reference {gguf:good} --corpus {good.txt} --kld {gguf:good} --fresh", "not a .kld file"),
    ("reference {model:good} --corpus {good.txt} --kld {link-to-text} --fresh", "not a .kld file"),
    ("reference {model:good} --corpus {good.txt} --kld {empty-folder}", "is a folder"),
    ("reference {model:good} --corpus {good.txt} --kld {nothing-here}/x.kld", "no folder"),
    ("reference {model:good} --corpus {good.txt} --kld {stock:run}/x.kld", "inside a run"),
    ("reference {model:good} --corpus {good.txt} --kld <nul>", "no file name"),
    ("reference {model:good} <question> --out {good.txt}", "good.txt"),
    ("reference {model:good} <question> --out {stock:run}", "another"),
    ("reference {model:good} <question> --out {foreign-folder} --fresh", "thesis.txt"),
    ("compare {model:good} {stock:model} <question> --out {good.txt}", "good.txt"),
    ("compare {model:good} {stock:model} <question> --report {empty-folder}", "empty-folder"),
    ("compare {model:good} {stock:model} <question> --report {stock:run}/manifest.json", "manifest.json"),
    ("card {nothing-here}", "nothing-here"),
    ("card {stock:run} --dialect gguf", "gguf"),
    ("card {stock:run} --write {good.txt}", ""),
    ("card {stock:run} --write {empty-folder}", ""),
    ("report {stock:run} -o {empty-folder}", "empty-folder"),
    ("report {stock:run} -o {nothing-here}/x.html", "nothing-here"),
    ("report {stock:run} -o <nul>", ""),
    ("report {stock:run} -o {stock:other-run}/manifest.json", "manifest.json"),
    ("report {stock:run} -o {good.txt}/x.html", "good.txt"),
    ("report {nothing-here} -o {empty-folder}", "is a folder"),
    ("report {stock:run} {stock:other-run} -o {nothing-here}", "plan"),
    ("report {stock:run} {nothing-here} -o {empty-folder}/x.html", "nothing-here"),
    ("report {nothing-here}", "nothing-here"),
    ("report {good.txt}", "good.txt"),
    ("report {empty-folder}", "empty-folder"),
    ("report {foreign-folder}", "foreign-folder"),
    ("report {model:good}", "model-good"),
    ("report <nul>", ""),
    ("report <escape>", ""),
    ("report {stock:partial}", "unfinished"),
]

TO_A_DEVICE = (f"{PROB} --prompt a --target b --out", "report {stock:run} -o")  # written to or refused, never replaced

COMPARE = [
    ("compare", "BASELINE"),
    ("compare {model:good}", "CANDIDATE"),
    ("compare {model:good} {nothing-here} <question>", "nothing-here"),
    ("compare {nothing-here} {model:good} <question>", "nothing-here"),
    ("compare table:uniform table:uniform table:uniform --text abcdef", "same name"),
    ("compare {model:good} {model:other-vocabulary} <question>", "vocabular"),
    ("compare {model:good} table:uniform <question>", ""),
    ("compare {model:good} {model:tensor-nan} <question>", "NaN"),
    ("compare {model:good} {model:no-weights} <question>", "weights"),
    ("compare {stock:run} {stock:other-run}", ""),
    ("compare {stock:run} {stock:model-run}", ""),
    ("compare {stock:run} {model:good}", ""),
    ("compare {stock:reference} {stock:run}", ""),
    ("compare {stock:reference} table:uniform", ""),
    ("compare {stock:reference} {model:other-vocabulary}", ""),
    ("compare {stock:reference} {model:good} --text other", "text"),
    ("compare {stock:reference} {model:good} --method gptq", "method"),
    ("compare {stock:partial} {model:good}", ""),
    ("compare {kld:good} {model:good} <question>", "--text"),
    ("compare {kld:good} {model:good} --method llamacpp", "--method"),
    ("compare {kld:good} {model:good} --baseline-dtype float32", "--baseline-dtype"),
    ("compare {kld:good} {model:other-vocabulary}", "311 ids and the candidate 375"),
    ("compare {kld:good} table:uniform", "311 ids and the candidate 256"),
    ("compare {kld:good} {stock:run}", "finished run"),
    ("compare {kld:good} {kld:good}", "only be the baseline"),
    ("compare {model:good} {kld:good} <question>", "only be the baseline"),
    ("compare {kld:good} {model:good} --out {good.txt}", "good.txt"),
    ("compare {kld:good} {model:good} --json --llamacpp", "--llamacpp"),
    ("compare table:uniform table:successor --text abcdef --fail-if nonsense", "nonsense"),
    ("compare table:uniform table:successor --text abcdef --json --markdown", "--markdown"),
    ("compare {model:good} {stock:model} <question> --baseline-dtype nope", "nope"),
    ("compare {model:good} {stock:model} <question> --baseline-engine nope", "nope"),
]

GGUF = [
    ("ppl {gguf:good} --text abcdef --engine transformers", "--engine llamacpp"),
    ("ppl {model:good} --text abcdef --engine llamacpp", "--engine transformers"),
    ("ppl {model:good} --text abcdef --threads 2", "--threads"),
    ("ppl {gguf:good} --text abcdef --tokenizer {empty-folder}", "empty-folder"),
    ("ppl {gguf:good} --corpus {long.txt} --context-length 500", "128"),
    ("ppl nothing-here.gguf --text abcdef", "nothing-here.gguf"),
    ("compare {gguf:good} {gguf:good} --text abcdef --replicas 2", "leave --replicas out"),
    ("compare {gguf:good} table:uniform --text abcdef", "tokenizer"),
    ("compare {gguf:good} {gguf:good} --text abcdef --dtype float16", "leave --dtype out"),
    ("plan {gguf:context-1} <question>", "context of 1 token"),
    ("reference {gguf:context-1} --corpus {good.txt} --kld {nothing-here}", "context of 1 token"),
    ("reference {gguf:good} <question> --out {nothing-here}", "llamacpp engine cannot|hidden states"),
    ("compare {model:good} {gguf:cut-5} <question>", "not a whole GGUF"),
    ("compare {model:other-vocabulary} {gguf:good} <question>", "vocabular|tokenizer"),
]

ASK = "tasks table:uniform table:uniform"
LOGS = "--output_path DIR --log_samples"  # what makes the folders that tasks compares
TASKS = [
    ("tasks table:uniform", "CANDIDATE"),
    (ASK, LOGS),
    (f"{ASK} --tasks <empty>", "--tasks"),
    (f"{ASK} --tasks arc_easy --tasks piqa", "twice"),
    (f"{ASK} --tasks arc_easy --limit 5", LOGS),
    (f"{ASK} --fail-if nonsense", "is not a rule"),
    (f"{ASK} --fail-if recovry<1", "recovery"),
    (f"{ASK} --fail-if flips>5%", "is not a number; write one such as 0.02"),
    (f"{ASK} --fail-if mcnemar<0.01~surely".replace("~", " "), "nothing takes"),
    (f"{ASK} --report /", "folder"),
    (f"{ASK} --json --markdown", "--markdown"),
    ("tasks {stock:run} table:uniform", LOGS),
    ("tasks {nothing-here} {nothing-here}", LOGS),
]

STREAMS = [
    ("ppl org-that-is-nowhere/model --text abc", "", (2,), ("org-that-is-nowhere/model",)),
    (f"{PPL} --text é±😀", "in ascii", (0,), ("256.0",)),
    ("report nothing-like-é", "in ascii", (2,), ("is not a run",)),
    (f"{PPL} --text abcdef", "in the C locale", (0,), ("256.0",)),
    (f"{PPL} --corpus {{é.txt}} --out {{nothing-here}}", "in the C locale", (0,), ("u00e9.txt", "256.0")),
    (f"{PPL} --text abcdef", "with -OO", (0,), ("256.0",)),
    ("info methods gptq", "with -OO", (0,), ("disjoint windows",)),
    ("ppl {empty-folder} --text abc", "with -OO", (2,), ("python -OO removes",)),
    (f"{PPL} --text abcdef", "without a home", (2,), ("set SCOREMODE_CACHE",)),
    ("info methods gptq", "with no number of threads", (0,), ("is ignored",)),
    (f"{PPL} --text abcdef", "with the cache at a URI", (2,), ("SCOREMODE_CACHE is a URI",)),
]

WRITING = [
    ("rollouts table:uniform --prompt ab", "give --out DIR"),
    ("rollouts table:uniform --out {nothing-here}", "no prompt was given"),
    (f"{WRITE} --prompts {{good.txt}}", "given together"),
    ("rollouts table:uniform --prompt <empty> --out {nothing-here}", "prompt 0 has no token"),
    (f"{WRITE} --temperature -1", "-1 is negative"),
    (f"{WRITE} --top-p 0.5", "do not apply to greedy"),
    (f"{WRITE} --temperature 1 --top-p 0", "leaves no token"),
    (f"{WRITE} --temperature 1 --top-p 1.5", "from 0 to 1"),
    (f"{WRITE} --temperature 1 --top-k 0", "leaves no token"),
    (f"{WRITE} --samples 0", "writes nothing"),
    (f"{WRITE} --max-tokens -4", "writes nothing"),
    (f"{WRITE} --seed x", "not a whole number"),
    (f"{WRITE} --sequences 0", "less than 1"),
    (f"{WRITE} --replicas 0", "replicas"),
    (f"{PPL} --corpus answers:", "Is a directory"),
    (f"{PPL} --corpus answers:{{nothing-here}}", "nothing-here"),
    (f"{PPL} --corpus answers:{{empty-folder}}", "Is a directory"),
    (f"{PPL} --corpus answers:{{null-prompt.jsonl}}", "neither a prompt nor messages"),
    (f"{PPL} --corpus answers:{{stock:rollouts}}", "is a folder of rollouts"),
    (f"{PPL} --corpus answers:{{stock:rollouts}} --field text", "--field does not apply to answers"),
    (f"{WRITE} --corpus {{good.txt}}", "--corpus belongs to"),
    ("rollouts table:uniform --prompt ab --out s3://bucket/x", "folders of this machine"),
    ("rollouts table:uniform --prompt ab --out {stock:run}", "not a folder of rollouts"),
    ("rollouts table:uniform --prompt ab --out {stock:rollouts}", "differ in"),
    (f"{PPL} <question> --out {{stock:rollouts}}", "is not a run"),
    ("rollouts table:uniform --prompts {nothing-here} --out {nothing-here}", "nothing-here"),
    ("rollouts table:uniform --prompts {empty.txt} --out {nothing-here}", "empty"),
    ("rollouts table:uniform --prompts {blank.jsonl} --out {nothing-here}", "no prompts"),
    ("rollouts table:uniform --prompts {latin1.txt} --out {nothing-here}", "UTF-8"),
    ("rollouts table:uniform --prompts {not-json.jsonl} --out {nothing-here}", "line 1"),
    ("rollouts table:uniform --prompts {deep.jsonl} --out {nothing-here}", "line 1"),
    ("rollouts table:uniform --prompts {null-prompt.jsonl} --out {nothing-here}", "neither a prompt nor messages"),
    ("rollouts table:uniform --prompts {chat-no-content.jsonl} --out {nothing-here}", "content"),
    ("rollouts table:uniform --prompts {empty.parquet} --out {nothing-here}", "empty"),
    (f"{PPL} --corpus rollouts:", "no finished rollouts"),
    (f"{PPL} --corpus rollouts:<long-name>", "no finished rollouts"),
    (f"{PPL} --corpus rollouts:s3://bucket/x", "folders of this machine"),
    (f"{PPL} --corpus rollouts:{{stock:rollouts}} --method gptq", "--method sliding-once"),
    (f"{PPL} --corpus rollouts:{{stock:rollouts}} --field text", "--field"),
    (f"{PPL} --corpus rollouts:{{stock:rollouts}} --assistant-only", "--assistant-only"),
    ("ppl {model:good} --corpus rollouts:{stock:rollouts}", "another tokenizer"),
    ("compare rollouts:{stock:rollouts}", "is compared with one trainer"),
    ("compare rollouts:{stock:rollouts} table:uniform table:uniform", "is compared with one trainer"),
    ("compare rollouts:{stock:rollouts} table:uniform --text abc", "leave --text out"),
    ("compare rollouts:{stock:rollouts} table:uniform --markdown", "leave --markdown out"),
    ("compare table:uniform table:uniform --text abc --clip-low 0.5", "give rollouts:DIR"),
    ("compare rollouts:{nothing-here} table:uniform", "no finished rollouts"),
    ("compare rollouts:{stock:rollouts} {nothing-here}", "no model or folder"),
    ("compare rollouts:{stock:rollouts} {stock:run}", "did not score exactly these sampled tokens"),
    ("compare rollouts:{stock:rollouts} {model:good}", "another tokenizer"),
    ("compare rollouts:{stock:rollouts} table:uniform --fail-if k9>1", "no statistic 'k9'"),
    ("compare rollouts:{stock:rollouts} table:uniform --clip-low 2 --clip-high 1", "does not lie around 1"),
    ("compare rollouts:{stock:rollouts} table:uniform --clip-low x", "not a number"),
    ("compare rollouts:{stock:rollouts} table:uniform --report {empty-folder}", "is a folder"),
    ("attribute", "BASELINE, CANDIDATE are missing"),
    ("attribute {model:good} rtn:4:16 --text abcdef --by row", "--by row is not known"),
    ("attribute {model:good} rtn:4 --text abcdef", "rtn:4:32"),
    ("attribute {model:good} rtn:0:16 --text abcdef", "0 bits"),
    ("attribute {model:good} rtn:4:0 --text abcdef", "groups of 0"),
    ("attribute {model:good} rtn:4:16 rtn:4:16 --text abcdef", "same name"),
    ("attribute {model:good} {nothing-here} --text abcdef", "no model or folder"),
    ("attribute {nothing-here} rtn:4:16 --text abcdef", "no model or folder"),
    ("attribute {model:good} {empty-folder} --text abcdef", "no config.json|no weights"),
    ("attribute table:uniform rtn:4:16 --text abcdef", "no weights to swap"),
    ("attribute {model:good} {model:good} rtn:4:16 --by served --text abcdef", "takes one candidate"),
    ("attribute {model:good} {model:good} --by served --text abcdef --out {nothing-here}", "leave --out out"),
    ("attribute {model:good} rtn:4:16 --by served --text abcdef", "needs a model"),
    ("attribute {model:good} rtn:4:16 --text abcdef --replicas 0", "leaves nobody to score"),
    ("attribute {model:good} rtn:4:16 --text abcdef --path decode", "prefill path only"),
    ("attribute {model:good} rtn:4:16 --text abcdef --out s3://bucket/x", "folder of this machine"),
    ("attribute {model:good} rtn:4:16 --text abcdef --out {stock:run}", "not a folder of an attribution"),
    ("attribute {model:good} rtn:4:16 --text abcdef --out {good.txt}", "is a file"),
    ("attribute {model:good} rtn:4:16 --text abcdef --report {empty-folder}", "is a folder"),
    ("attribute {model:good} rtn:4:16 --text abcdef --engine nope", "nope"),
    ("attribute {model:good} rtn:4:16 --text abcdef --engine transformers", "leave --engine out"),
    ("attribute {model:good} rtn:4:16 --text abcdef --bits-budget 4 --kl-budget 1", "give one of them"),
    ("attribute {model:good} rtn:4:16 --text abcdef --write-recipe x", "needs a budget"),
    ("attribute {model:good} rtn:4:16 --text abcdef --bits-budget 8 --write-recipe {nothing-here}/x", "no folder"),
    ("compare table:uniform table:successor --text abcdef --no-worse-than nan", "not a number"),
]

FIFO = "is not a plain file|is not a file|not a config|is not a run|cannot be read"
FIFOS = [
    *(f"{verb} {{model:weights-fifo}} --text abcdef" for verb in ("ppl", "plan", "paths")),
    "compare {model:good} {model:weights-fifo} --text abcdef",
    "rollouts {model:weights-fifo} --prompt ab --out {nothing-here}",
    "reference {model:weights-fifo} --text abcdef --out {nothing-here}",
    "attribute {model:good} {model:weights-fifo} --text abcdef",
    "compare rollouts:{stock:rollouts} {model:weights-fifo}",
    "prob {model:weights-fifo} --prompt a --target b",
    "ppl {model:good} --text abcdef --tokenizer {model:tokenizer-fifo}",
]
FORMERLY_WRONG = [
    ("rollouts table:uniform --prompt ab --samples 1000000000 --out {nothing-here}", "too many for one folder"),
    ("attribute {model:good} table:uniform --text abcdef", "has no weights"),
    ("attribute {model:good} rtn:<digits>:16 --text abcdef", "not a rounding to nearest"),
    ("attribute {model:good} rtn:4:<digits> --text abcdef", "not a rounding to nearest"),
    ("ppl <digits> --text abcdef", "longer than a file's may be|there is no model"),
    (f"{PPL} --corpus answers:http://127.0.0.1:1/x.jsonl", "http://127.0.0.1:1/x.jsonl: prompts are read from files"),
    ("rollouts table:uniform --prompts http://127.0.0.1:1/x.jsonl --out {nothing-here}", "copy the file first"),
    (f"{PPL} --corpus answers:{{answer.jsonl}} --document-tokens 2", "raise --document-tokens"),
    ("report {stock:run} -o <half-pair>", "no file name"),
    ("prob table:uniform --prompt a --target b --out <half-pair>", "no file name"),
    ("reference table:uniform --text abcdefabcdef --context-length 4 --kld <half-pair>", "no file name"),
    ("serve table:uniform", "has no weights|vLLM is not installed"),
    ("serve {model:config-cut}", "is not a config in JSON|vLLM is not installed"),
    ("serve {model:config-fifo}", f"{FIFO}|vLLM is not installed"),
    ("serve {model:good} --port x", "--port x is not a port|vLLM is not installed"),
    ("serve {model:good} --host 192.0.2.1 --port 8000", "nothing can listen at|vLLM is not installed"),
]
NOT_UTF8 = (  # answered with a result
    f"{ABC} --json --out {{nothing-here}}<bad-byte>",
    "prob table:uniform --prompt a --target b --json --out {nothing-here}<bad-byte>",
    "rollouts table:uniform --prompt ab --max-tokens 2 --json --out {nothing-here}<bad-byte>",
    "compare table:uniform table:successor --text abcdef --json --out {nothing-here}<bad-byte>",
    f"{ABC} --json --slice a<bad-byte>=a..b",
    "attribute {model:good} rtn:4:999999 --text abcdefabcdef --dtype float32 --context-length 4",  # took all memory
)

FAULTS = [
    ("paths table:uniform --text abc --report=--", "--report needs a value"),
    ("tasks {stock:run} {stock:run} --metric=--", "--metric needs a value"),
    ("paths table:uniform --text=-- --vary noise", "--text needs a value"),
    (f"{ABC} --", "nothing takes the argument '--'"),
    (f"{ABC} --engine http://127.0.0.1:1/a+b", "nothing answers at http://127.0.0.1:1/a+b"),
    (f"{ABC} --engine 'http://127.0.0.1:1/a b'", "its path must be percent-encoded"),
    (f"{ABC} --engine http:///a", "it names no host"),
    (f"{ABC} --engine http://[::1", "its host or port is wrong"),
    (f"{ABC} --engine http://h:99999", "its host or port is wrong"),
    (f"{ABC} --engine http://<bad-byte>:1", "it names no host"),
    ("serve <bad-byte>", "there is no model|vLLM is not installed"),
    ("serve {model:good} --served-model-name x --port <bad-byte>", "is not a port|vLLM is not installed"),
]
WITH_VLLM = [  # its import takes ten seconds of processor time: in benchmarks/hostile.py alone
    ("serve {model:good} --max-model-len -5", "max_model_len Input should be"),
    ("serve {model:good} --max-model-len 0", "max_model_len must be a positive integer"),
    ("serve {model:good} --max-model-len 9223372036854775808", "is greater than the derived"),
    ("serve {model:good} --max-num-batched-tokens 1e308", "--max-num-batched-tokens: invalid"),
    ("serve {model:good} --gpu-memory-utilization nan", "gpu_memory_utilization"),
    ("serve {model:good} --no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("serve {model:good} --quantization nope", "Unknown quantization method: nope"),
    ("serve {model:good} --dtype float99", "--dtype: invalid choice"),
    ("serve {model:good} another-model", "unrecognized arguments: another-model"),
    ("serve {model:good} --chat-template {nothing-here}", "nothing-here|chat template"),
    ("serve {model:good} --enable-auto-tool-choice", "--tool-call-parser"),
]

ANSWERED = {  # a command of each verb that ends well, to which a flag is added
    "ppl": f"{PPL} --text abcdefabcdef",
    "prob": f"{PROB} --prompt a --target b",
    "plan": "plan table:uniform --text abcdefabcdef",
    "paths": PATHS,
    "rollouts": f"{WRITE} --max-tokens 2 --temperature 1",
    "compare": "compare table:uniform table:successor --text abcdefabcdef",
    "reference": "reference table:uniform --text abcdefabcdef --out {nothing-here}",
    "report": "report {stock:run}",
    "card": "card {stock:run} {stock:run}",
    "cache": "cache prune --dry-run",
    "tasks": "tasks {stock:run} {stock:run}",
    "info": "info methods",
    "attribute": "attribute {model:good} rtn:8:16 --text abcdefabcdef --dtype float32 --context-length 4",
}
INSTEAD = {  # where a flag replaces what the command has
    "--corpus": PPL,
    "--dataset": PPL,
    "--file": PROB,
    "--prompts": "rollouts table:uniform --out {nothing-here}",
}
ENDS = (
    *("0", "-1", "2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551616"),
    *("1e308", "nan", "inf", "1e-320", "-0", "1.5", "<digits>"),
)
NAMES = (
    "<bad-byte>",
    "{nothing-here}<bad-byte>",
    "<bad-byte>/x=<bad-byte>",
    "http://<bad-byte>:1",
    "s3://<bad-byte>/x",
)


def flag_cases(every: bool) -> Iterator[Case]:
    """Every flag with numbers at the ends of their range, or with names that are not UTF-8; or each once, with one."""
    once, turns = set[str](), count()
    for verb, parser in build_parser().verbs().items():
        for action in parser._actions:
            flag, command = (action.option_strings or [""])[-1], ANSWERED.get(verb, "")
            if not flag or not command or action.nargs == 0 or f" {flag} " in command or (flag in once and not every):
                continue
            once.add(flag)
            values: tuple[str, ...] = NAMES if action.type in (None, str) else ENDS
            if action.dest in WRITTEN:
                values = NAMES[1:2]
            for value in values if every else [values[next(turns) % len(values)]]:
                yield Case("flags", f"{INSTEAD.get(flag, command)} {flag}={value}", (), (0, 1, 2))


COMPARED = "compare table:uniform table:successor"
NOBODY = [
    *(f"{verb} ~nouser/x --text abc" for verb in ("ppl", "plan", "paths --vary noise")),
    *(f"{verb} --text abc" for verb in ("compare ~nouser/x table:uniform", "compare table:uniform ~nouser/x")),
    "prob ~nouser/x --prompt a --target b",
    "rollouts ~nouser/x --prompt ab --out {nothing-here}",
    "reference ~nouser/x --text abc --out {nothing-here}",
    "attribute {model:good} rtn:4:16 --text abcdef --bits-budget 8 --write-recipe ~nouser/x",
    "tasks ~nouser/a ~nouser/b",
    "serve ~nouser/x",
    "report ~nouser/x",
    "ppl {model:good} --text abc --adapter ~nouser/x",
    f"{ABC} --tokenizer ~nouser/x",
    f"{PPL} --corpus ~nouser/x",
    f"{PPL} --corpus rollouts:~nouser/x",
    f"{PROB} --file ~nouser/x",
    "rollouts table:uniform --prompts ~nouser/x --out {nothing-here}",
]
OUTPUTS = [  # nothing of the user's is changed
    f"{COMPARED} --text abc --records {{my-records}}",
    f"{COMPARED} --text other --records {{stock:records}}",
    f"{COMPARED} --text abc --out {{my-runs}}",
    f"{COMPARED} --text abc --out {{my-runs}} --fresh",
    "card {stock:compared} --dialect json --out {my-records}",
    *(
        f"card {{stock:compared}} --dialect eval-results --benchmark org/x --out {{{place}}}"
        for place in ("my-evaluations", "my-records")
    ),
    f"{PPL} <question> --out {{my-temporaries}}",
    f"{PPL} <question> --out {{my-temporaries}} --fresh",
    "reference table:uniform <question> --out {my-temporaries}",
    f"{COMPARED} --text abc --records {{my-temporaries}}",
    "rollouts table:uniform --prompt ab --max-tokens 2 --out {my-temporaries}",
]
LIMITED = [  # without a limit of ours, they would take all memory there is
    f"{PPL} --corpus {{endless.jsonl}}",
    f"{PPL} --corpus {{endless.txt}}",
    f"{PPL} --corpus {{endless.parquet}}",
    f"{PPL} --corpus answers:{{endless.jsonl}}",
    f"{PROB} --file {{endless.jsonl}}",
    "rollouts table:uniform --prompts {endless.jsonl} --out {nothing-here}",
    "report {endless.json}",
    "report {run:manifest-endless}",
    "report {record:endless}",
    f"{PPL} <question> --out {{run:manifest-endless}}",
    *(f"ppl {{model:{name}}} <question>" for name in ("config-endless", "tokenizer-endless", "tokenizer-doubling")),
]

RUN_COMMANDS = ("report {%s}", "report {%s} -o {nothing-here}", "compare {%s} {stock:run}", "compare {stock:run} {%s}")


def all_cases(every: bool = False) -> list[Case]:
    """Every row as a case; with ``every``, those that take long too."""
    cases = [Case("flags", command, (words,)) for command, words in FLAGS]
    cases += [Case("uris", command, (words,)) for command, words in URIS]
    cases += [Case("replicas", command, (words,)) for command, words in REPLICAS]
    cases += [Case("texts", f"{PPL} --corpus {corpus}", (words,)) for corpus, words in TEXTS]
    for name, content in {"empty": b"", "one byte": b"x", "not UTF-8": b"\xff\xfe"}.items():
        words = "UTF-8" if content[:1] == b"\xff" else ""
        cases.append(Case(f"stdin {name}", f"{PPL} --corpus -", (words,), stdin=content))
    for name in [name for name in MODELS if name not in NOT_TO_SCORE | ONLY_FOR_CHAT | NEEDING_LIMITS]:
        codes = (0, 2) if name in NOTED else (2,)
        cases.append(Case("models", f"ppl {{model:{name}}} <question>", MODEL_LINES.get(name, ()), codes))
    for name in ("config-cut", "no-weights", "weights-cut", "header-deep", "tokenizer-cut", "no-config"):
        cases.append(Case("models", f"plan {{model:{name}}} <question>", ()))
        cases.append(Case("models", f"paths {{model:{name}}} <question> --vary noise", ()))
        cases.append(Case("models", f"reference {{model:{name}}} <question> --out {{nothing-here}}", ()))
    for name in sorted(ONLY_FOR_CHAT):
        cases.append(Case("models", f"ppl {{model:{name}}} --corpus {{chat.jsonl}}", ("template",)))
    cases += [Case("pairs", command, (words,)) for command, words in PAIRS]
    cases += [Case("harness", command, (words,)) for command, words in HARNESS]
    cases += [Case("places", command, (words,)) for command, words in PLACES]
    cases += [Case("places", f"{command} {{a-device}}", (), (0, 2)) for command in TO_A_DEVICE]
    cases += [Case("compare", command, (words,)) for command, words in COMPARE]
    cases += [Case("GGUF", command, (words,)) for command, words in GGUF]
    cases += [Case("GGUF", f"ppl {{gguf:{name}}} <question>", (words,)) for name, (_, words) in GGUFS.items()]
    for name, (_, words) in ABORTING.items():
        rule = "--fail-if 'kl_mean > 0.5'"  # which would give 1
        cases.append(Case("GGUF", f"compare {{model:good}} {{gguf:{name}}} <question> {rule}", (words,), process=True))
    cases += [Case("tasks", command, (words,) if words else ()) for command, words in TASKS]
    cases += [Case("runs", line % f"run:{name}", ()) for name in RUNS for line in RUN_COMMANDS]
    cases += [Case("runs", f"{PPL} <question> --out {{run:{name}}}", (), (0, 2)) for name in RUNS]
    cases += [Case("references", f"compare {{reference:{name}}} {{model:good}}", ()) for name in REFERENCES]
    cases += [Case("base logits", f"compare {{kld:{name}}} {{model:good}}", ()) for name in KLDS]
    cases += [Case("journals", f"{RESUMED} {{journal:{name}}}", (), (0, 2), same=True) for name in JOURNALS]
    cases += [Case("writing", command, (words,)) for command, words in WRITING]
    cases += [
        Case("writing", f"{PPL} --corpus rollouts:{{rollouts:{name}}}", ("--fresh|no finished rollouts",))
        for name in ROLLOUTS
    ]
    cases += [Case("fifos", command, (FIFO,)) for command in FIFOS]
    cases += [Case("formerly wrong", command, (words,)) for command, words in FORMERLY_WRONG]
    cases += [Case("formerly wrong", command, (), (0, 2)) for command in NOT_UTF8]
    cases += [Case("faults", command, (words,)) for command, words in FAULTS]
    cases += flag_cases(every)
    cases += [Case("names", command, ()) for command in NOBODY]
    for where in ("Ollama's models", "the cache"):
        cases.append(Case("names", "ppl ollama:x --text abc", (), streams=f"with {where} at nobody's"))
    cases += [Case("outputs", command, (), (0, 2)) for command in OUTPUTS]
    for number, name in enumerate(RECORDS):
        if every or name != "many-groups":  # two thousand files
            commands = f"report {{record:{name}}}", f"report {{record:{name}}} -o {{nothing-here}}"
            cases += [
                Case("records", command, (), (0, 2)) for command in (commands if every else commands[number % 2 :][:1])
            ]
    if every:
        cases += [Case("limits", command, (), streams="in 6 GB of memory") for command in LIMITED]
        cases.append(Case("limits", f"{PPL} --corpus -", (), streams="with endless input"))
    if every:
        cases += [Case("serve", command, (words,), seconds=60) for command, words in WITH_VLLM]
    cases += [Case("streams", command, words, codes, streams=how) for command, how, codes, words in STREAMS]
    return sorted(cases, key=lambda case: case.group)
