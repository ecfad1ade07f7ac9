"""A server process over the fake engine, for tests of signals and exit codes.

    python -m tests.server.serve_fake '{"step_seconds": 0.05, "load_seconds": 0, "fail": "", "settings": {}}'

Prints the port once it listens.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from mlxcel_ext.server import run
from mlxcel_ext.server.logs import set_up
from mlxcel_ext.server.settings import ServerSettings

from .fake_engine import FakeEngine, FakeModel


def main() -> int:
    options = json.loads(sys.argv[1])
    set_up("info", "json")
    engine = FakeEngine(step_seconds=options.get("step_seconds", 0.0))

    def load() -> tuple[FakeEngine, FakeModel]:
        time.sleep(options.get("load_seconds", 0))
        if options.get("fail"):
            raise ValueError(options["fail"])
        engine.start()
        return engine, FakeModel()

    process = run.ServerProcess(
        ServerSettings(("fake",), **options.get("settings", {})), load, "127.0.0.1", 0
    )
    listen = run._listen

    def announce(host: str, port: int):  # type: ignore[no-untyped-def]
        listener = listen(host, port)
        print(listener.getsockname()[1], flush=True)
        return listener

    run._listen = announce
    if options.get("kill_after"):
        logging.getLogger("mlxcel_ext").warning("the engine will die")
        import threading

        threading.Timer(options["kill_after"], engine.kill, ["injected death"]).start()
        run.DEAD_LINGER = 0.5
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
