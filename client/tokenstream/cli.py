"""The console command: loads `commands` and runs it, so that Ctrl-C while it loads is an exit code and no traceback.

For that it imports nothing before the attempt. It does not know what the command does.
"""

INTERRUPTED = 130


def main() -> None:
    """Run the command; SystemExit with its exit code."""
    try:
        from .commands import run

        run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
