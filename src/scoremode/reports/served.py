"""A model as it was served: its format, engine and sizes, read from a manifest that was checked when it was opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scoremode.core.engine.registry import all_options
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.reports.numbers import file_size


@dataclass(frozen=True, slots=True)
class ServedPart:
    name: str
    stored_bytes: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.stored_bytes / self.weights


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The known facts of a model's format, engine and size; '' and None stand for unknown ones."""

    format: str
    engine: str
    version: str
    bits_per_weight: float | None
    stored_bytes: int | None
    parts: tuple[ServedPart, ...] = ()
    emulated_bytes: int | None = None  # the size that an emulated quantization would have
    kv_cache: str = ""  # the types of the K/V cache, as in "k f16 v q8_0"

    @property
    def is_emulated(self) -> bool:
        return self.format.startswith("emulated ")

    @property
    def size(self) -> int | None:
        """The bytes of the weights; of an emulated quantization, those that it would have, if they are known."""
        return self.emulated_bytes if self.is_emulated else self.stored_bytes

    @property
    def format_and_body(self) -> str:
        """The format, and the bits of the layers if they are not those of the whole model.

        >>> parts = (ServedPart("body", 500, 1000), ServedPart("embedding", 1000, 1000))
        >>> ServedModel("GGUF Q4_0", "llamacpp", "", 6.0, 1500, parts).format_and_body
        'GGUF Q4_0, 4-bit layers'
        """
        body = next((part.bits_per_weight for part in self.parts if part.name == "body"), None)
        if body is None or self.bits_per_weight is None or abs(body / self.bits_per_weight - 1) < 0.02:
            return self.format
        return f"{self.format}, {body:.2g}-bit layers".removeprefix(", ")

    @property
    def group(self) -> str:
        """The kind of format, without its size, and the engine. Rows of tables and marks of charts are grouped by it.

        >>> ServedModel("GGUF Q4_K_M", "table", "1.0", 4.85, None).group
        'GGUF · table'
        """
        return " · ".join(word for word in (self.format.partition(" ")[0], self.engine) if word) or "not known"

    @property
    def line(self) -> str:
        """Format, engine and its version in one line."""
        engine = f"{self.engine} {self.version}".strip()
        return ", ".join(word for word in (self.format, engine) if word)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": self.format or None,
            "engine": self.engine or None,
            "bits_per_weight": self.bits_per_weight,
            "weight_bytes": self.stored_bytes,
            "emulated_bytes": self.emulated_bytes,
            "kv_cache": self.kv_cache or None,
            "sizes": {
                p.name: {"bytes": p.stored_bytes, "weights": p.weights, "bits_per_weight": p.bits_per_weight}
                for p in self.parts
            }
            or None,
        }


def served(comparison: Comparison) -> ServedModel:
    """The candidate as it was served. The manifest of the comparison takes precedence over that of the run."""
    manifest = comparison.manifest
    sizes = {"weight_bytes": manifest["bytes"]} if manifest.get("bytes") is not None else {}
    return served_manifest({**comparison.candidate.manifest, **manifest, **sizes})


def served_manifest(m: Mapping[str, Any]) -> ServedModel:
    parts = sorted((m.get("sizes") or {}).items())
    return ServedModel(
        m.get("model_format") or "",
        m.get("engine") or "",
        engine_version(m),
        m.get("bits_per_weight") or None,
        m.get("weight_bytes") or None,
        tuple(ServedPart(name, size["bytes"], size["weights"]) for name, size in parts if size),
        m.get("emulated_bytes") or None,
        _cache_words(m.get("engine_settings") or {}),
    )


def _cache_words(settings: Mapping[str, Any]) -> str:
    """The types of the K/V cache in the settings of an engine; '' if they do not say any."""
    parts = {name: option.details.cache_part for name, (_, option) in all_options().items()}
    types = [(part, settings.get(name)) for name, part in parts.items() if part is not None]
    return " ".join(f"{part} {chosen}" for part, chosen in types if chosen and isinstance(chosen, str))


