"""Perplexity of a quantized model on WikiText-2 with a sliding window, with the kernels that vLLM uses to serve it.

    python examples/quantized_wikitext2_vllm.py MODEL-W4A16 [--wikitext2 wiki.test.raw]
    python examples/quantized_wikitext2_vllm.py                         the embedded model and text: no download, no GPU

Needs vLLM: see docs/vllm.md. Compressed-tensors checkpoints declare how they are quantized; --quantization is for
checkpoints that do not (awq, gptq). examples/make_checkpoints.py makes small ones.
"""

from __future__ import annotations

import argparse

import scoremode as sm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--wikitext2", metavar="FILE", help="wiki.test.raw; without it, and with a MODEL: from the hub")
    parser.add_argument("--quantization")
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--max-windows", type=int, help="only the first N windows")
    given = parser.parse_args()

    embedded = given.model == "smollm2-135m" and given.wikitext2 is None
    corpus = f"wikitext2:{given.wikitext2}" if given.wikitext2 else "python-docs" if embedded else "wikitext2"
    run = sm.ppl(
        given.model,
        engine="vllm",
        corpus=corpus,
        num_samples=1 if embedded else None,
        method="sliding-once",
        context_length=given.context_length,
        stride=given.stride,
        max_windows=given.max_windows,
        quantization=given.quantization,
        tensor_parallel_size=given.tensor_parallel_size,
    )
    m = run.manifest
    print(f"perplexity     {run.perplexity}")
    print(f"bits per byte  {run.bits_per_byte}")
    print(f"targets        {len(run.scores):,} of {m['corpus']}")
    print(f"computed by    vLLM {m['versions'].get('vllm')}, {m['dtype']}, head {m['head']}, {m['device']}")
    print(f"quantization   {m['engine_settings']['quantization']}")


if __name__ == "__main__":
    main()
