"""gRPC, loaded without its EventEngine, whose threads cost as much CPU per token again as all the rest of a client.

The choice is gRPC's environment variable, which is read once, when gRPC is loaded: whoever has set it, or has loaded
gRPC before, has chosen. It is taken back, so that no child process (a Triton server) inherits it.
"""

from __future__ import annotations

import os

_VARIABLE, _CHOICE = "GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener"

if _VARIABLE in os.environ:
    import grpc
else:
    os.environ[_VARIABLE] = _CHOICE
    try:
        import grpc
    finally:
        del os.environ[_VARIABLE]

__all__ = ["grpc"]
