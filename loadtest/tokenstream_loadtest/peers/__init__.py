"""Other servers, installed beside us and driven by the same workload in turn on the same machine: `make bench-peers`.

Each is set up in an environment of its own in the cache folder; none is changed, and what cannot be installed is left
out and said so. It does not know how a server works, only how it is installed, started and asked.
"""
