"""The engine: continuous batching of language-model requests on one device.

It knows tensors and tokens. It knows nothing of Triton; `model.py` beside this package is the only adapter.
"""

import os

# OpenMP's threads must not spin between steps: sender, server and client need the cores. Read when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
