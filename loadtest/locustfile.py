"""Load tests of token-streaming servers with Locust: `locust -f loadtest/locustfile.py --host 127.0.0.1:8001`.

`--target` and `--rate` choose among these users, and `--help` behind it lists all options.
"""

from tokenstream_loadtest.under_locust.users import OpenAIUser, OpenLoopUser, TokenstreamUser

__all__ = ["OpenAIUser", "OpenLoopUser", "TokenstreamUser"]
