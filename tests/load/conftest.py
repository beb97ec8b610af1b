"""The load tests' own tests use the server of the other real-server tests."""

from server.conftest import client, info, server

__all__ = ["client", "info", "server"]
