"""Files and folders that are wrong in one way each, by the name that cases call them."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.gguf_files import gguf_of
from tests.hostile.gguf_inputs import ABORTING, GGUFS
from tests.makers import VOCABULARY, make_tiny_model

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 12
QUESTION = ("--text", TEXT, "--context-length", "48", "--stride", "24")  # what every good run and reference was asked
DEEP = "[" * 100_000 + "]" * 100_000
Damage = Callable[[Path], None]


# ── the good ones ────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Stock:
    """A model, runs, an interrupted run, a reference and base logits that nothing is wrong with, made once."""

    model: Path
    run: Path  # finished: ppl table:uniform
    other_run: Path  # finished: another text
    model_run: Path  # finished: ppl MODEL
    partial: Path  # the same question as model_run, interrupted
    reference: Path
    perplexity: float  # of model_run
    rollouts: Path  # finished: texts of table:uniform
    kld: Path  # base logits of the model
    gguf: Path  # the model as a GGUF file
    compared: Path  # the runs of compare table:uniform table:successor
    records: Path  # its record

    @staticmethod
    def make(folder: Path) -> Stock:
        from scoremode.cli.main import main
        from scoremode.core.verbs.ppl import ppl
        from scoremode.core.verbs.reference import reference
        from scoremode.studies.rollouts.rollouts import rollouts

        asked: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
        model = make_tiny_model(folder / "model", adds_bos=False)
        ppl("table:uniform", out=folder / "run", **asked)
        ppl("table:uniform", text="another text", out=folder / "other-run")
        scored = ppl(str(model), out=folder / "model-run", batch_tokens=48, **asked)
        interrupted(str(model), folder / "partial", asked)
        reference(str(model), folder / "reference", **asked)
        rollouts("table:uniform", ["ab", "cd"], samples=2, temperature=1, max_tokens=4, out=folder / "rollouts")
        places = ["--out", str(folder / "compared"), "--records", str(folder / "records")]
        with contextlib.redirect_stdout(io.StringIO()):
            main(["compare", "table:uniform", "table:successor", "--text", "abcdef", *places])
        kld = folder / "base.kld"
        reference(str(model), kld=kld, text=TEXT, context_length=32)
        return Stock(
            model,
            folder / "run",
            folder / "other-run",
            folder / "model-run",
            folder / "partial",
            folder / "reference",
            scored.perplexity.value,
            folder / "rollouts",
            kld,
            gguf_of(model, folder / "good.gguf"),
            folder / "compared",
            folder / "records",
        )


def interrupted(model: str, out: Path, asked: dict[str, Any]) -> None:
    """A run that was stopped with Ctrl-C after a few windows."""
    from scoremode.core.verbs.ppl import ppl

    def stop(done: int, _total: int) -> None:
        if done > 200:
            raise KeyboardInterrupt

    try:
        ppl(model, out=out, progress=stop, batch_tokens=48, **asked)
    except KeyboardInterrupt:
        return
    raise AssertionError("the run ended before it was stopped")


# ── ways to damage a file ────────────────────────────────────────────────────────────────────────────────────────────
def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 64)


def flipped(path: Path, share: float = 0.5) -> None:
    """One bit, at a share of the file's length."""
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    path.write_bytes(bytes(data))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_fifo(path: Path) -> None:
    """A pipe with a name, which nobody writes into."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def holding(content: str | bytes) -> Damage:
    def write(path: Path) -> None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def endless(path: Path) -> None:
    """64 GiB of zeros in one line, which take no space on the disk."""
    with path.open("wb") as file:
        file.truncate(1 << 36)


def file_of(name: str, damage: Damage) -> Damage:
    """That damage to one file of a folder."""
    return lambda folder: damage(folder / name)


def edited(name: str, *keys: str, to: Any = None) -> Damage:
    """A JSON file of a folder with one value replaced; with a value removed where ``to`` is REMOVED."""

    def edit(folder: Path) -> None:
        file = folder / name
        document = json.loads(file.read_bytes())
        place = document
        for key in keys[:-1]:
            place = place[key]
        if to is REMOVED:
            del place[keys[-1]]
        else:
            place[keys[-1]] = to
        file.write_text(json.dumps(document))

    return edit


REMOVED: Any = object()


# ── texts and pairs: name -> content ─────────────────────────────────────────────────────────────────────────────────
def _parquet(columns: dict[str, Any], then: Damage | None = None) -> Damage:
    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), path)
        if then:
            then(path)

    return write


def _chat(*messages: Any) -> str:
    return json.dumps({"messages": list(messages)}) + "\n"


FILES: dict[str, Damage] = {
    "good.txt": holding(TEXT),
    "é.txt": holding(TEXT),
    "empty.txt": holding(""),
    "one-byte.txt": holding("x"),
    "latin1.txt": holding("na\xefve text".encode("latin1")),
    "long.txt": holding("word " * 3000),
    "empty.jsonl": holding(""),
    "blank.jsonl": holding("\n\n  \n"),
    "not-json.jsonl": holding('{"text": "good"}\nnot json\n'),
    "number.jsonl": holding("17\n"),
    "deep.jsonl": holding(DEEP + "\n"),
    "no-text.jsonl": holding('{"title": "x"}\n'),
    "text-empty.jsonl": holding('{"text": ""}\n'),
    "later-number.jsonl": holding('{"text": "good"}\n{"text": 5}\n'),
    "bad-utf8.jsonl": holding(b'{"text": "ab\xff"}\n'),
    "chat.jsonl": holding(_chat({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})),
    "chat-no-content.jsonl": holding(_chat({"role": "user"})),
    "chat-null.jsonl": holding(_chat({"role": "user", "content": None})),
    "chat-image.jsonl": holding(_chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})),
    "chat-part.jsonl": holding(_chat({"role": "user", "content": [{"text": "x"}]})),
    "empty.parquet": holding(""),
    "no-text.parquet": _parquet({"title": ["x"]}),
    "pairs.jsonl": holding('{"prompt": "ab", "target": "cd"}\n'),
    "answer.jsonl": holding('{"prompt": "abc", "answer": "d"}\n'),
    "no-prompt.jsonl": holding('{"target": "x"}\n'),
    "no-target.jsonl": holding('{"prompt": "x"}\n'),
    "number-prompt.jsonl": holding('{"prompt": 5, "target": "x"}\n'),
    "null-prompt.jsonl": holding('{"prompt": null, "target": "x"}\n'),
    "empty-target.jsonl": holding('{"prompt": "x", "target": ""}\n'),
    "no-targets.jsonl": holding('{"prompt": "x", "targets": []}\n'),
    "text-targets.jsonl": holding('{"prompt": "x", "targets": "yz"}\n'),
    "second-bad.jsonl": holding('{"prompt": "ab", "target": "cd"}\n{"prompt": "ab"}\n'),
    "half-pair-target.jsonl": holding('{"prompt": "x", "target": "\\ud800"}\n'),
    "notes.jsonl": holding("my own notes, not results\n"),
    "endless.txt": endless,
    "endless.jsonl": endless,
    "endless.json": endless,
    "endless.parquet": endless,
}


def a_link_to_text(path: Path) -> None:
    path.with_name("linked.txt").write_text(TEXT)
    path.symlink_to(path.with_name("linked.txt"))


def a_device(path: Path) -> None:
    """Null once more; a link to it where only root may make devices."""
    if os.getuid() == 0:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    else:
        path.symlink_to(os.devnull)


def _a_foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")


def _mixed_folder(path: Path) -> None:
    """A text and a conversation, which cannot be one corpus."""
    path.mkdir()
    (path / "good.txt").write_text("a good text")
    (path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")


def _a_folder_of_mine(*names: str) -> Damage:
    """Files of a user's own under names that scoremode might write."""

    def make(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text('{"scoremode": "0.1.0", "notes": "mine; scoremode made none of it"}\n')

    return make


TABLES = ("table_uniform", "table_successor", "table:uniform", "table:successor")
PLACES: dict[str, Damage] = {
    "my-records": _a_folder_of_mine("record.json", *(f"{name}.json" for name in TABLES)),
    "my-runs": _a_folder_of_mine(*(f"{name}/record.json" for name in (*TABLES, "baseline"))),
    "my-evaluations": _a_folder_of_mine(*(f".eval_results/{name}.yaml" for name in TABLES)),
    "my-temporaries": _a_folder_of_mine(".scoremode-x.tmp", ".scoremode-0123456789abcde.tmp", ".scoremode-mine.tmp"),
    "nothing-here": lambda path: None,
    "empty-folder": lambda path: path.mkdir(),
    "mixed-folder": _mixed_folder,
    "foreign-folder": _a_foreign_folder,
    "link-to-text": a_link_to_text,
    "a-device": a_device,
}

# ── models: name -> what is done to a copy of a good one ─────────────────────────────────────────────────────────────
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def _header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """The header of the weights rewritten; the tensors behind it stay."""

    def rewrite(folder: Path) -> None:
        file = folder / WEIGHTS
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        changed = change(header)
        text = changed if isinstance(changed, bytes) else json.dumps(changed or header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return rewrite


def _tensors(change: Callable[[dict[str, Any]], None]) -> Damage:
    """The weights saved again after a change to them."""

    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def _nan(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def _more_ids(folder: Path) -> None:
    """A tokenizer with a word that the model has no row for."""
    file = folder / TOKENIZER
    document = json.loads(file.read_bytes())
    document["added_tokens"].append(
        dict(document["added_tokens"][0], id=VOCABULARY + 500, content="fox", special=False)
    )
    file.write_text(json.dumps(document))


def _other_vocabulary(folder: Path) -> None:
    shutil.rmtree(folder)
    make_tiny_model(folder, adds_bos=False, vocab_size=VOCABULARY + 64)


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


def _an_id_of(number: int) -> Damage:
    def change(folder: Path) -> None:
        document = json.loads((folder / TOKENIZER).read_bytes())
        document["added_tokens"].append(dict(document["added_tokens"][0], id=number, content="fox"))
        (folder / TOKENIZER).write_text(json.dumps(document))

    return change


LOOP = "{{% for i in range(99999) %}}{}{{% endfor %}}"
DOUBLED = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
MODELS: dict[str, Damage] = {
    "good": lambda folder: None,
    "no-config": file_of(CONFIG, removed),
    "config-empty": file_of(CONFIG, emptied),
    "config-cut": file_of(CONFIG, halved),
    "config-list": file_of(CONFIG, holding("[]")),
    "config-deep": file_of(CONFIG, holding(DEEP)),
    "config-deep-inside": file_of(CONFIG, holding(f'{{"x": {"[" * 500}{"]" * 500}}}')),
    "config-binary": file_of(CONFIG, holding(bytes(range(256)))),
    "config-folder": file_of(CONFIG, a_folder),
    "context-1": edited(CONFIG, "max_position_embeddings", to=1),
    "config-no-type": edited(CONFIG, "model_type", to=REMOVED),
    "config-unknown-type": edited(CONFIG, "model_type", to="nobody-knows-this"),
    "config-type-number": edited(CONFIG, "model_type", to=5),
    "config-vocabulary-text": edited(CONFIG, "vocab_size", to="many"),
    "config-vocabulary-less": edited(CONFIG, "vocab_size", to=200),
    "config-width-less": edited(CONFIG, "hidden_size", to=32),
    "config-width-text": edited(CONFIG, "hidden_size", to="wide"),
    "config-layers-fewer": edited(CONFIG, "num_hidden_layers", to=1),
    "config-heads-zero": edited(CONFIG, "num_attention_heads", to=0),
    "config-heads-five": edited(CONFIG, "num_attention_heads", to=5),
    "config-fifo": file_of(CONFIG, a_fifo),
    "weights-fifo": file_of(WEIGHTS, a_fifo),
    "tokenizer-fifo": file_of(TOKENIZER, a_fifo),
    "no-weights": file_of(WEIGHTS, removed),
    "weights-empty": file_of(WEIGHTS, emptied),
    "weights-cut": file_of(WEIGHTS, halved),
    "weights-lengthened": file_of(WEIGHTS, lengthened),
    "weights-folder": file_of(WEIGHTS, a_folder),
    "weights-text": file_of(WEIGHTS, holding("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")),
    "weights-huge-header": file_of(WEIGHTS, holding(struct.pack("<Q", 2**60) + b"{}")),
    "weights-pickled": _pickled,
    "header-deep": _header(lambda _: DEEP.encode()),
    "tensor-missing": _tensors(lambda tensors: tensors.pop("lm_head.weight")),
    "tensor-nan": _tensors(_nan),
    "no-tokenizer": _no_tokenizer,
    "tokenizer-empty": file_of(TOKENIZER, emptied),
    "tokenizer-cut": file_of(TOKENIZER, halved),
    "tokenizer-list": file_of(TOKENIZER, holding("[]")),
    "tokenizer-deep": file_of(TOKENIZER, holding(DEEP)),
    "tokenizer-escape": file_of(TOKENIZER, holding('{"version": "\x1b[2J"}')),
    "tokenizer-config-cut": file_of("tokenizer_config.json", halved),
    "tokenizer-config-deep": file_of("tokenizer_config.json", holding(DEEP)),
    "tokenizer-more-ids": _more_ids,
    "tokenizer-dropout": edited(TOKENIZER, "model", "dropout", to=0.1),
    "tokenizer-length-text": edited("tokenizer_config.json", "model_max_length", to="x"),
    "template-broken": file_of("chat_template.jinja", holding("{% for m in %}")),
    "template-huge": file_of("chat_template.jinja", holding("{{ 'x' * 2000000000 }}")),
    "template-loops": file_of("chat_template.jinja", holding(LOOP.format(LOOP.format(LOOP.format(""))))),
    "template-half-pair": file_of("chat_template.jinja", holding("{{ '\\ud800' }}")),
    "tokenizer-doubling": edited(TOKENIZER, "normalizer", to={"type": "Sequence", "normalizers": [DOUBLED] * 40}),
    "tokenizer-id-large": _an_id_of(2**31),
    "config-endless": file_of(CONFIG, endless),
    "tokenizer-endless": file_of(TOKENIZER, endless),
    "template-escapes": file_of("chat_template.jinja", holding("{{ ''.__class__.__mro__[1].__subclasses__() }}")),
    "other-vocabulary": _other_vocabulary,
}


# ── run folders ──────────────────────────────────────────────────────────────────────────────────────────────────────
MANIFEST, SCORES = "manifest.json", "scores.parquet"


def _resealed(folder: Path, change: Callable[[Any], Any]) -> None:
    """Other columns, under a new hash and a new seal."""
    import pyarrow.parquet as pq

    from scoremode.core.disk.files import file_sha256
    from scoremode.core.disk.manifests import sealed

    pq.write_table(change(pq.read_table(folder / SCORES)), folder / SCORES)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["seal"]
    manifest["scores_sha256"] = file_sha256(folder / SCORES)
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))


def _entropy_of_1e300(table: Any) -> Any:
    import pyarrow as pa

    values = [1e300, *table.column("entropy").to_pylist()[1:]]
    where = table.schema.get_field_index("entropy")
    return table.set_column(where, table.schema.field("entropy"), pa.array(values, pa.float64()))


RUNS: dict[str, Damage] = {
    "scores-impossible": lambda folder: _resealed(folder, _entropy_of_1e300),
    "scores-fewer": lambda folder: _resealed(folder, lambda table: table.slice(1)),
    "scores-fifo": file_of(SCORES, a_fifo),
    "manifest-fifo": file_of(MANIFEST, a_fifo),
    "manifest-removed": file_of(MANIFEST, removed),
    "manifest-folder": file_of(MANIFEST, a_folder),
    "scores-removed": file_of(SCORES, removed),
    "scores-empty": file_of(SCORES, emptied),
    "scores-cut": file_of(SCORES, halved),
    "scores-flipped": file_of(SCORES, flipped),
    "scores-folder": file_of(SCORES, a_folder),
    "scores-text": file_of(SCORES, holding("not parquet")),
}
ENDLESS_RUNS: dict[str, Damage] = {"manifest-endless": file_of(MANIFEST, endless)}
REFERENCES: dict[str, Damage] = {
    f"{name}-{damage.__name__}": file_of(name, damage)
    for name in ("reference.json", MANIFEST, SCORES)
    for damage in (removed, emptied, halved, flipped, a_folder)
} | {
    "reference.json-deep": file_of("reference.json", holding(DEEP)),
    "reference.json-list": file_of("reference.json", holding("[]")),
}


def _record(statistics: dict[str, Any] | None = None, **fields: Any) -> Damage:
    """A record with other fields, under a seal that is right."""

    def edit(folder: Path) -> None:
        (path,) = folder.iterdir()
        _edit_record(path, statistics or {}, fields)

    return edit


def _edit_record(path: Path, statistics: dict[str, Any], fields: dict[str, Any]) -> None:
    from scoremode.core.disk.manifests import SEAL, sealed

    found = json.loads(path.read_text())
    del found[SEAL]
    found["statistics"] |= statistics
    path.write_text(json.dumps(sealed(found | fields)))


def _many_groups(folder: Path) -> None:
    (path,) = folder.iterdir()
    for number in range(2000):
        copied = shutil.copyfile(path, folder / f"{number}.json")
        _edit_record(copied, {}, {"corpus_sha256": f"{number:064x}"})


def _a_record_of_mlx_kld(version: Any) -> Damage:
    def write(folder: Path) -> None:
        (folder / "other.json").write_text(
            json.dumps({"schema_version": version, "teacher": {}, "student": {}, "kld": {}})
        )

    return write


def _not_utf8(folder: Path) -> None:
    (path,) = folder.iterdir()
    path.rename(folder / "\udcff.json")


RECORDS: dict[str, Damage] = {
    "name-long": _record(name="x" * 20_000),
    "name-longer": _record(name="あ" * 100_000),
    "sentence-long": _record(sentence="x" * 1_000_000),
    "notes-many": _record(notes=["x"] * 100_000),
    "format-long": _record(format="x" * 100_000),
    "targets-huge": _record({"targets": 1 << 62}),
    **{f"{n}-{v}": _record({n: v}) for n in ("same_top", "kl_mean", "ppl_ratio") for v in (1e308, -1e308, 5e-324)},
    **{
        f"{n}-{v}": _record(None, **{n: v})
        for n in ("bits_per_weight", "weight_bytes")
        for v in (5e-324, 1e308, 1 << 62, -1, 0)
    },
    **{f"schema-{v}": _a_record_of_mlx_kld(v) for v in (2, "1", None)},
    "schema-list": _a_record_of_mlx_kld([]),
    "schema-object": _a_record_of_mlx_kld({}),
    "not-utf8": _not_utf8,
    "endless": lambda folder: endless(folder / "endless.json"),
    "fifo": lambda folder: a_fifo(folder / "fifo.json"),
    "many-groups": _many_groups,
}
KLDS: dict[str, Damage] = {damage.__name__: damage for damage in (removed, emptied, halved, lengthened, a_folder)} | {
    "text": holding("not logits")
}


JOURNALS: dict[str, Damage] = {
    "emptied": emptied,
    "halved": halved,
    "lengthened": lengthened,
    "deep": holding(DEEP),
    "fifo": a_fifo,
    "text": holding("not a journal\n"),
    "zeros": holding(b"\0" * 4096),
    **{f"flipped-{i}": partial(flipped, share=i / 7) for i in range(8)},
}


# ── by name ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _texts(change: Callable[[dict[str, list[Any]]], Any]) -> Damage:
    """Other texts, with a manifest that says so: its hash and its seal are right."""

    def rewrite(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from scoremode.core.disk.files import file_sha256
        from scoremode.core.disk.manifests import SEAL, sealed

        table = pq.read_table(folder / "texts.parquet")
        columns = table.to_pydict()
        change(columns)
        same = list(columns) == table.schema.names
        pq.write_table(pa.table(columns, schema=table.schema if same else None), folder / "texts.parquet")
        found = json.loads((folder / "rollouts.json").read_text())
        found["texts_sha256"] = file_sha256(folder / "texts.parquet")
        del found[SEAL]
        (folder / "rollouts.json").write_text(json.dumps(sealed(found)))

    return rewrite


def _first(column: str, value: Any) -> Damage:
    return _texts(lambda columns: columns[column].__setitem__(0, value))


def _edited_manifest(folder: Path) -> None:
    path = folder / "rollouts.json"
    path.write_text(path.read_text().replace(": 4,", ": 5,"))


ROLLOUTS: dict[str, Damage] = {
    "no-manifest": file_of("rollouts.json", removed),
    "manifest-cut": file_of("rollouts.json", halved),
    "manifest-list": file_of("rollouts.json", holding("[1]")),
    "manifest-deep": file_of("rollouts.json", holding(DEEP)),
    "manifest-edited": _edited_manifest,
    "no-texts": file_of("texts.parquet", removed),
    "texts-cut": file_of("texts.parquet", halved),
    "texts-flipped": file_of("texts.parquet", flipped),
    "texts-of-another-kind": _texts(lambda columns: columns.pop("finish")),
    "one-logprob-less": _first("logprob", [0.0]),
    "logprob-above-0": _first("raw_logprob", [0.5] * 4),
    "logprob-nan": _first("raw_logprob", [math.nan] * 4),
    "texts-fifo": file_of("texts.parquet", a_fifo),
    "manifest-fifo": file_of("rollouts.json", a_fifo),
    "id-too-large": _first("ids", [10**9, 2, 3, 4]),
    "id-below-0": _first("ids", [-1, 2, 3, 4]),
    "no-prompt": _first("prompt_ids", []),
    "another-finish": _first("finish", "tired"),
    "not-sorted": _first("prompt", 7),
}


def make_input(name: str, folder: Path, stock: Stock) -> Path:
    """The input that a case calls ``name``, made afresh in a folder: ``good.txt``, ``model:config-cut``, ``run:…``."""
    kind, _, which = name.rpartition(":")
    path = folder / name.replace(":", "-")
    if not kind:
        (FILES | PLACES)[name](path)
        return path
    kinds: dict[str, tuple[Path, dict[str, Damage]]] = {
        "model": (stock.model, MODELS),
        "run": (stock.run, RUNS | ENDLESS_RUNS),
        "record": (stock.records, RECORDS),
        "reference": (stock.reference, REFERENCES),
        "journal": (stock.partial, JOURNALS),
        "rollouts": (stock.rollouts, ROLLOUTS),
        "kld": (stock.kld, KLDS | {"good": lambda path: None}),
        "gguf": (
            stock.gguf,
            {key: damage for key, (damage, _) in (GGUFS | ABORTING).items()} | {"good": lambda path: None},
        ),
        "stock": (getattr(stock, which.replace("-", "_"), stock.run), {which: lambda folder: None}),
    }
    good, damages = kinds[kind]
    if kind in ("kld", "gguf"):
        path = path.with_suffix(f".{kind}")
    (shutil.copytree if good.is_dir() else shutil.copyfile)(good, path)
    damages[which](path / "partial.journal" if kind == "journal" else path)
    return path
