"""llama.cpp's own library: its functions, and structs whose layout was checked.

``SCOREMODE_LLAMACPP`` names the file of a libllama. Otherwise a Python package brings it. ``xllamacpp`` comes
with scoremode: built ahead of time, and its library exports llama.cpp's C functions. ``llama-cpp-python`` is
compiled by its user, for this machine or a GPU, and is preferred if it is installed. llama.cpp changes its structs
between releases without a version number in them, so their defaults are read back and compared before anything is done.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
import platform
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from scoremode.core.arguments import user_path
from scoremode.core.disk.files import remembered_sha256
from scoremode.engines.llamacpp import crash_handlers
from scoremode.errors import EngineError, ModelError

OWN_FILE = "SCOREMODE_LLAMACPP"  # the environment variable with the path of a libllama
OWN_BUILD, PREBUILT = "llama-cpp-python", "xllamacpp"  # distributions, in the order of preference
PREBUILT_VERSION = "2026.10.11549"  # as in pyproject.toml
BUILT_HERE = f"{OWN_BUILD}==0.3.36"  # what was tried: pip compiles it with the instructions of this machine
SPARE = 512  # bytes behind a struct: a later release may have more fields there, and gets its own defaults back


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    spare = ("spare", ctypes.c_ubyte * SPARE)
    return type(name, (ctypes.Structure,), {"_fields_": [*fields, spare]})


def _all(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


# the structs of llama.cpp's build 11549, which the pinned xllamacpp contains
ModelParameters = _struct(
    "ModelParameters",
    *_all("devices tensor_buft_overrides", c_void_p),
    *_all("n_gpu_layers split_mode load_mode lazy_mode main_gpu", c_int32),
    *_all("tensor_split progress_callback progress_callback_user_data kv_overrides", c_void_p),
    *_all("vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp", c_bool),
)

ContextParameters = _struct(
    "ContextParameters",
    *_all("n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq", c_uint32),
    *_all("n_threads n_threads_batch", c_int32),
    *_all("ctx_type rope_scaling_type pooling_type attention_type flash_attn_type", c_int),
    *_all("rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow", c_float),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    *_all("cb_eval cb_eval_user_data", c_void_p),
    *_all("type_k type_v", c_int),
    ("moe_cache_size", c_size_t),
    *_all("abort_callback abort_callback_data", c_void_p),
    *_all("embeddings offload_kqv no_perf op_offload swa_full kv_unified", c_bool),
    ("samplers", c_void_p),
    ("n_samplers", c_size_t),
    ("ctx_other", c_void_p),
)


class Batch(ctypes.Structure):
    """Tokens for one decode; the same in all releases that are known."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


# a flag in /proc/cpuinfo -> what llama.cpp calls its kernels that use it
FASTER = {
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
}

# what llama.cpp's defaults have been for years: if they are read elsewhere, the structs are not those of this library
MODEL_DEFAULTS: Mapping[str, Any] = {
    "devices": None,
    "kv_overrides": None,
    "main_gpu": 0,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
}
CONTEXT_DEFAULTS: Mapping[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "op_offload": True,
    "swa_full": True,
    "n_samplers": 0,
}


