"""Web servers that run in a thread of the test."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, *_):
        pass


@contextmanager
def serve(handler, **attributes):
    """Runs a server with a class of handlers and these attributes. Gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    for name, value in attributes.items():
        setattr(server, name, value)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def serve_with(answer):
    """Runs a server that answers GET, HEAD and PROPFIND by a function, which is called with the handler."""

    class Handler(QuietHandler):
        def do_GET(self):
            try:
                answer(self)
            except OSError:
                pass

        do_HEAD = do_PROPFIND = do_GET

    return serve(Handler)
