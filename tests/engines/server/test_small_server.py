"""The server engine against a small real server whose answers are known exactly, well-behaved and not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.cli.main import main
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, find_engine
from scoremode.core.plan.question import Question
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.core.verbs.model import LazyModel
from scoremode.engines.server import link
from scoremode.engines.server.engine import AHEAD
from scoremode.engines.server.forms import FORMS, WrongAnswerError
from scoremode.engines.server.link import Link
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, MethodError, ModelError, OptionError, ScoremodeError
from tests.engines.server.small_server import OPENED, SmallServer, sharp_logits, spoiled

TEXT = "Every byte is a token — naïve, 東京, 👩‍🔬. " * 24
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 100, "patience": 20}


@pytest.fixture
def served() -> Iterator[SmallServer]:
    with SmallServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other quickly."""
    monkeypatch.setattr(link, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(link, "LONGEST_DELAY", 0.1)


def truth(server: SmallServer, **question: Any) -> Any:
    """The same question to the table itself, in this process."""
    return sm.ppl("table:uniform", engine=TableEngine(server.logits), **{**QUESTION, **question, "patience": None})


def ask(server: SmallServer, **more: Any) -> Any:
    return sm.ppl(server.model, engine=server.address, fresh=True, **{**QUESTION, **more})


def assert_exact(run: Any, server: SmallServer) -> None:
    wanted = truth(server)
    np.testing.assert_allclose(run.scores.logprob, wanted.scores.logprob, rtol=0, atol=1e-12)
    assert run.plan_digest == wanted.plan_digest


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_scores_are_those_of_the_table(served: SmallServer) -> None:
    run = ask(served)
    assert_exact(run, served)
    assert run.manifest["not_measured"] == ["rank", "entropy", "top", "top_logprob"]
    assert run.manifest["versions"]["server"] == "1.0"
    known = run.manifest["engine_settings"]
    assert (known["model"], known["root"], known["system_fingerprint"]) == ("small", "org/small", "small-1.0-abcd")
    assert known["form"] == "prompt_logprobs"
    word, context, tokenized = run.manifest["model_notes"]
    assert "no client can see" in word
    assert "scores do not depend on tokens more than 12 tokens before" in context  # a table sees one
    assert tokenized == "tokenized by the server"


def test_echo_where_there_is_no_prompt_logprobs(served: SmallServer) -> None:
    served.forms = ("echo",)
    run = ask(served)
    assert_exact(run, served)
    assert run.manifest["engine_settings"]["form"] == "echo"
    assert "scored by echo" in " ".join(run.manifest["model_notes"])
    served.names_ids = False  # to which tokens do its scores belong?
    with pytest.raises(EngineError, match="does not score prompts"):
        ask(served)


def test_probability_zero_is_no_number_of_the_server(served: SmallServer) -> None:
    logits = sharp_logits()
    logits[:, ord("k")] = -np.inf
    served.logits = logits
    run = ask(served)
    assert_exact(run, served)
    assert np.isneginf(run.scores.logprob).sum() == TEXT.count("k") > 0
    assert any("probability zero" in note for note in run.manifest["notes"])


def test_places_in_the_text_are_those_of_a_local_tokenizer(served: SmallServer) -> None:
    tokenizer = choose("small", served.address).subject.tokenizer
    for text in (TEXT, "", "a", "👩‍🔬"):
        ours, theirs = tokenizer.encode(text, special=True), ByteTokenizer().encode(text, special=True)
        for name in ("ids", "char_start", "char_end", "touches"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert tokenizer.decode([72, 105]) == "Hi"


def test_prob(served: SmallServer) -> None:
    found = sm.prob("small", engine=served.address, prompt="ab", targets=["c", "dé"])
    wanted = sm.prob("table:uniform", engine=TableEngine(served.logits), prompt="ab", targets=["c", "dé"])
    assert [s.log_prob for s in found] == pytest.approx([s.log_prob for s in wanted], abs=1e-12)
    assert found[0].tokens[0].rank is None


def test_a_session_asks_again_and_sees_another_server(served: SmallServer) -> None:
    with sm.open("small", engine=served.address) as model:
        assert_exact(model.ppl(text=TEXT, context_length=100, fresh=True), served)
        (setting,) = sm.noise(model, text=TEXT[:200]).settings
        assert setting.repeats is not None
        assert setting.repeats.max == 0.0
        served.logits = sharp_logits(1)
        served.fingerprint = "small-1.0-ffff"
        with pytest.raises(EngineError, match=r"system_fingerprint was small-1\.0-abcd and is small-1\.0-ffff"):
            model.ppl(text=TEXT, context_length=100, fresh=True)


def test_the_address_is_not_part_of_a_run_and_the_root_may_be_named_instead(served: SmallServer) -> None:
    first = sm.ppl("org/small", engine=served.address, fresh=True, **QUESTION)
    with SmallServer() as elsewhere:
        again = sm.ppl("small", engine=elsewhere.address + "/v1/", **QUESTION)
        assert again.cached
        assert again.path == first.path
        elsewhere.version = "1.1"
        assert not sm.ppl("small", engine=elsewhere.address, **QUESTION).cached


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_requests_at_a_time_are_bounded_and_used(served: SmallServer) -> None:
    served.delay = 0.05
    ask(served, concurrency=3)
    assert served.most_in_flight == 4  # and the guard's own


def test_answers_do_not_pile_up(served: SmallServer) -> None:
    """However slowly they are taken, few windows more than those in flight are asked for."""
    chosen = choose("small", served.address, {"concurrency": 2})
    asked = LazyModel.of(chosen).ask(Question(text=TEXT, context_length=20))
    with_engine = chosen.plugin.open(chosen.subject, chosen.options, Work())
    before = served.lengths.count(20)
    answers = with_engine.score(asked.plan, np.zeros(len(asked.plan), np.bool_))
    next(answers)
    time.sleep(0.5)
    assert served.lengths.count(20) - before <= 2 * AHEAD + 2 * 2 + 1  # and one window again
    assert len(asked.plan) > 50
    answers.close()  # type: ignore[attr-defined]
    with_engine.close()


def test_windows_that_are_too_long_are_refused_before_any_is_sent(served: SmallServer) -> None:
    with pytest.raises(MethodError, match="longer than the model's 598; give --context-length 598"):
        ask(served, context_length=599)
    before = served.completions
    ask(served, context_length=598)
    assert served.completions > before
    served.max_model_len = None  # it does not say, and refuses nothing
    ask(served, context_length=599)


def test_methods_that_leave_ids_out_are_refused(served: SmallServer) -> None:
    with pytest.raises(EngineError, match="leaves out ids that have no token"):
        ask(served, method="exl3-2026", context_length=64)


# ── trouble that passes ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("trouble", ["status:429", "status:500", "status:503,0", "cut", "drop", "html", "empty"])
def test_trouble_that_passes_changes_nothing(served: SmallServer, trouble: str) -> None:
    """Every third request goes wrong."""
    served.trouble = lambda path, number: (
        trouble if path == "/v1/completions" and number > OPENED and number % 3 == 0 else None
    )
    assert_exact(ask(served, concurrency=1 if trouble in ("html", "empty") else 8), served)


def test_retry_after_is_honoured(served: SmallServer) -> None:
    refused: list[float] = []

    def trouble(path: str, number: int) -> str | None:
        if path == "/v1/completions" and number > OPENED and not refused:
            refused.append(time.monotonic())
            return "status:429,1"
        return None

    served.trouble = trouble
    ask(served, concurrency=1)
    assert time.monotonic() - refused[0] >= 1.0


def test_a_server_that_is_too_slow_is_asked_again(served: SmallServer) -> None:
    served.trouble = lambda path, number: "sleep:1.5" if path == "/v1/completions" and number == OPENED + 2 else None
    assert_exact(ask(served, timeout=0.5), served)


# ── trouble that does not ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("short", "31 positions for 32 tokens"),
        ("long", "33 positions for 32 tokens"),
        ("wrong-id", "not about the token that was sent"),
        ("shifted", "the first token has a score"),
        ("text", "Expected `float`, got `str`"),
        ("true", "Expected `float`, got `bool`"),
        ("positive", "it gives 3.5 as a log-probability"),
        ("choices", "another form"),
        ("list", "another form"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(trouble: str, says: str) -> None:
    ids, link = list(range(32)), Link("http://h", None, timeout=1, patience=0)
    _, honest = SmallServer().complete({"model": "small", "prompt": ids, "prompt_logprobs": 0})
    assert len(FORMS[0].read(link, honest, ids).logprob) == 31
    with pytest.raises((WrongAnswerError, EngineError), match=says):
        FORMS[0].read(link, spoiled(honest, trouble), ids)


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("wrong-id", "gave an answer that does not fit the question: a score is not about the token that was sent"),
        ("nan", "does not answer as an inference server"),
        ("positive", "--logprobs-mode raw_logprobs"),
        ("other-fingerprint", "system_fingerprint was small-1.0-abcd and is another"),
        ("other-model", "model was small and is another"),
        ("html", "not JSON: '<html>"),
        ("empty", "an empty answer"),
        ("deep", "nested too deeply"),
        ("huge", "answers with more than"),
        ("redirect:http://elsewhere.example/v1", "redirects to http://elsewhere.example/v1"),
        ("status:400", "tokens (400: not�[2J now)"),
        ("status:500", "gave no answer for"),
    ],
)
def test_a_wrong_answer_is_one_line_and_loses_nothing(
    served: SmallServer, trouble: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.trouble = lambda path, number: trouble if path == "/v1/completions" and number > OPENED + 12 else None
    words = [
        *("ppl", "small", "--engine", served.address, "--text", TEXT, "--context-length", "100", "--out"),
        str(tmp_path / "o"),
    ]
    assert main([*words, "--concurrency", "2", "--patience", "1"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in line
    served.trouble = lambda path, number: None
    before = served.lengths.count(100)
    assert main([*words, "--json"]) == 0
    run = sm.load(str(tmp_path / "o"))
    assert_exact(run, served)
    again = served.lengths.count(100) - before - 1  # a window is asked again as a check
    assert 0 < again < len(np.unique(run.facts.window)) - 1, "what was scored is not scored again"


@pytest.mark.parametrize("gives", ["positive", "negative"])
@pytest.mark.parametrize("forms", [("prompt_logprobs",), ("echo",)])
def test_logits_are_refused_with_the_flag_to_change(served: SmallServer, gives: str, forms: tuple[str, ...]) -> None:
    served.gives, served.forms = "logits", forms
    served.logits = sharp_logits() - (0 if gives == "positive" else 40)
    with pytest.raises(EngineError, match="does not answer with log-probabilities") as caught:
        ask(served)
    assert "--logprobs-mode raw_logprobs" in caught.value.fix


def test_a_model_that_is_sure_of_nothing_is_noted(served: SmallServer) -> None:
    served.logits = np.zeros((1, 256)).repeat(256, axis=0)
    run = ask(served)
    assert run.perplexity.value == pytest.approx(256)
    assert any("likely, not proven" in note for note in run.manifest["model_notes"])


# ── another server ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("change", ["weights", "version", "root", "name"])
def test_a_server_that_is_started_again_as_another_is_refused_not_mixed(
    served: SmallServer, change: str, tmp_path: Path
) -> None:
    was = served.logits
    served.delay = 0.02

    def start_another() -> None:
        while served.completions < OPENED + 5:
            time.sleep(0.005)
        served.stop()
        served.logits = was if change in ("version", "root") else sharp_logits(7)
        served.version = "2.0" if change == "version" else "1.0"
        served.root = "org/other" if change == "root" else "org/small"
        served.model = "else" if change == "name" else "small"
        served.start()

    other = threading.Thread(target=start_another)
    other.start()
    words = {
        "weights": "other scores",
        "version": "version was 1.0",
        "root": "root was org/small",
    }
    expected = words.get(change, "does not serve 'small' any more|refuses a prompt")
    with pytest.raises(EngineError, match=expected):
        ask(served, concurrency=2, out=tmp_path / "o")
    other.join()
    served.stop()
    served.logits, served.version, served.root, served.model = was, "1.0", "org/small", "small"
    served.start()
    assert_exact(sm.ppl("small", engine=served.address, out=tmp_path / "o", **QUESTION), served)


def test_a_server_that_is_gone_for_a_while(served: SmallServer, tmp_path: Path) -> None:
    served.delay = 0.02

    def interrupt() -> None:
        while served.completions < OPENED + 5:
            time.sleep(0.01)
        served.stop()
        time.sleep(0.7)
        served.start()

    other = threading.Thread(target=interrupt)
    other.start()
    run = ask(served, concurrency=2)
    other.join()
    assert_exact(run, served)


def test_every_pass_is_checked_anew(served: SmallServer) -> None:
    """The engine stays open over both passes of a noise run; the server behind it changes in between."""
    passes: list[int] = []

    def trouble(path: str, number: int) -> str | None:
        passes.append(number)
        if path == "/v1/completions" and number == OPENED + 30:
            served.logits = sharp_logits(3)
        return None

    served.trouble = trouble
    with pytest.raises(EngineError, match="other scores than before"):
        sm.noise("small", engine=served.address, text=TEXT, context_length=100, repeat=3)
    assert max(passes) > OPENED + 30


# ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_server_that_cannot_score_a_text(served: SmallServer) -> None:
    served.forms = ()
    with pytest.raises(
        EngineError, match=r"does not score prompts .*prompt_logprobs: .*; generate: .*; echo: "
    ) as caught:
        ask(served)
    assert "llama-server and Ollama have none of these: score their GGUF file itself" in caught.value.fix


def test_nothing_at_the_address() -> None:
    with SmallServer() as gone:
        address = gone.address
    began = time.monotonic()
    with pytest.raises(EngineError, match="nothing answers at"):
        sm.ppl("small", engine=address, text=TEXT)
    assert time.monotonic() - began < 20  # no second try


def test_a_server_that_is_starting_is_waited_for_with_patience() -> None:
    with SmallServer() as starting:
        pass  # its port is known, and nothing listens there
    begin = threading.Timer(0.5, starting.start)
    begin.start()
    try:
        assert_exact(ask(starting, patience=60), starting)
    finally:
        begin.join()
        starting.stop()


def test_a_proxy_is_used_and_its_password_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://user:verysecret@127.0.0.1:9")
    with pytest.raises(EngineError, match=r"nothing answers at .* check the address and the proxy") as caught:
        sm.ppl("small", engine="http://served.example:1", text=TEXT)
    assert "verysecret" not in str(caught.value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with SmallServer() as served:
        assert_exact(ask(served), served)


# ── the key ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_key_is_sent_and_never_kept(
    served: SmallServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served.key = "sk-verysecret"
    monkeypatch.setenv("SMALL_KEY", served.key)
    words = ["ppl", "small", "--engine", served.address, "--text", TEXT, "--context-length", "100"]
    assert main([*words, "--out", str(tmp_path / "o"), "--api-key-env", "SMALL_KEY"]) == 0
    assert main(["report", str(tmp_path / "o"), "--output", str(tmp_path / "r.html")]) == 0
    said = capsys.readouterr()
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) >= 3
    assert not any(b"verysecret" in data for data in [*kept, said.out.encode(), said.err.encode()])
    assert main(words) == 2
    assert "wants a key" in capsys.readouterr().err
    monkeypatch.setenv("SMALL_KEY", "sk-wrong-one")
    assert main([*words, "--fresh", "--api-key-env", "SMALL_KEY"]) == 2
    said = capsys.readouterr()
    assert "refuses the key" in said.err
    assert "wrong-one" not in said.err  # though the server repeats it
    assert main([*words, "--api-key-env", "sk-typed-here"]) == 2
    assert "typed" not in capsys.readouterr().err


def test_a_redirect_does_not_get_the_key(served: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_KEY", "sk-verysecret")
    with SmallServer() as other:
        served.trouble = lambda path, number: f"redirect:{other.address}{path}"
        with pytest.raises(EngineError, match="redirects to"):
            ask(served, api_key_env="SMALL_KEY")
        assert other.requests == []


# ── the tokenizer ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_local_tokenizer_that_differs_is_refused(served: SmallServer, tiny: Path) -> None:
    with pytest.raises(ModelError, match="the tokenizer here and the server's differ: token 0"):
        sm.ppl("small", engine=served.address, tokenizer=str(tiny), text=TEXT)


def test_a_tokenizer_that_cannot_be_verified_is_noted(served: SmallServer, tiny: Path) -> None:
    served.tokenizes = False
    with pytest.raises(ModelError, match="has no /tokenize"):
        ask(served)
    served.logits = np.zeros((311, 311))
    served.ids = 311
    run = sm.ppl("small", engine=served.address, tokenizer=str(tiny), text="the cat sat", fresh=True)
    assert any("could not be verified" in note for note in run.manifest["model_notes"])


def test_ids_outside_the_vocabulary_are_a_clear_refusal(served: SmallServer, tiny: Path) -> None:
    served.tokenizes = False
    served.ids = 40
    with pytest.raises(ScoremodeError, match="out of vocabulary") as caught:
        sm.ppl("small", engine=served.address, tokenizer=str(tiny), text="the cat sat " * 40, fresh=True)
    assert "--tokenizer" in caught.value.fix


def test_tokens_that_do_not_spell_the_text_are_refused(served: SmallServer) -> None:
    usual = served.tokenize
    served.tokenize = lambda asked: usual({**asked, "prompt": asked["prompt"].lower()})  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="do not spell the text"):
        ask(served)


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "address",
    [
        *("http://", "http://user:pw@host:1", "http://host:99999", "http://host:x", "http://h/?a=b", "http://h/#a"),
        "https://a b",
    ],
)
def test_an_address_that_cannot_be_used(address: str) -> None:
    with pytest.raises(OptionError, match="--engine") as caught:
        sm.ppl("small", engine=address, text=TEXT)
    assert "pw" not in str(caught.value)


def test_an_engine_that_is_an_address_keeps_it() -> None:
    plugin = find_engine("http://localhost:1")
    assert plugin.address == "http://localhost:1"
    assert find_engine(plugin.name).address is None


def test_what_a_server_cannot_do_is_refused_before_it_is_asked(served: SmallServer, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the server engine cannot be compared"):
        sm.compare("table:uniform", "small", engine=served.address, text=TEXT)
    with pytest.raises(OptionError, match="--dtype does not apply to the server engine; leave --dtype out"):
        ask(served, dtype="float32")
    assert served.completions == 0
