"""What a server for measurements leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from app.bench.server import LocalServer

_DEAF = (
    "import signal, time; signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True)); print(); time.sleep(99)"
)


def test_interrupted_while_it_stops_it_ends_the_server_at_once() -> None:
    """As by a second Ctrl-C: what `serve run` takes half a minute for is no reason to leave it running."""
    server = LocalServer()
    with subprocess.Popen([sys.executable, "-c", _DEAF], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        server._process = process

        def interrupt() -> None:
            assert process.stdout is not None
            assert process.stdout.readline() == "asked\n"
            os.kill(os.getpid(), signal.SIGINT)

        again = threading.Thread(target=interrupt)
        again.start()
        with pytest.raises(KeyboardInterrupt):
            server.stop()
        again.join()
        assert process.poll() == -signal.SIGKILL
    assert not server.log_path.parent.exists()
