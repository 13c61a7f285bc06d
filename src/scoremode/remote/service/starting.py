"""The command line of stock ``vllm serve`` in score mode, and its environment. Does not import vLLM until it must."""

from __future__ import annotations

import json
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import zip_longest
from typing import Any, NoReturn

from scoremode.console.streams import is_quiet
from scoremode.core.arguments import read_key, secret_on_command_line, user_path
from scoremode.core.disk.manifests import is_secret
from scoremode.core.engine.options import HUB_TOKEN
from scoremode.core.models.facts import hub_config, read_config, resolve
from scoremode.core.models.names import EMBEDDED
from scoremode.engines.vllm import plugin, support
from scoremode.engines.vllm.start import (
    can_plan_ahead,
    choose_dtype,
    cpu_defaults,
    quantization_of,
    ranks_of,
    runner_defaults,
)
from scoremode.engines.vllm.wire import KEY
from scoremode.errors import InputError, OptionError, shortened
from scoremode.remote.service.access import KEYS, digest_of

PLUGINS_FROM = (0, 26)  # the first version with endpoint plugins
MIDDLEWARE = "scoremode.remote.service.endpoint.ScoreMiddleware"  # for older ones
WORDS = "SCOREMODE_SERVICE_WORDS"  # in the environment: the server's module and its arguments, for this process
ACCESS = "scoremode.remote.service.access.Access"
ENDPOINT_GROUP = "vllm.endpoint_plugins"
OTHER_GROUPS = tuple(f"vllm.{kind}_plugins" for kind in ("general", "platform", "stat_logger", "io_processor"))
OURS = {
    *("runner", "convert", "task", "pooler_config", "override_pooler_config", "additional_config"),
    *("skip_tokenizer_init", "headless", "omni", "divergence", "most_heads_mib", "most_body_mib", "most_windows"),
}
SWITCHES = {"kv_sharing_fast_prefill", "enforce_eager", "trust_remote_code", "skip_tokenizer_init", "headless", "omni"}
PORT = 8000  # vLLM's own default
READY = "scoremode: the self-test passed"  # in the server's log
VLLM_KEY = "VLLM_API_KEY"  # a key may be there instead


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """The options that ``scoremode serve`` takes itself; all others are passed on to vLLM."""

    head: str = "exact"
    head_kernel: str | None = None
    allow_untested: bool = False
    api_key_env: tuple[str, ...] = ()  # environment variables with the keys of clients


@dataclass(frozen=True, slots=True)
class Command:
    """The command to start: its words, and its changes of the environment."""

    words: list[str]  # Python, -m, a module, one of "serve" and "--model", the model, flags
    environment: dict[str, str]  # changes
    address: str
    model: str  # the name to ask for


def read_flags(arguments: Sequence[str]) -> dict[str, str | None]:
    """vLLM's flags by name, as far as they matter here; None for a flag without a value."""
    flags: dict[str, str | None] = {}
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            key = name.lstrip("-").replace("-", "_").split(".")[0]
            follows = key not in SWITCHES and not following.startswith("--")
            flags[key] = value if equals else following if follows else None
    return flags


