"""Texts that are URIs, paths, or only look like one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core import extensions
from scoremode.core.disk.folders import SET_IT, cache_folder, give_another
from scoremode.core.disk.uri import located, parse
from scoremode.core.verbs.outputs import check_output
from scoremode.errors import InputError, OptionError


@pytest.mark.parametrize(
    "text", ["runs/base", "run:1", "2026-11-16T13:42:01/run", "./file:/x", "./C:\\x", "a/b:/c", "/s3:/x", "notes::old"]
)
def test_a_path_stays_a_path(text: str) -> None:
    assert located(text) == Path(text)


@pytest.mark.parametrize(
    "text",
    [
        *("file:/some/x", "file:x", "FILE:/x", "s3:bucket/x", "s3:/bucket/x", "http:/x", "memory:x", "C:\\x", "c:/x"),
        *("simplecache::s3://b/x", "dir::memory://x", "1s://x", "s 3://x", "://x", ":/x", "é://x"),
    ],
)
def test_what_only_looks_like_a_uri_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="neither a URI nor a path") as refused:
        located(text)
    assert "./NAME" in refused.value.fix


def test_a_path_object_that_was_a_uri_is_refused_and_a_secret_is_not_repeated() -> None:
    with pytest.raises(InputError, match="neither a URI nor a path"):
        located(Path("s3://bucket/x"))
    with pytest.raises(InputError) as refused:
        located("simplecache::s3://key:word@bucket/x")
    assert "word" not in str(refused.value)


@pytest.mark.parametrize(
    "setting",
    [
        *("scheme=gopher", "scheme=", "scheme", "anonymous=maybe", "anonymous", "region=a b", "region=../x"),
        *("endpoint_override=gopher://h", "endpoint_override=h:p", "endpoint_override=me@h", "scheme=http&scheme=http"),
    ],
)
def test_a_setting_that_no_server_takes_is_refused(setting: str) -> None:
    with pytest.raises(InputError):
        parse(f"s3://bucket/x?{setting}")


@pytest.mark.parametrize(
    "setting",
    [
        *("scheme=http", "anonymous=true", "region=eu-west-1", "endpoint_override=localhost:9000"),
        *("endpoint_override=http://127.0.0.1:9000", "endpoint_override=[::1]:9000&scheme=http"),
    ],
)
def test_usual_settings_are_taken(setting: str) -> None:
    assert str(parse(f"s3://bucket/x?{setting}")) == f"s3://bucket/x?{setting}"


def test_the_cache_is_a_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", "s3://bucket/cache")
    with pytest.raises(OptionError, match="SCOREMODE_CACHE is a URI"):
        cache_folder()
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    assert give_another(tmp_path / "runs" / "x") == SET_IT
    assert give_another(Path("/elsewhere")) == "give another --out"


def test_without_the_wing_that_opens_them_uris_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extensions, "wings", tuple)
    uri, text = "s3://bucket/run", "some text"
    asked: list[Callable[[], object]] = [
        lambda: sm.load(uri),
        lambda: sm.ppl("table:uniform", text=text, out=uri),
        lambda: sm.ppl("table:uniform", corpus=uri),
        lambda: sm.compare(uri, "table:uniform", text=text),
        lambda: check_output(uri, "-o"),
    ]
    for ask in asked:
        with pytest.raises(InputError, match=f"^{uri}.* cannot be used: this installation of scoremode has no part"):
            ask()
    run = sm.ppl("table:uniform", text=text, out=f"file://{tmp_path}/run")
    assert run.path == str(tmp_path / "run")
