"""Tokens on disk: the same as in memory, made once, whole or not at all, made again if they are damaged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.cache.kept_tokens import kept_tokens
from scoremode.core.text.documents import Document
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.core.text.tokens import TokenBlock, Tokens, TokenStream, tokenize
from scoremode.core.verbs.model import LazyModel
from scoremode.errors import CorpusError
from tests import forked

BYTES = ByteTokenizer()
KEY = {"corpus": "abc", "special": True}
COLUMNS = (
    *("ids", "doc_starts", "char_end", "byte_len", "word_starts", "doc_bytes", "doc_words", "joined_at"),
    "target_mask",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Text(TokenStream):
    """Documents, and how often they were cut into tokens."""

    def __init__(self, *documents: Document) -> None:
        super().__init__(documents, BYTES, special=True)
        self.made = 0

    def __iter__(self) -> Iterator[TokenBlock]:
        self.made += 1
        return super().__iter__()


def document(text: str) -> Document:
    return Document([text])


def assert_equal(found: Tokens, wanted: Tokens) -> None:
    for name in COLUMNS:
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.tolist() == other.tolist(), name
    assert found.notes == wanted.notes


TEXTS = [
    Text(document("naïve text\n" * 900), document(""), document("b")),
    Text(Document(["joined texts"], joined_at=(7, 12))),
    Text(Document(["chat"], scored_spans=((0, 2),)), Document(["more"], scored_spans=((1, 3),))),
    Text(document(" " * 70_000 + "x")),
    Text(),
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_kept_is_what_was_made(text: Text, cache: Path) -> None:
    wanted = text.in_memory()
    made, again = (kept_tokens(KEY, text) for _ in range(2))
    assert_equal(made, wanted)
    assert_equal(again, wanted)
    assert text.made == 2  # once in memory, once on disk
    for_me_alone = kept_tokens(None, text)
    assert_equal(for_me_alone, wanted)


def test_another_key_is_another_entry(cache: Path) -> None:
    first, second = Text(document("one")), Text(document("two"))
    kept_tokens(KEY, first)
    found = kept_tokens({**KEY, "special": False}, second)
    assert bytes(found.ids.tolist()) == b"two"
    assert sm.cache(kind=("texts",))["totals"]["texts"]["entries"] == 2


@pytest.mark.parametrize("file", ["ids.bin", "byte_len.bin", "doc_starts.bin", "tokens.json"])
@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone"])
def test_damage_is_found_and_the_tokens_are_made_again(
    file: str, damage: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Text(document("some text " * 300))
    wanted = kept_tokens(KEY, text)
    known = wanted.ids.tolist()
    (path,) = cache.glob(f"texts/*/{file}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # not written over: this process has mapped it
    if damage != "gone":
        path.write_bytes(bytes(data) if damage == "flipped" else bytes(data[:-1]))
    again = kept_tokens(KEY, text)
    assert (again.ids.tolist(), wanted.ids.tolist(), text.made) == (known, known, 2)
    if (file, damage) != ("tokens.json", "gone"):
        assert "is damaged" in capsys.readouterr().err
    kept_tokens(KEY, text)
    assert (text.made, capsys.readouterr().err) == (2, "")


def test_a_manifest_of_another_text_is_not_believed(cache: Path) -> None:
    first = Text(document("one"))
    kept_tokens(KEY, first)
    (path,) = cache.glob("texts/*/tokens.json")
    manifest = json.loads(path.read_text())
    manifest["key"]["corpus"] = "another"
    path.write_text(json.dumps(manifest))
    kept_tokens(KEY, first)
    assert first.made == 2


def test_a_text_that_fails_leaves_nothing(cache: Path) -> None:
    def documents() -> Iterator[Document]:
        yield document("x" * 500_000)
        raise CorpusError("the text ends early", fix="mend it")

    with pytest.raises(CorpusError, match="ends early"):
        kept_tokens(KEY, TokenStream(documents(), BYTES, special=True))
    assert not list(cache.glob("texts/*/*.bin"))


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(parents=True)
    (cache / "texts").write_text("a file where a folder should be")
    found = kept_tokens(KEY, Text(document("text")))
    assert bytes(found.ids.tolist()) == b"text"
    assert "for this command alone" in capsys.readouterr().err


# ── whole processes ──────────────────────────────────────────────────────────────────────────────────────────────────
SCRIPT = """
import sys, scoremode as sm
print(sm.plan("table:uniform", corpus=sys.argv[1])["plan_digest"])
"""


def started(corpus: Path) -> subprocess.Popen[str]:
    return forked.Popen(
        [sys.executable, "-c", SCRIPT, str(corpus)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    path = tmp_path / "long.txt"
    path.write_text("".join(f"Zeile {i} über den Fluß\n" for i in range(120_000)), encoding="utf-8")
    return path


def whole_way(path: Path) -> str:
    """The digest of the same plan, with tokens that were made at once and in memory."""
    from scoremode.core.plan.build import make_plan
    from scoremode.core.plan.recipes import find_method

    tokens = tokenize([document(path.read_text(encoding="utf-8"))], BYTES, special=True)
    return make_plan(find_method("sliding-once"), tokens).digest


def test_processes_that_are_killed_leave_nothing_wrong(long_text: Path, cache: Path) -> None:
    wanted = whole_way(long_text)
    for _ in range(3):
        child = started(long_text)
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline and not list(cache.glob("texts/*/ids.bin")):
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.communicate()
    out, err = started(long_text).communicate(timeout=120)
    assert (out.strip(), err) == (wanted, "")
    assert sm.cache(kind=("texts",))["entries"][0]["contents"] != "unfinished"


def test_two_processes_make_the_tokens_once(long_text: Path, cache: Path) -> None:
    both = [started(long_text), started(long_text)]
    answers = [child.communicate(timeout=120) for child in both]
    assert [out.strip() for out, _ in answers] == [whole_way(long_text)] * 2
    assert sm.cache(kind=("texts",))["totals"]["texts"]["entries"] == 1
    assert not list(cache.glob("texts/*/.lock"))


def test_a_changed_file_is_another_text(long_text: Path, cache: Path) -> None:
    before = sm.plan("table:uniform", corpus=long_text)
    with long_text.open("a", encoding="utf-8") as file:
        file.write("more\n")
    after = sm.plan("table:uniform", corpus=long_text)
    assert after["tokens"] == before["tokens"] + 5
    assert sm.cache(kind=("texts",))["totals"]["texts"]["entries"] == 2


def test_a_file_that_changes_before_its_words_are_read_again_is_refused(long_text: Path) -> None:
    asked = LazyModel.named("table:uniform", None, {}, None).ask({"corpus": long_text})
    assert [one.read() for one in asked.documents] == [long_text.read_text(encoding="utf-8")]
    long_text.write_text("something else")
    with pytest.raises(CorpusError, match="was changed"):
        [one.read() for one in asked.documents]


def test_a_short_text_is_not_kept(cache: Path) -> None:
    sm.plan("table:uniform", text="short " * 1_000)
    assert not (cache / "texts").exists()


def test_texts_are_listed_pruned_and_limited(long_text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sm.plan("table:uniform", corpus=long_text)
    (entry,) = sm.cache(kind=("texts",))["entries"]
    assert sm.cache("prune", older_than=0, kind=("texts",))["freed"] == entry["size"]
    assert not list(cache.glob("texts/*"))
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", str(entry["size"] + 1_000) + "B")
    for number in range(3):
        with long_text.open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
        sm.plan("table:uniform", corpus=long_text)
    assert sm.cache(kind=("texts",))["totals"]["texts"]["entries"] == 1