def _signatures(model: type, context: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The result type and argument types of every function that is used."""
    p = c_void_p
    return {
        "ggml_backend_reg_count": (c_size_t, ()),
        "ggml_backend_load_all_from_path": (None, (c_char_p,)),
        "llama_backend_init": (None, ()),
        "llama_log_set": (None, (p, p)),
        "ggml_set_abort_callback": (p, (p,)),
        "llama_print_system_info": (c_char_p, ()),
        "llama_supports_gpu_offload": (c_bool, ()),
        "llama_model_default_params": (model, ()),
        "llama_context_default_params": (context, ()),
        "llama_model_load_from_file": (p, (c_char_p, model)),
        "llama_model_free": (None, (p,)),
        "llama_model_get_vocab": (p, (p,)),
        "llama_model_is_recurrent": (c_bool, (p,)),
        "llama_model_is_hybrid": (c_bool, (p,)),
        "llama_model_has_encoder": (c_bool, (p,)),
        "llama_model_n_layer": (c_int32, (p,)),
        "llama_model_n_embd": (c_int32, (p,)),
        "ggml_get_name": (c_char_p, (p,)),
        "ggml_nelements": (c_int64, (p,)),
        "ggml_nbytes": (c_size_t, (p,)),
        "ggml_backend_tensor_get": (None, (p, p, c_size_t, c_size_t)),
        "llama_init_from_model": (p, (p, context)),
        "llama_free": (None, (p,)),
        "llama_n_batch": (c_uint32, (p,)),
        "llama_get_memory": (p, (p,)),
        "llama_memory_clear": (None, (p, c_bool)),
        "llama_memory_seq_rm": (c_bool, (p, c_int32, c_int32, c_int32)),
        "llama_decode": (c_int32, (p, Batch)),
        "llama_get_logits": (POINTER(c_float), (p,)),
        "llama_get_logits_ith": (POINTER(c_float), (p, c_int32)),
        "llama_vocab_type": (c_int, (p,)),
        "llama_vocab_n_tokens": (c_int32, (p,)),
        "llama_vocab_bos": (c_int32, (p,)),
        "llama_vocab_eos": (c_int32, (p,)),
        "llama_vocab_is_eog": (c_bool, (p, c_int32)),
        "llama_vocab_get_add_bos": (c_bool, (p,)),
        "llama_vocab_get_add_eos": (c_bool, (p,)),
        "llama_vocab_get_text": (c_char_p, (p, c_int32)),
        "llama_vocab_get_attr": (c_int, (p, c_int32)),
        "llama_tokenize": (c_int32, (p, c_char_p, c_int32, p, c_int32, c_bool, c_bool)),
        "llama_token_to_piece": (c_int32, (p, c_int32, p, c_int32, c_int32, c_bool)),
    }


class _Functions(Protocol):
    def __getattr__(self, name: str) -> Any: ...


LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
ERROR_LEVEL, CONTINUED_LEVEL = 4, 5  # of ggml's log


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    package: str  # the distribution that brought it, or the name of the user's file
    version: str
    call: _Functions  # its functions by their names in llama.h
    complaints: deque[str]  # the last errors that it logged
    kept: tuple[Any, ...]  # what must live as long as the library

    @property
    def kernels(self) -> str:
        """The library's own description of the machine code that it would run here."""
        return str(self.call.llama_print_system_info().decode("utf-8", "replace")).strip().rstrip("|").strip()

    def slowness(self) -> tuple[str, ...]:
        """A note, if the processor has instructions for which this build has no kernels. Only Linux lists them."""
        try:
            machine = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            return ()
        lacking = [name for flag, name in FASTER.items() if flag in machine and f"{name} = 1" not in self.kernels]
        if not lacking:
            return ()
        build = f"llama.cpp of {self.package} {self.version} does not use {' and '.join(lacking)} of this processor"
        unset = f"unset {OWN_FILE} && " if os.environ.get(OWN_FILE) else ""
        return (f"{build}, and is slower than one compiled here: {unset}pip install {BUILT_HERE}",)

    def load(self, path: Path, parameters: Any) -> Any:
        """Loads the model in a file, or its vocabulary alone; ModelError if llama.cpp refuses it."""
        self.complaints.clear()
        with crash_handlers.raw_lines_into(self.complaints):
            model = self.call.llama_model_load_from_file(os.fsencode(path), parameters)
        if not model:
            action = "read the vocabulary of" if parameters.vocab_only else "load"
            raise ModelError(
                f"llama.cpp cannot {action} {path}: {self.complaint() or 'no reason given'}",
                fix="download it again, or install a newer llama.cpp",
            )
        return model

    def complaint(self) -> str:
        """The last errors that llama.cpp logged, in its own words and on one line."""
        return " / ".join(line.strip() for line in self.complaints if line.strip())[-300:]


def freed_with(owner: object) -> ExitStack:
    """A stack of callbacks that free an object of llama.cpp. They run once, with ``owner`` or at exit."""
    stack = ExitStack()
    weakref.finalize(owner, stack.close)
    return stack


def installed() -> tuple[str, str] | None:
    """What brings llama.cpp: a package and its version, or OWN_FILE and a path; None if nothing. Loads nothing."""
    if path := os.environ.get(OWN_FILE):
        return OWN_FILE, path
    for distribution in (OWN_BUILD, PREBUILT):
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return None


def how_to_install() -> str:
    """What to type for a llama.cpp that we can load. Not every platform has the build that comes with scoremode."""
    if sys.platform in ("linux", "darwin") and platform.machine() in ("x86_64", "aarch64", "arm64"):
        return f"pip install {PREBUILT}=={PREBUILT_VERSION}"
    return f"there is no build for {platform.machine()} on {sys.platform}: pip install {BUILT_HERE}, which compiles it"


@cache
def library() -> Library:
    """llama.cpp's library; loaded once for the whole process."""
    source = installed()
    if source is None:
        raise EngineError("llama.cpp is not installed, and it scores GGUF files", fix=how_to_install())
    package, release = source
    try:
        file, model, context = _SOURCES[package]()
        functions = ctypes.CDLL(str(file))
        for name, (result, arguments) in _signatures(model, context).items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError, ImportError) as error:
        raise EngineError(f"llama.cpp of {' '.join(source)} cannot be loaded ({error})", fix=_repair(package)) from None
    check_layout(functions, " ".join(source), _repair(package))
    complaints: deque[str] = deque(maxlen=6)
    log = LOG(lambda level, text, _: _keep_error(complaints, level, text))
    functions.llama_log_set(ctypes.cast(log, c_void_p), None)
    callbacks = (log, *crash_handlers.install(functions))
    _load_back_ends(functions, file)
    functions.llama_backend_init()
    if package == OWN_FILE:
        package, release = file.name, f"sha256 {_sha256_of_all(file)[:16]}"
    return Library(package, release, functions, complaints, callbacks)


