"""Load tests with Locust: it spawns users and shows its page; a process beside it, without gevent, asks the server.

It does not know how a request is asked or judged: that is the rest of the package's.
"""