def refuse_secrets(arguments: Sequence[str]) -> None:
    """Refuse flags with a secret for a value, such as ``--api-key``: anybody on the machine may list command lines."""
    flags = [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")]
    for flag in filter(is_secret, flags):
        instead = HUB_TOKEN if flag.endswith("token") else f"export it, and give the variable's name: {flag}-env NAME"
        raise secret_on_command_line(flag, instead)


def command(model: str, options: ServiceOptions, arguments: Sequence[str]) -> Command:
    """The command line for a model. Whatever cannot work is refused here, before anything is loaded."""
    refuse_secrets(arguments)
    keys = [read_key(variable) or "" for variable in options.api_key_env]
    installed = support.installed_version()
    support.check_version(installed, options.allow_untested)
    support.check_plugin()
    support.check_head(options.head, options.head_kernel)
    if model.startswith("-") or not model:
        raise OptionError("the model comes first", fix="give scoremode serve MODEL, then flags")
    flags = read_flags(arguments)
    _refuse(flags)
    host, port = flags.get("host") or "localhost", _port(flags)
    name, folder = flags.get("served_model_name") or model, _folder(model, flags.get("revision"))
    name_flag = ["--served-model-name", model] if model == EMBEDDED and name == model else []
    settings = [*arguments, *name_flag, *_score_mode(folder, flags, options)]
    argv, environment = [*_program(folder), *settings], _environment(flags)
    _check_with_vllm([folder, *settings], environment)
    if support.version_numbers(installed) >= PLUGINS_FROM:
        environment["VLLM_PLUGINS"] = _plugins()
    else:
        argv += ["--middleware", MIDDLEWARE]
    if keys:
        environment |= {KEYS: ",".join(digest_of(key.encode()) for key in keys), VLLM_KEY: ""}
    argv += ["--middleware", ACCESS]  # the last one is the outermost
    shown = "localhost" if host in ("0.0.0.0", "::") else host
    scheme = "https" if flags.get("ssl_certfile") else "http"
    return Command(argv, environment, f"{scheme}://{shown}:{port}", name)


def _folder(model: str, revision: str | None) -> str:
    """The folder of the model; a name on the hub is returned as it is, because vLLM fetches the model."""
    folder = user_path(model)
    on_hub = model.count("/") == 1 and not model.startswith((".", "/", "~")) and not folder.exists()
    if on_hub:
        read_config(hub_config(model, revision))
        return model
    folder = resolve(model)
    read_config(folder)
    return str(folder)


def _port(flags: dict[str, str | None]) -> int:
    """The port to listen on, which must be free: vLLM tries to bind it only after it has loaded for a minute."""
    text = flags.get("port", str(PORT)) or ""
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 1 << 16):
        raise OptionError(f"--port {text} is not a port", fix=f"give a number from 1 to 65535, as in --port {PORT}")
    host = flags.get("host") or ""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, int(text)))
    except OSError as error:
        where = f"--host {host} --port {text}" if host else f"--port {text}"
        raise OptionError(f"nothing can listen at {where} ({error.strerror})", fix="give another --port") from None
    return int(text)


def _refuse(flags: dict[str, str | None]) -> None:
    for name in OURS & flags.keys():
        raise OptionError(
            f"--{name.replace('_', '-')} cannot be given: score mode sets it, or a service has no use for it",
            fix="leave it out; scoremode compare REFERENCE MODEL --engine vllm measures KL",
        )
    for name in flags.keys() & {"model", "config"}:
        raise OptionError(f"--{name} is not passed on to vLLM", fix="name the model first, and give flags one by one")
    arguments: dict[str, Any] = {name: True if value is None else value for name, value in flags.items()}
    for name in ("prefill_context", "pipeline", "tensor", "data"):
        size = str(arguments.get(f"{name}_parallel_size", 1))
        if not (size.isascii() and size.isdecimal() and len(size) < 6 and int(size) > 0):
            raise OptionError(f"--{name.replace('_', '-')}-parallel-size is not a number of ranks", fix="give a number")
    arguments.pop("data_parallel_size", None)  # the engine in one process refuses it; a server has it
    support.check_arguments({name: value for name, value in arguments.items() if name not in support.OURS})