def _repair(package: str) -> str:
    """What to type if a library cannot be used."""
    if package == OWN_FILE:
        return f"give the path of a libllama of b11549 or near it (docs/gguf.md), or unset {OWN_FILE}"
    install = how_to_install()
    return install if package == PREBUILT else f"repair it, or pip uninstall {package} and {install}"


def _load_back_ends(functions: Any, file: Path) -> None:
    """Loads the kernels of a build that has them in files of their own, of which it takes the best for this machine."""
    if not functions.ggml_backend_reg_count():
        functions.ggml_backend_load_all_from_path(os.fsencode(file.parent))
    if not functions.ggml_backend_reg_count():
        functions.ggml_backend_load_all_from_path(None)  # where this build looks for them
    if not functions.ggml_backend_reg_count():
        raise EngineError(f"{file} finds no kernels (libggml-cpu*)", fix=f"put them into {file.parent}")


def _sha256_of_all(file: Path) -> str:
    """One sha256 of libllama and ggml's libraries: those in memory, or beside it where the system does not say."""
    maps = Path("/proc/self/maps")
    paths = {Path(line.split(maxsplit=5)[-1]) for line in maps.read_text().splitlines()} if maps.exists() else set()
    ours = {path for path in paths or file.parent.iterdir() if path.name.startswith("libggml")}
    return hashlib.sha256("".join(sorted(map(remembered_sha256, {file, *ours}))).encode()).hexdigest()


def _keep_error(complaints: deque[str], level: int, text: bytes | None) -> None:
    """Keeps the errors that llama.cpp logs; other lines are not for our user."""
    message = (text or b"").decode("utf-8", "replace")
    if level == ERROR_LEVEL:
        complaints.append(message)
    elif level == CONTINUED_LEVEL and complaints and not complaints[-1].endswith("\n"):
        complaints[-1] += message


def _own_file() -> tuple[Path, type, type]:
    return user_path(os.environ[OWN_FILE]).resolve(), ModelParameters, ContextParameters


def _own_build() -> tuple[Path, type, type]:
    """The library of llama-cpp-python, and its structs, which belong to the llama.cpp that it was compiled with."""
    module = importlib.import_module("llama_cpp.llama_cpp")
    return Path(module._lib._name), module.llama_model_params, module.llama_context_params


def _prebuilt() -> tuple[Path, type, type]:
    spec = importlib.util.find_spec("xllamacpp")  # not imported: its own server is not needed
    folders = spec.submodule_search_locations if spec else None
    file = next((f for folder in folders or () for f in Path(folder).glob("xllamacpp*.so")), None)
    if file is None:
        raise OSError("the package contains no library of llama.cpp")
    return file, ModelParameters, ContextParameters


_SOURCES = {OWN_FILE: _own_file, OWN_BUILD: _own_build, PREBUILT: _prebuilt}


def check_layout(functions: Any, name: str, repair: str) -> None:
    """Refuse a library whose structs are not laid out as we know them: its defaults would be read in wrong places."""
    both = (
        ("llama_model_params", functions.llama_model_default_params(), MODEL_DEFAULTS),
        ("llama_context_params", functions.llama_context_default_params(), CONTEXT_DEFAULTS),
    )
    for struct, read, expected in both:
        wrong = [field for field, value in expected.items() if not _is(getattr(read, field, "missing"), value)]
        if wrong:
            raise EngineError(
                f"the llama.cpp of {name} is a release with another {struct} ({', '.join(wrong)})", fix=repair
            )


def _is(read: Any, expected: Any) -> bool:
    """Are the two equal? A null pointer may be read as None or as a pointer object that is false."""
    return not read if expected is None else bool(read == expected)
