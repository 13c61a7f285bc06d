"""Score mode on stock vLLM: its pooling runner, with a pooler that scores.

engine.py ──PoolingParams──▶ vLLM's scheduler, kernels, tensor parallelism ──hidden states──▶ pooler.py ──▶ engine.py
            (wire.Question)                                                   tap.py + partials.py     (wire.unpack)

Nothing here imports vLLM or torch at module level but what only vLLM's own processes load: pooler.py, tap.py.
"""
