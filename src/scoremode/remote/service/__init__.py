"""Score mode as a service: routes in stock ``vllm serve``, for clients that have no model of their own.

client ──POST /v1/scoremode/score──▶ endpoint.py ──▶ scorer.py ──PoolingParams──▶ vLLM ──lines──▶ client
         ids, rows, targets           requests.py     many windows at once          pooler.py       every column

``starting.py`` is the command line that starts the service. The other files are loaded only inside vLLM's front end.
"""