def are_variants(comparisons: Sequence[Comparison]) -> bool:
    """Is any candidate one of several variants of a model, such as types of its K/V cache?"""
    return any(c.candidate.manifest.get("variant") for c in comparisons)


def engine_version(manifest: Mapping[str, Any]) -> str:
    """The version of the engine's own library; '' if the manifest does not say it."""
    versions, engine = manifest.get("versions") or {}, manifest.get("engine")
    return versions.get(engine) or versions.get(f"{engine}-cpu") or ""


def in_order(facts: Sequence[ServedModel]) -> list[int]:
    """Indices in the order of tables: group by group."""
    return [i for members in in_groups(facts).values() for i in members]


def in_groups(facts: Sequence[ServedModel]) -> dict[str, list[int]]:
    """Indices by group, groups in the order in which they appear; inside, from most bits per weight to fewest.

    >>> in_groups([ServedModel(name, "", "", bits, None) for name, bits in (("Q4", 4.8), ("W4", 4.0), ("Q4", 8.5))])
    {'Q4': [2, 0], 'W4': [1]}
    """
    groups: dict[str, list[int]] = {}
    for i, model in enumerate(facts):
        groups.setdefault(model.group, []).append(i)
    for members in groups.values():  # an unknown size comes last
        members.sort(key=lambda i: -(facts[i].bits_per_weight or 0.0))
    return groups


# ── runs and the facts of a served model ──────────────────────────────────────────────────────────────────────────────
def run_key(run: Run) -> object:
    """A key that is equal for two objects of the same run: its folder, or of a run in memory what it says of itself."""
    if run.path is not None:
        return run.path
    parts = (str(run.manifest.get(name)) for name in ("model", "identity", "engine_settings", "metrics"))
    return run.plan_digest, *parts


def distinct_baselines(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The first comparison with each baseline."""
    baselines: dict[object, Comparison] = {}
    for c in comparisons:
        baselines.setdefault(run_key(c.baseline), c)
    return list(baselines.values())


def run_name(run: Run, among: Sequence[Run] = ()) -> str:
    """The model's name, with the text, engine or folder added if the model alone would not tell the runs apart."""
    m = run.manifest
    parts = [str(m.get("model", "run"))]
    for name in ("corpus", "engine", "dtype", "method"):
        if len({str(other.manifest.get(name)) for other in among}) > 1:
            parts.append(str(m.get(name)))
    title = " · ".join(parts)
    twins = [other for other in among if [str(other.manifest.get("model", "run"))] == parts[:1]]
    return f"{title} · {run.path}" if len(parts) == 1 and len(twins) > 1 and run.path else title


def served_facts(m: Mapping[str, Any], model: ServedModel | None = None) -> dict[str, str]:
    """How a model was served: its format and sizes, the engine, its versions, kernels and settings.

    ``model`` has the sizes to show, if they are not those of the manifest.
    """
    settings, model = m.get("engine_settings") or {}, model or served_manifest(m)
    bits = model.bits_per_weight
    stored_as = "size of the file that emulates it" if model.is_emulated else "size of the weights"
    sizes = (("size that it would have", model.emulated_bytes), (stored_as, model.stored_bytes))
    parts = {
        f"size of the {part.name}": f"{part.bits_per_weight:,.3f} bits per weight, {file_size(part.stored_bytes)}, "
        f"{part.weights:,} weights"
        for part in model.parts
    }
    return known(
        {
            "format": m.get("model_format"),
            "bits per weight": None if bits is None else f"{bits:.3f}, all weights together",
            **{label: None if count is None else f"{file_size(count)} ({count:,} bytes)" for label, count in sizes},
            **parts,
            "engine": m.get("engine"),
            "versions": pairs(m.get("versions")),
            "dtype": m.get("dtype"),
            "device": m.get("device"),
            "head": m.get("head"),
            "head kernel": settings.get("head_kernel"),
            "engine settings": pairs({k: v for k, v in settings.items() if k != "head_kernel"}),
        }
    )


def known(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def pairs(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{k} {v}" for k, v in (values or {}).items() if v is not None and v != "")
