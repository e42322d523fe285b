"""The `longspan` command. Every expected failure is one line on stderr and the error's own exit code."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from app.bench import command as bench
from app.errors import LongspanError
from app.planning import command as plan

EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 wrong configuration or arguments, 3 unusable checkpoint, 4 unsuitable machine,
            130 interrupted, 143 terminated, 129 its terminal was closed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    # Not at once: a command may have started a server, which must not outlive it.
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        code: int = options.run(options)
    except LongspanError as error:
        print(f"longspan: {' '.join(error.message.split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("longspan: interrupted", file=sys.stderr)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longspan",
        description="Serve long-context language models on Ray Serve: check a configuration, measure a server,"
        " plan a deployment.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"longspan {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check_parser = commands.add_parser(
        "check",
        help="validate a Serve config file without starting anything",
        description="Validate `args` and `user_config` of every Longspan application of a Serve config file, and the"
        " model folders they name. Prints a summary.",
    )
    check_parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    check_parser.add_argument(
        "--cluster", metavar="ADDRESS", help="also check that this running Ray cluster (HOST:PORT or auto) has room"
    )
    check_parser.set_defaults(run=_check)
    bench.add_parser(commands)
    plan.add_parser(commands)
    return parser


def _check(options: argparse.Namespace) -> int:
    from app.check import check, cluster_nodes  # loads torch

    print(check(options.config, cluster_nodes(options.cluster) if options.cluster else None))
    return 0


def _version() -> str:
    try:
        return version("longspan")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
