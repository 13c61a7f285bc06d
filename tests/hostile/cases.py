"""The table of bad inputs: what is typed, and what the one line must say.

A row is (command, words of the line; a|b is either of them). ``{name}`` is an input of inputs.py, made afresh for the
case; ``<name>`` a value of VALUES that cannot be typed in a table. Unless a row says otherwise the exit code is 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.hostile.gguf_inputs import GGUFS
from tests.hostile.inputs import JOURNALS, KLDS, MODELS, QUESTION, REFERENCES, RUNS

VALUES = {
    "empty": "",
    "space": " ",
    "half-pair": "\ud800",
    "nul": "a\0b",
    "escape": "\x1b[2J",
    "long-name": "n" * 300,
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
    streams: str = ""  # a process of its own, with a stream that is closed or full: see harness.py

    def __str__(self) -> str:
        streams = f" [{self.streams}]" if self.streams else ""
        return f"{self.group}: {self.command or '(nothing)'}{streams}"


FEW = "--batch-tokens 48 --json"  # as the interrupted run was asked
PPL = "ppl table:uniform"
ABC = f"{PPL} --text abcdef"

URIS = [
    (f"{ABC} --out s4://bucket/x", "does not know the scheme s4://"),
    (f"{ABC} --out s3://", "names no bucket"),
    (f"{ABC} --out s3://bucket/a/../b", "an empty part"),
    (f"{ABC} --out s3://key:word@bucket/x", "a user name or a secret"),
    (f"{ABC} --out s3://bucket/x?secret_key=word", "the setting 'secret_key'"),
    (f"{ABC} --out https://example.org/x", "only read"),
    (f"{ABC} --out file://host/x", "three slashes"),
    (f"{PPL} --corpus s4://bucket/x", "does not know the scheme s4://"),
    (f"{PPL} --corpus s3://key:word@bucket/x", "a user name or a secret"),
    (f"{PPL} --corpus memory://nothing/x.txt", "there is no file"),
    (f"{PPL} --corpus memory://nothing/*.txt", "no file matches"),
    (f"{PPL} --corpus http://127.0.0.1:1/x.txt", "the server does not answer"),
    (f"{PPL} --corpus https://127.0.0.1:1/x.txt", "the server does not answer"),
    ("ppl table:uniform --corpus http://127.0.0.1:1/", "the server does not answer"),
    ("prob table:uniform --file http://127.0.0.1:1/x.jsonl", "the server does not answer"),
    ("ppl s3://bucket/model --text abc", "MODEL takes no URI"),
    (f"{ABC} --tokenizer s3://bucket/x", "--tokenizer takes no URI"),
    ("reference table:uniform --text abcdef --kld s3://bucket/x", "--kld takes no URI"),
    ("show memory://nothing/x", "is not a run"),
    ("show s3://key:word@bucket/x", "a user name or a secret"),
    ("report memory://nothing/x -o memory://page.html", "is not a file that can be written|is not a run"),
    ("compare memory://nothing/x table:uniform --text abc", "no finished run or reference"),
    ("tasks a b --tasks arc_easy --out s3://bucket/x", "takes a path of this machine"),
    ("prob table:uniform --prompt a --target b --out s3://", "names no bucket"),
]

REPLICAS = [
    (f"{ABC} --replicas 0", "--replicas 0 leaves nobody to score"),
    (f"{ABC} --replicas -1", "--replicas -1 leaves nobody to score"),
    (f"{ABC} --replicas two", "'two' is not a whole number"),
    (f"{ABC} --replicas 1000000", "--replicas 1000000 is too many"),
    (f"{ABC} --replicas 2 --ray <empty>", "--ray is empty"),
    (f"{ABC} --replicas 2 --ray <space>", "is not an address|is empty"),
    (f"{ABC} --replicas 2 --ray nowhere", "--ray nowhere is not HOST:PORT|Ray, which is not installed"),
    (f"{ABC} --replicas 2 --ray 127.0.0.1:1", "there is no Ray cluster at 127.0.0.1:1|Ray, which is not installed"),
    (f"{ABC} --replicas 2 --ray h:99999", "--ray h:99999 is not HOST:PORT|Ray, which is not installed"),
    (f"{ABC} --ray ray://h:10001", "Ray's client|Ray, which is not installed"),
    (f"{ABC} --gpus-per-replica 1", "give --replicas N as well"),
    (f"{ABC} --replicas 2 --gpus-per-replica 1.5", "neither a share of one nor a whole number"),
    (f"{ABC} --replicas 2 --gpus-per-replica -1", "'-1' is not a number|expected one argument"),
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
    ("serve m --most-windows many", "invalid int value"),
    ("serve m --api-key <empty>", "--api-key is empty"),
    ("serve m --port 80 --api-key", "--api-key is empty"),
    ("serve nowhere", "there is no model or folder 'nowhere'|vLLM is not installed"),
    ("serve {good.txt}", "is a file|vLLM is not installed"),
    ("serve {empty-folder}", "has no config.json|vLLM is not installed"),
    ("serve m --runner generate", "--runner cannot be given|vLLM is not installed"),
    ("serve m --config x.yaml", "--config is not passed on|vLLM is not installed"),
    ("serve m --head-kernel x", "--head-kernel x is not known|vLLM is not installed"),
    ("serve m --kv-sharing-fast-prefill", "skips rows|vLLM is not installed"),
    ("", "VERB"),
    ("pll x", "did you mean 'ppl'"),
    ("cache pruen", "did you mean 'prune'"),
    ("cache prune", "--older-than"),
    ("cache --older-than 30d", "prune"),
    ("cache --dry-run", "prune"),
    ("cache prune --older-than <empty>", "is not an age"),
    ("cache prune --older-than 30", "is not an age"),
    ("cache prune --older-than=-3d", "is not an age"),
    ("cache prune --larger-than 10", "is not a size"),
    ("cache prune --larger-than nanGB", "is not a size"),
    ("cache prune --larger-than <escape>", "is not a size"),
    ("cache prune --larger-than 1GB --larger-than 2GB", "twice"),
    ("cache prune --larger-than 1GB --kind corpora", "corpora"),
    ("<empty>", "command"),
    ("--no-such-flag", "--no-such-flag"),
    ("ppl", "MODEL"),
    ("ppl --text abc", "MODEL"),
    (PPL, "--text"),
    (f"{ABC} --corpus python-docs", "together"),
    (f"{ABC} --dataset x", "together"),
    (f"{PPL} --text <empty>", "--text"),
    (f"{PPL} --text <half-pair>", "UTF-8"),
    (f"{PPL} --text x", "token"),
    (f"{ABC} --contxt-length 5", "--context-length"),
    (f"{ABC} --sride 5", "--stride"),
    (f"{ABC} --jsn", "--json"),
    (f"{ABC} --context-length", "--context-length"),
    (f"{ABC} --context-length 0", "context"),
    (f"{ABC} --context-length -5", "context"),
    (f"{ABC} --context-length 1", "context"),
    (f"{ABC} --context-length many", "--context-length"),
    (f"{ABC} --context-length 1.5", "--context-length"),
    (f"{ABC} --context-length nan", "--context-length"),
    (f"{ABC} --stride 0", "stride"),
    (f"{ABC} --stride -1", "stride"),
    (f"{ABC} --stride x", "--stride"),
    (f"{ABC} --context-length 4 --stride 5", "stride"),
    (f"{ABC} --max-windows -1", "--max-windows"),
    (f"{ABC} --num-samples 0", "--num-samples"),
    (f"{ABC} --num-samples -3", "--num-samples"),
    (f"{ABC} --worst -1", "--worst"),
    (f"{ABC} --method nope", "nope"),
    (f"{ABC} --method gptqq", "gptq"),
    (f"{ABC} --method <empty>", "method"),
    (f"{ABC} --engine nope", "nope"),
    (f"{ABC} --engine vlm", "vllm"),
    (f"{ABC} --engine <empty>", "engine"),
    (f"{ABC} --engine transformers", "table"),
    (f"{ABC} --engine server", "http://HOST:PORT"),
    (f"{ABC} --engine http://", "http://HOST:PORT"),
    (f"{ABC} --engine http://<escape>", "http://HOST:PORT"),
    (f"{ABC} --engine http://127.0.0.1:99999", "http://HOST:PORT"),
    (f"{ABC} --engine http://127.0.0.1:port", "http://HOST:PORT"),
    (f"{ABC} --engine http://me:secret@127.0.0.1:1", "--api-key-env"),
    (f"{ABC} --engine http://127.0.0.1:1", "nothing answers"),
    (f"{ABC} --engine https://127.0.0.1:1/v1", "nothing answers"),
    (f"{ABC} --engine http://127.0.0.1:1 --api-key-env NO_SUCH_VARIABLE", "--api-key-env"),
    (f"{ABC} --engine http://127.0.0.1:1 --concurrency 0", "--concurrency"),
    (f"{ABC} --engine http://127.0.0.1:1 --timeout nan", "--timeout"),
    (f"{ABC} --engine http://127.0.0.1:1 --patience -1", "--patience"),
    (f"{ABC} --engine http://127.0.0.1:1 --dtype float32", "--dtype"),
    (f"{ABC} --api-key-env HOME", "--api-key-env"),
    ("doctor --engine http://127.0.0.1:1", "scoremode ppl"),
    ("plan small --engine http://127.0.0.1:1 --text abc", "nothing answers"),
    ("prob small --engine http://127.0.0.1:1 --prompt a --target b", "nothing answers"),
    ("compare table:uniform small --engine http://127.0.0.1:1 --text abc", "nothing answers at"),
    ("reference small --engine http://127.0.0.1:1 --text abc --out {nothing-here}", "nothing answers|cannot"),
    (f"{ABC} --dtype float16", "--dtype"),
    (f"{ABC} --device cuda", "--device"),
    (f"{ABC} --batch-tokens 5", "--batch-tokens"),
    (f"{ABC} --tensor-parallel-size 2", "--tensor-parallel-size"),
    (f"{ABC} --quantization awq", "--quantization"),
    (f"{ABC} --engine-arg x=1", "--engine-arg"),
    (f"{ABC} --engine-arg nonsense", "NAME=VALUE"),
    (f"{ABC} --engine-arg =5", "NAME=VALUE"),
    (f"{ABC} --head nope", "--head"),
    (f"{ABC} --tokenizer {{empty-folder}}", "--tokenizer"),
    (f"{ABC} --split test", "--split"),
    (f"{ABC} --dataset-config x", "--dataset-config"),
    (f"{ABC} --assistant-only", "--assistant-only"),
    ("ppl table:unifrom --text abc", "uniform"),
    ("ppl table: --text abc", "table"),
    ("methods nope", "nope"),
    ("methods gptqq", "gptq"),
    ("methods <empty>", "method"),
    ("methods gptq hf-stride", "hf-stride"),
    ("engines nope", "nope"),
    ("engines --jsn", "--json"),
    ("doctor --engine nope", "nope"),
    ("doctor --engine <empty>", "engine"),
    ("show", "RUN"),
    ("show a b", "b"),
    ("report {stock:run}", "-o"),
    ("plan table:uniform", "--text"),
    ("plan table:uniform --text abc --context-length 0", "context"),
    ("plan table:uniform --text abcdef --method nope", "nope"),
    ("plan nothing-like-this --text abc", "nothing-like-this"),
    ("noise table:uniform", "--text"),
    ("noise table:uniform --text abcdef --repeat 0", "--repeat"),
    ("noise table:uniform --text abcdef --repeat -1", "--repeat"),
    ("noise table:uniform --text abcdef --vary", "--vary"),
    ("noise table:uniform --text abcdef --vary dtype", "dtype"),
    ("noise table:uniform --text abcdef --vary nope=1,2", "nope"),
    ("noise table:uniform --text abcdef --vary =1", "--vary"),
    ("noise table:uniform --text abcdef --vary batch-tokens=a,b", "batch-tokens"),
    ("noise {model:good} --text abcdef --vary dtype=float32,floot", "floot"),
    ("noise {model:good} --text abcdef --vary dtype=float32 --vary dtype=float64", "twice"),
    ("noise {model:good} --text abcdef --vary head=exact,nope", "nope"),
    ("reference table:uniform --text abcdef", "--out"),
    ("reference {model:good} --out {nothing-here}", "--text"),
    ("ppl {model:good} --text abcdef --dtype float99", "float99"),
    ("ppl {model:good} --text abcdef --device tpu", "tpu"),
    ("ppl {model:good} --text abcdef --device cuda:99", "cuda"),
    ("ppl {model:good} --text abcdef --batch-tokens 0", "--batch-tokens"),
    ("ppl {model:good} --text abcdef --batch-tokens -5", "--batch-tokens"),
    ("ppl {model:good} --text abcdef --head-kernel nope", "nope"),
    ("ppl {model:good} --text abcdef --engine table", "table"),
    ("ppl {model:good} --text abcdef --max-model-len 99", "--max-model-len"),
    ("ppl {model:good} --corpus {long.txt} --context-length 500", "128"),
    ("ppl {model:good} --text abcdef --tokenizer {empty-folder}", "empty-folder"),
    ("ppl {model:good} --text abcdef --tokenizer {nothing-here}", "nothing-here"),
    ("ppl {model:good} --text abcdef --engine vllm --engine-arg runner=generate", "runner"),
    ("ppl {model:good} --text abcdef --engine vllm --engine-arg data_parallel_size=2", "data_parallel_size"),
]

TEXTS = [
    ("{nothing-here}", "nothing-here"),
    ("wikitxt2", "wikitext2"),
    ("wikitext2:{nothing-here}", "nothing-here"),
    ("wikitext2:{empty.txt}", "empty.txt"),
    ("wikitext2:{no-text.parquet}", "no-text.parquet"),
    ("<empty>", ""),
    ("<escape>", ""),
    ("<nul>", ""),
    ("<long-name>", ""),
    ("{empty-folder}", "folder"),
    ("{link-to-nothing}", "link-to-nothing"),
    ("{empty.txt}", "empty.txt"),
    ("{one-byte.txt}", "token"),
    ("{latin1.txt}", "UTF-8"),
    ("{utf16.txt}", "UTF-8"),
    ("{cut-utf8.txt}", "UTF-8"),
    ("{surrogate.txt}", "UTF-8"),
    ("{good.txt} {empty.txt}", "pattern"),
    ("{good.txt} --corpus {good.txt}", "twice"),
    ("{good.txt} --corpus {nothing-here}", "nothing-here"),
    ("{mixed-folder}", "chat"),
    ("{nothing-here}/*.txt", "no file matches"),
    ("{empty-folder}/**/*.txt", "no file matches"),
    ("{empty.jsonl}", "empty"),
    ("{blank.jsonl}", "blank.jsonl"),
    ("{not-json.jsonl}", "line 2"),
    ("{cut.jsonl}", "line 2"),
    ("{list.jsonl}", "line 1"),
    ("{number.jsonl}", "line 1"),
    ("{null.jsonl}", "line 1"),
    ("{deep.jsonl}", "deep.jsonl"),
    ("{deep-text.jsonl}", "deep-text.jsonl"),
    ("{huge-number.jsonl}", "line 1"),
    ("{no-text.jsonl}", "--field"),
    ("{text-number.jsonl}", "line 1"),
    ("{text-null.jsonl}", "line 1"),
    ("{text-empty.jsonl}", "text"),
    ("{later-number.jsonl}", "line 2"),
    ("{bad-utf8.jsonl}", "line 1"),
    ("{half-pair.jsonl}", "line 1"),
    ("{mixed.jsonl}", "row 2"),
    ("{chat-no-content.jsonl}", "content"),
    ("{chat-null-content.jsonl}", "content"),
    ("{chat-number-content.jsonl}", "content"),
    ("{chat-number-role.jsonl}", "role"),
    ("{chat-no-role.jsonl}", "line 1"),
    ("{chat-strings.jsonl}", "line 1"),
    ("{chat-empty.jsonl}", "line 1"),
    ("{chat-text.jsonl}", "line 1"),
    ("{not-parquet.parquet}", "Parquet"),
    ("{empty.parquet}", "empty"),
    ("{cut.parquet}", "Parquet"),
    ("{no-rows.parquet}", "rows"),
    ("{no-text.parquet}", "--field"),
    ("{numbers.parquet}", "row 1"),
    ("{nulls.parquet}", "row 1"),
    ("{bad-utf8.parquet}", "UTF-8"),
    ("{good.txt} --field <empty>", "--field"),
    ("{no-text.jsonl} --field nope", "nope"),
    ("{no-text.jsonl} --field <empty>", "--field"),
    ("{no-text.parquet} --field nope", "nope"),
    ("{good.txt} --assistant-only", "--assistant-only"),
]

MODEL_LINES = {  # words of the line, where more can be asked than that there is one
    "config-layers-fewer": ("layer|tensor",),
    "config-layers-negative": ("layer|tensor",),
    "config-quantization-unknown": ("quantization",),
    "config-quantization-empty": ("quantization",),
    "weights-pickled": ("pickled",),
    "tensor-nan": ("NaN",),
    "tokenizer-more-ids": ("vocabulary",),
}
NOTED = {name for name in MODEL_LINES if name.startswith("config-")}  # a note that says so will do, with exit code 0
NOT_TO_SCORE = {"good", "other-vocabulary", "config-remote-code"}  # nothing is wrong with them alone
ONLY_FOR_CHAT = {name for name in MODELS if name.startswith("template-")}

PROB = "prob table:uniform"
PAIRS = [
    (PROB, "prompt"),
    (f"{PROB} --prompt ab", "target"),
    (f"{PROB} --target ab", "prompt"),
    (f"{PROB} --prompt ab --target <empty>", "target"),
    (f"{PROB} --prompt <half-pair> --target b", "UTF-8"),
    (f"{PROB} --prompt a --target <half-pair>", "UTF-8"),
    (f"{PROB} --prompt <empty> --target ab", "prompt"),
    (f"{PROB} --file {{pairs.jsonl}} --prompt x", "--file"),
    (f"{PROB} --file {{pairs.jsonl}} --target x", "--file"),
    (f"{PROB} --file {{nothing-here}}", "nothing-here"),
    (f"{PROB} --file {{empty-folder}}", "empty-folder"),
    (f"{PROB} --file {{empty.jsonl}}", "empty.jsonl"),
    (f"{PROB} --file {{blank.jsonl}}", "blank.jsonl"),
    (f"{PROB} --file {{not-json.jsonl}}", "line 1"),
    (f"{PROB} --file {{list.jsonl}}", "line 1"),
    (f"{PROB} --file {{number.jsonl}}", "line 1"),
    (f"{PROB} --file {{null.jsonl}}", "line 1"),
    (f"{PROB} --file {{deep.jsonl}}", "line 1"),
    (f"{PROB} --file {{huge-number.jsonl}}", "line 1"),
    (f"{PROB} --file {{bad-utf8.jsonl}}", "line 1"),
    (f"{PROB} --file {{no-prompt.jsonl}}", "line 1"),
    (f"{PROB} --file {{no-target.jsonl}}", "line 1"),
    (f"{PROB} --file {{number-prompt.jsonl}}", "line 1"),
    (f"{PROB} --file {{null-prompt.jsonl}}", "line 1"),
    (f"{PROB} --file {{number-target.jsonl}}", "line 1"),
    (f"{PROB} --file {{empty-target.jsonl}}", "target"),
    (f"{PROB} --file {{no-targets.jsonl}}", "line 1"),
    (f"{PROB} --file {{text-targets.jsonl}}", "line 1"),
    (f"{PROB} --file {{number-targets.jsonl}}", "line 1"),
    (f"{PROB} --file {{second-bad.jsonl}}", "line 2"),
    (f"{PROB} --file {{half-pair-target.jsonl}}", "UTF-8"),
    (f"{PROB} --file {{latin1.txt}}", "line 1"),
    (f"{PROB} --prompt a --target b --leading-space maybe", "--leading-space"),
    (f"{PROB} --prompt a --target b --spanning maybe", "--spanning"),
    (f"{PROB} --prompt a --target b --engine nope", "nope"),
    (f"{PROB} --prompt a --target b --add-bos", "BOS"),
    (f"{PROB} --prompt a --target b --out {{empty-folder}}", "folder"),
    (f"{PROB} --prompt a --target b --out {{nothing-here}}/x/y", "folder"),
    (f"{PROB} --prompt a --target b --out <empty>", "--out"),
    (f"{PROB} --prompt a --target b --out {{notes.jsonl}}", "notes.jsonl"),
    (f"{PROB} --prompt a --target b --out {{good.txt}}/x", "good.txt"),
    (f"{PROB} --prompt a --target b --out {{stock:run}}/manifest.json", "manifest.json"),
    (f"{PROB} --prompt a --target b --out {{foreign-folder}}/thesis.txt", "thesis.txt"),
    (f"{PROB} --file {{pairs.jsonl}} --out {{pairs.jsonl}}", "--file"),
    ("prob nothing-like-this --prompt a --target b", "nothing-like-this"),
    ("prob {model:good} --prompt <empty> --target b", "prompt"),
    ("prob {model:good} --prompt mi --target nd --spanning refuse", "span"),
    ("prob {model:config-cut} --prompt a --target b", "config.json"),
    ("prob {model:no-weights} --prompt a --target b", "weights"),
    ("prob {model:tensor-nan} --prompt a --target b", "NaN"),
    ("prob {model:tokenizer-cut} --prompt a --target b", "tokenizer"),
]

HARNESS = [
    ("lm-eval --tasks arc_easy", "no model was given"),
    ("lm-eval --tasks arc_easy --model_args model=nothing-like-this", "nothing-like-this"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,engine=nope", "nope"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,max_lenght=5", "did you mean 'max_length'"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,max_length=0", "max_length 0"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,prefix_token_id=999", "prefix_token_id 999"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,greedy=perhaps", "greedy=perhaps"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,dtype=float32", "table engine"),
    ("lm-eval --tasks arc_easy --model_args model=table:uniform,out={foreign-folder}", "foreign-folder"),
    ("lm-eval --tasks arc_easy --model_args model={model:config-cut}", "config.json"),
    ("lm-eval --tasks arc_easy --model_args model={model:tokenizer-cut}", "tokenizer"),
    ("lm-eval --tasks arc_easy --model_args model={model:no-weights}", "weights"),
]

PLACES = [
    (f"{PPL} <question> --out {{good.txt}}", "good.txt"),
    (f"{PPL} <question> --out {{good.txt}}/run", "good.txt"),
    (f"{PPL} <question> --out {{foreign-folder}}", "thesis.txt"),
    (f"{PPL} <question> --out {{foreign-folder}} --fresh", "thesis.txt"),
    (f"{PPL} <question> --out {{stock:other-run}}", "another"),
    (f"{PPL} <question> --out {{stock:reference}}", "another"),
    (f"{PPL} <question> --out {{model:good}}", "model-good"),
    (f"{PPL} <question> --out <empty>", "--out"),
    (f"{PPL} <question> --out <nul>", ""),
    (f"{PPL} <question> --out {{nothing-here}}/<long-name>", ""),
    (f"{PPL} <question> --out /proc/nothing/run", "/proc/nothing/run"),
    (f"{PPL} <question> --out {{link-to-nothing}}/x/../y", ""),
    (f"{PPL} <question> --out {{a-device}}", "a-device"),
    ("reference {model:good} --text abc --kld {nothing-here}", "--context-length"),
    ("reference {model:good} <question> --kld {nothing-here} --method gptq", "--method llamacpp"),
    ("reference {model:good} <question> --kld {nothing-here}", "stride"),
    ("reference {model:good} --corpus {good.txt} --kld {good.txt}", "exists"),
    ("reference {model:good} --corpus {good.txt} --kld {empty-folder}", "is a folder"),
    ("reference {model:good} --corpus {good.txt} --kld {nothing-here}/x.kld", "no folder"),
    ("reference {model:good} --corpus {good.txt} --kld {stock:run}/x.kld", "inside a run"),
    ("reference {model:good} --corpus {good.txt} --kld <nul>", "no file name"),
    ("reference {model:good} <question> --out {good.txt}", "good.txt"),
    ("reference {model:good} <question> --out {foreign-folder}", "thesis.txt"),
    ("reference {model:good} <question> --out {stock:run}", "another"),
    ("reference {model:good} <question> --out {foreign-folder} --fresh", "thesis.txt"),
    ("compare {model:good} {stock:model} <question> --out {good.txt}", "good.txt"),
    ("compare {model:good} {stock:model} <question> --report {empty-folder}", "empty-folder"),
    ("compare {model:good} {stock:model} <question> --report {nothing-here}/x.html", "nothing-here"),
    ("compare {model:good} {stock:model} <question> --report {stock:run}/manifest.json", "manifest.json"),
    ("report {stock:run} -o {empty-folder}", "empty-folder"),
    ("report {stock:run} -o {nothing-here}/x.html", "nothing-here"),
    ("report {stock:run} -o <empty>", "-o"),
    ("report {stock:run} -o <nul>", ""),
    ("report {stock:run} -o {stock:other-run}/manifest.json", "manifest.json"),
    ("report {stock:run} -o {stock:other-run}/scores.parquet", "scores.parquet"),
    ("report {stock:run} -o {good.txt}/x.html", "good.txt"),
    ("report {nothing-here} -o {empty-folder}/x.html", "nothing-here"),
    ("report {empty-folder} -o {nothing-here}", "empty-folder"),
    ("report {foreign-folder} -o {nothing-here}", "foreign-folder"),
    ("report {good.txt} -o {nothing-here}", "good.txt"),
    ("report {stock:run} {stock:other-run} -o {nothing-here}", "plan"),
    ("report {stock:run} {nothing-here} -o {empty-folder}/x.html", "nothing-here"),
    ("show {nothing-here}", "nothing-here"),
    ("show {good.txt}", "good.txt"),
    ("show {empty-folder}", "empty-folder"),
    ("show {foreign-folder}", "foreign-folder"),
    ("show {model:good}", "model-good"),
    ("show {link-to-nothing}", "link-to-nothing"),
    ("show <empty>", ""),
    ("show <nul>", ""),
    ("show <escape>", ""),
    ("show {stock:partial}", "unfinished"),
]

TO_A_DEVICE = (f"{PROB} --prompt a --target b --out", "report {stock:run} -o")  # written to or refused, never replaced

COMPARE = [
    ("compare", "BASELINE"),
    ("compare {model:good}", "CANDIDATE"),
    ("compare {model:good} {nothing-here} <question>", "nothing-here"),
    ("compare {nothing-here} {model:good} <question>", "nothing-here"),
    ("compare {model:good} {model:good}", "--text"),
    ("compare table:uniform table:uniform table:uniform --text abcdef", "same name"),
    ("compare {model:good} {model:other-vocabulary} <question>", "vocabular"),
    ("compare {model:good} table:uniform <question>", ""),
    ("compare {model:good} {model:tensor-nan} <question>", "NaN"),
    ("compare {model:tensor-nan} {model:good} <question>", "NaN"),
    ("compare {model:good} {model:no-weights} <question>", "weights"),
    ("compare {model:good} {model:config-layers-fewer} <question>", "layer"),
    ("compare {model:good} {model:tokenizer-cut} <question>", "tokenizer"),
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
    ("compare {kld:good} {model:good} --corpus {good.txt}", "--corpus"),
    ("compare {kld:good} {model:good} --method llamacpp", "--method"),
    ("compare {kld:good} {model:good} --baseline-dtype float32", "--baseline-dtype"),
    ("compare {kld:good} {model:other-vocabulary}", "311 ids and the candidate 375"),
    ("compare {kld:good} table:uniform", "311 ids and the candidate 256"),
    ("compare {kld:good} {stock:run}", "finished run"),
    ("compare {kld:good} {kld:good}", "only be the baseline"),
    ("compare {kld:good}", "CANDIDATE"),
    ("compare {model:good} {kld:good} <question>", "only be the baseline"),
    ("compare {kld:good} {model:good} --out {good.txt}", "good.txt"),
    ("compare {kld:good} {model:good} --json --llamacpp", "--llamacpp"),
    ("compare table:uniform table:successor --text abcdef --fail-if nonsense", "nonsense"),
    ("compare table:uniform table:successor --text abcdef --fail-if <empty>", "rule"),
    ("compare table:uniform table:successor --text abcdef --fail-if 'kl_men > 1'", "kl_mean"),
    ("compare table:uniform table:successor --text abcdef --fail-if 'kl_mean == 1'", "=="),
    ("compare table:uniform table:successor --text abcdef --fail-if 'kl_mean > nan'", "nan"),
    ("compare table:uniform table:successor --text abcdef --fail-if 'kl_mean > 5%'", "0.05"),
    ("compare table:uniform table:successor --text abcdef --fail-if 'kl_mean > 1 maybe'", "maybe"),
    ("compare table:uniform table:successor --text abcdef --json --markdown", "--markdown"),
    ("compare {model:good} {stock:model} <question> --baseline-dtype nope", "nope"),
    ("compare {model:good} {stock:model} <question> --baseline-engine nope", "nope"),
]

GGUF = [
    ("ppl {gguf:good} --text abcdef --dtype float16", "--cache-type-k"),
    ("ppl {gguf:good} --text abcdef --engine transformers", "--engine llamacpp"),
    ("ppl {model:good} --text abcdef --engine llamacpp", "--engine transformers"),
    ("ppl {model:good} --text abcdef --threads 2", "--threads"),
    ("ppl {gguf:good} --text abcdef --cache-type-k q3", "q3"),
    ("ppl {gguf:good} --text abcdef --cache-type-v q8_0", "--flash-attn on"),
    ("ppl {gguf:good} --text abcdef --cache-type-k q8_0", "blocks of 32"),
    ("ppl {gguf:good} --text abcdef --n-ubatch 9 --n-batch 8", "--n-ubatch 9"),
    ("ppl {gguf:good} --text abcdef --tokenizer {empty-folder}", "empty-folder"),
    ("ppl {gguf:good} --corpus {long.txt} --context-length 500", "128"),
    ("ppl nothing-here.gguf --text abcdef", "nothing-here.gguf"),
    ("reference {gguf:good} <question> --out {nothing-here}", "llamacpp engine cannot|hidden states"),
    ("compare {gguf:good} {model:good} <question>", "llamacpp engine cannot|hidden states"),
    ("compare {model:good} {gguf:cut-5} <question>", "not a whole GGUF"),
    ("compare {model:other-vocabulary} {gguf:good} <question>", "vocabular|tokenizer"),
]

ASK = "tasks table:uniform table:uniform"
GONE = "is not installed"  # what every question says where lm-eval is missing
TASKS = [
    ("tasks table:uniform", "CANDIDATE"),
    (ASK, "--tasks"),
    (f"{ASK} --tasks <empty>", "--tasks"),
    (f"{ASK} --tasks ,", "no task"),
    (f"{ASK} --tasks arc_easy --tasks piqa", "twice"),
    (f"{ASK} --tasks arc_esy", f"arc_easy|{GONE}"),
    (f"{ASK} --tasks <escape>", f"no task|{GONE}"),
    (f"{ASK} --tasks no-such-task-*", f"no task|{GONE}"),
    (f"{ASK} --tasks gsm8k", f"generates text|{GONE}"),
    (f"{ASK} --tasks wikitext", f"lm-eval-rolling|{GONE}"),
    (f"{ASK} --tasks arc_easy --limit 0", "--limit 0"),
    (f"{ASK} --tasks arc_easy --limit ten", "--limit"),
    (f"{ASK} --tasks arc_easy --num-fewshot -1", "--num-fewshot"),
    (f"{ASK} --tasks arc_easy --task-data {{nothing-here}}", f"not a folder|{GONE}"),
    (f"{ASK} --tasks arc_easy --task-data {{empty-folder}}", f"arc_easy_test.jsonl|{GONE}"),
    (f"{ASK} --tasks arc_easy --include-path {{nothing-here}}", f"not a folder|{GONE}"),
    (f"{ASK} --tasks arc_easy --fail-if nonsense", "is not a rule"),
    (f"{ASK} --tasks arc_easy --fail-if recovry<1", "recovery"),
    (f"{ASK} --tasks arc_easy --fail-if flips>5%", "write 0.05"),
    (f"{ASK} --tasks arc_easy --fail-if mcnemar<0.01~surely".replace("~", " "), "nothing takes"),
    (f"{ASK} --tasks arc_easy --report /", "folder"),
    (f"{ASK} --tasks arc_easy --json --markdown", "--markdown"),
    (f"{ASK} --tasks arc_easy --engine nope", "nope"),
    (f"{ASK} table:uniform --tasks arc_easy", "same name"),
    ("tasks {stock:run} table:uniform --tasks arc_easy", "holds scores"),
    ("tasks table:uniform {model:no-config} --tasks arc_easy", ""),
]

STREAMS = [
    (f"{PPL} --corpus -", "stdin closed", (2,), ("standard input",)),
    (f"{PPL} <question>", "stdout full", (2,), ("disk is full",)),
    (f"{PPL} <question> --json", "stdout full", (2,), ("disk is full",)),
    (f"{PPL} <question>", "stdout closed", (0, 2), ()),
    (f"{PPL} <question>", "all closed", (0, 2), ()),
    (f"{PPL} --text abc --stride 0", "stderr closed", (2,), ()),
    (f"{PPL} --text abc --stride 0", "stderr full", (2,), ()),
    ("methods --json", "stdout full", (2,), ("disk is full",)),
    ("--help", "stdout full", (2,), ()),
    ("ppl org-that-is-nowhere/model --text abc", "", (2,), ("org-that-is-nowhere/model",)),
]

RUN_COMMANDS = ("show {%s}", "report {%s} -o {nothing-here}", "compare {%s} {stock:run}", "compare {stock:run} {%s}")


def all_cases() -> list[Case]:
    """Every row as a case."""
    cases = [Case("flags", command, (words,)) for command, words in FLAGS]
    cases += [Case("uris", command, (words,)) for command, words in URIS]
    cases += [Case("replicas", command, (words,)) for command, words in REPLICAS]
    cases += [Case("texts", f"{PPL} --corpus {corpus}", (words,)) for corpus, words in TEXTS]
    for name, content in {"empty": b"", "one byte": b"x", "not UTF-8": b"\xff\xfe"}.items():
        words = "UTF-8" if content[:1] == b"\xff" else ""
        cases.append(Case(f"stdin {name}", f"{PPL} --corpus -", (words,), stdin=content))
    for name in [name for name in MODELS if name not in NOT_TO_SCORE | ONLY_FOR_CHAT]:
        codes = (0, 2) if name in NOTED else (2,)
        cases.append(Case("models", f"ppl {{model:{name}}} <question>", MODEL_LINES.get(name, ()), codes))
    for name in ("config-cut", "no-weights", "weights-cut", "header-deep", "tokenizer-cut", "no-config"):
        cases.append(Case("models", f"plan {{model:{name}}} <question>", ()))
        cases.append(Case("models", f"noise {{model:{name}}} <question>", ()))
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
    cases += [Case("tasks", command, (words,) if words else ()) for command, words in TASKS]
    cases += [Case("runs", line % f"run:{name}", ()) for name in RUNS for line in RUN_COMMANDS]
    cases += [Case("runs", f"{PPL} <question> --out {{run:{name}}}", (), (0, 2)) for name in RUNS]
    cases += [Case("references", f"compare {{reference:{name}}} {{model:good}}", ()) for name in REFERENCES]
    cases += [Case("base logits", f"compare {{kld:{name}}} {{model:good}}", ()) for name in KLDS]
    cases += [
        Case("journals", f"ppl {{stock:model}} <question> {FEW} --out {{journal:{name}}}", (), (0, 2), same=True)
        for name in JOURNALS
    ]
    cases += [Case("streams", command, words, codes, streams=how) for command, how, codes, words in STREAMS]
    return sorted(cases, key=lambda case: case.group)
