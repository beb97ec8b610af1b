"""HTTP servers for tests that answer from their making to the end of their `with`; what they answer is the test's."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpServer(ThreadingHTTPServer):
    """On a free port of this machine. `url` has no path; `over` is set once it ends, for a handler that waits."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.over = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    def __exit__(self, *error: object) -> None:
        self.close()