def _check_with_vllm(arguments: list[str], environment: dict[str, str]) -> None:
    """Has vLLM read the flags and the model's config as its server will, which would take minutes to refuse them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))

    try:
        from vllm.entrypoints.launchers import cli_args as serving
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai import cli_args as serving
    parser = serving.make_arg_parser(FlexibleArgumentParser())
    parser.error, variables = refuse, dict(os.environ)
    os.environ.update(environment)
    try:
        parsed = parser.parse_args(arguments)
        parsed.model = parsed.model_tag
        serving.validate_parsed_serve_args(parsed)
        AsyncEngineArgs.from_cli_args(parsed).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        reason = " ".join(str(error).split()).partition(" [type=")[0]  # behind it, pydantic shows its own objects
        raise OptionError(f"vLLM refuses this ({shortened(reason, 300)})", fix="change it, or leave it out") from None
    finally:  # vLLM sets some, for an engine in this process
        os.environ.clear()
        os.environ.update(variables)


def _program(model: str) -> list[str]:
    """The words for ``vllm serve``. vLLM's CPU build lacks that command, so its server's module is run instead."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def _score_mode(model: str, flags: dict[str, str | None], options: ServiceOptions) -> list[str]:
    """The flags of score mode. The engine in one process has the same settings: see engines/vllm/start.py."""
    from vllm.platforms import current_platform

    on_cpu, trusted = current_platform.is_cpu(), "trust_remote_code" in flags
    if on_cpu:
        support.check_int4_on_cpu(quantization_of(model, trusted), fix="start it on a GPU")
        support.check_bfloat16_on_cpu(flags.get("dtype"))
    pooler = {"task": "token_classify", "seq_pooling_type": "LAST", "tok_pooling_type": "ALL"}
    settings = {"exact": options.head == "exact", "head_bytes": 0, "head_kernel": options.head_kernel}
    arguments = ["--runner", "pooling", "--convert", "embed", "--pooler-config", json.dumps(pooler)]
    arguments += ["--additional-config", json.dumps({KEY: settings})]
    arguments += ["--hf-overrides", json.dumps({"head_dtype": "model", **_overrides(flags)})]
    if flags.get("dtype") in (None, "auto"):
        arguments += ["--dtype", choose_dtype(model, on_cpu, trusted)]
    if "max_num_batched_tokens" not in flags:
        arguments += _batch_tokens(flags)
    switches = {
        "enable-prefix-caching": True,
        "enable-chunked-prefill": True,
        "enforce-eager": on_cpu and int(flags.get("pipeline_parallel_size") or 1) == 1,
        "async-scheduling": not on_cpu and can_plan_ahead(flags),
    }
    for name, is_wanted in switches.items():
        key = name.replace("-", "_")
        if is_wanted and not {key, f"no_{key}"} & flags.keys():
            arguments.append(f"--{name}")
    return arguments


def _batch_tokens(flags: dict[str, str | None]) -> list[str]:
    """The flag for as many tokens per batch as the engine in one process has: a server's default suits generation."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    tokens = EngineArgs.get_batch_defaults(ranks_of(flags))[0][UsageContext.LLM_CLASS]
    return ["--max-num-batched-tokens", str(tokens)]


def _overrides(flags: dict[str, str | None]) -> dict[str, Any]:
    """The user's own overrides, to be merged with ours: vLLM would use only the last of two such flags."""
    if "hf_overrides" not in flags:
        return {}
    try:
        overrides = json.loads(flags["hf_overrides"] or "")
    except (ValueError, RecursionError):
        overrides = None
    if not isinstance(overrides, dict):
        raise OptionError("--hf-overrides is not a JSON object", fix="give it as --hf-overrides '{\"name\": value}'")
    return overrides


def _environment(flags: dict[str, str | None]) -> dict[str, str]:
    from vllm.platforms import current_platform

    defaults = {"VLLM_NO_USAGE_STATS": "1", **runner_defaults()}
    if current_platform.is_cpu():
        defaults |= cpu_defaults(ranks_of(flags) * int(flags.get("data_parallel_size") or 1))
    chosen = {name: value for name, value in defaults.items() if name not in os.environ}
    return {**chosen, plugin.SWITCH: "1"}


def _plugins() -> str:
    """The names of all plugins to load: vLLM loads endpoint plugins only if named, and then only named plugins."""
    if not any(point.name == support.PLUGIN_NAME for point in entry_points(group=ENDPOINT_GROUP)):
        raise InputError(
            "vLLM does not see the routes of scoremode",
            fix="install scoremode again with pip: its entry points changed",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        names = [*filter(None, allowed.split(",")), support.PLUGIN_NAME]
    else:
        names = [point.name for group in OTHER_GROUPS for point in entry_points(group=group)] + [support.PLUGIN_NAME]
    return ",".join(dict.fromkeys(names))


def become(made: Command) -> NoReturn:
    """Replace this process by one that has the environment of the server, and runs it: signals reach it."""
    environment = {
        **made.environment,
        WORDS: json.dumps(made.words[2:]),
        plugin.PARENT: str(os.getpid()),  # it stays when the process becomes another program
        "SCOREMODE_SERVICE_INSTANCE": uuid.uuid4().hex,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    argv = [sys.executable, "-m", "scoremode", "serve", made.words[4], *(["--quiet"] if is_quiet() else [])]
    os.execve(argv[0], argv, {**os.environ, **environment})
