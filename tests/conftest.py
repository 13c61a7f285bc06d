"""Models and texts that tests share, and the order of the tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from scoremode import errors
from scoremode.console import streams
from tests.command_line import command, refused  # noqa: F401  # fixtures
from tests.hub import hub  # noqa: F401  # fixtures
from tests.makers import make_small_llama, make_successor_model, make_tiny_model, make_tokenizer
from tests.s3 import bucket, elsewhere, s3_server  # noqa: F401  # fixtures

pytest_plugins = ["tests.skips"]
DATA = Path(__file__).resolve().parent / "data"
os.environ.pop("COLUMNS", None)  # xdist sets it for its workers, and it decides how wide output is
os.environ["SCOREMODE_PROGRESS_SECONDS"] = "3600"  # a slow machine must not change what a test sees
settings.register_profile("any machine", deadline=None)  # nothing is judged by its time
settings.load_profile("any machine")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, all of which an engine fills with zeros when it starts
# what takes longest, in this order: it is started first, so that no process is busy alone at the end
LONGEST = (
    *("engines/vllm/test_quantized", "engines/vllm/test_parallel", "engines/vllm/test_cli"),
    "remote/service/test_service",
    *("engines/server/test_real_server", "engines/vllm/test_smollm2", "engines/vllm/test_compare", "remote/ray/"),
    *("engines/vllm/test_prob", "remote/service/", "engines/vllm/test_", "hostile/", "head/test_fused"),
    *("core/store/test_", "test_wheel", "test_docs", "test_removal", "benchmarks/", "oracles/", "studies/", "remote/"),
    *("engines/", "core/verbs/", "cli/", "reports/test_browser"),
)
# files that start vLLM, in two groups, one process for each: importing vLLM takes long, and engines are shared
VLLM_FIRST = ("engines/vllm/test_quantized", "engines/vllm/test_parallel", "engines/vllm/test_compare")
# files that start Ray themselves: its workers are forked from one process, which imports torch once
RAY = ("remote/ray/test_writing",)
VLLM = ("engines/vllm/", "engines/server/test_real_server", "remote/service/", "cli/test_info.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Names that are not UTF-8 stand in what tests log and print; xdist would end with an internal error."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


def pytest_configure() -> None:
    """A shell's ``&`` makes what it starts ignore Ctrl-C. The tests, and all processes that they start, obey it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _place(item: pytest.Item) -> int:
    name = item.nodeid.removeprefix("tests/")
    return next((i for i, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes the longest files come first; see ``make test``, where each file stays in one."""
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Collecting garbage need not search the libraries and tests that were imported until now."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays in one process, and so does a group of files."""
    from xdist.scheduler import LoadFileScheduling

    class LoadGroups(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.removeprefix("tests/")
            if name.startswith(VLLM_FIRST):
                return "vLLM, first"
            if name.startswith(RAY):
                return "Ray"
            return "vLLM, second" if name.startswith(VLLM) else str(super()._split_scope(nodeid))

    return LoadGroups(config, log)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Environment and handlers of signals, for the next test. Libraries change both.

    The log goes to standard error and errors name flags, as on the command line; ``tests/cli/test_logs.py`` and
    ``tests/test_arguments.py`` say what they do in Python.
    """
    streams.show_log()
    errors.names_flags = True
    environment = dict(os.environ)
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for name in {*os.environ, *environment}:  # only what changed: threads of libraries may be reading the rest
        if (value := environment.get(name)) is None:
            del os.environ[name]
        elif os.environ.get(name) != value:
            os.environ[name] = value
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler and handler is not None:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs and hashes of the tests stay out of the user's cache. The embedded model is slow to make: it comes from it,
    and goes there."""
    from scoremode.core.disk.folders import cache_folder

    models = cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").symlink_to(models)
    before = os.environ.get("SCOREMODE_CACHE")
    os.environ["SCOREMODE_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["SCOREMODE_CACHE"]
    else:
        os.environ["SCOREMODE_CACHE"] = before


@pytest.fixture(scope="session")
def stories() -> Path:
    """stories260K: a real, trained Llama of 1 MB whose tokenizer adds a BOS."""
    return DATA / "stories260K"


@pytest.fixture(scope="session")
def wikitext_file() -> Path:
    """Four articles of WikiText-2's test text, which have six pages. The first is that of the whole text."""
    return DATA / "wiki.test.part.raw"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Llama of random weights: vocabulary 311, context 128, a tokenizer that adds no BOS."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), adds_bos=False)


@pytest.fixture(scope="session")
def tiny_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer that puts a BOS in front."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_bos"), adds_bos=True)


@pytest.fixture(scope="session")
def successor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama built by hand that always predicts the previous id + 1."""
    return make_successor_model(tmp_path_factory.mktemp("successor"))


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four heads, for engines that split it: vocabulary 1003, context 1024."""
    folder = tmp_path_factory.mktemp("llama4h")
    make_tokenizer(folder, adds_bos=False)
    return make_small_llama(folder)
