"""Serve the page of a run from this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sologrpo.report.follow import LivePage, open_server


@contextmanager
def serving(run_dir: Path, port: int | None = 0) -> Iterator[str]:
    """Serve a run directory, as `sologrpo report --follow` does; its address without a slash."""
    with open_server(port) as server:
        server.page = LivePage(run_dir)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield "http://{}:{}".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()
