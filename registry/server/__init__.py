"""A Hub on loopback: what kernel repos need of the Hugging Face Hub protocol, over bare git repositories.

For tests, air-gapped clusters and development. It knows no users: whoever reaches the port may read, and may
write unless a token is set.

    names.py     what a repo id, a branch or tag name and a path in a repo may look like
    protocol.py  errors and formats as the clients read them
    store.py     the store directory: repos, the writer lock, creating and deleting
    reading.py   revisions, refs, trees, files and history of one repo
    objects.py   writing git objects safely
    writing.py   commits, branches and tags: objects first, then the ref by compare-and-swap
    payload.py   the commit request, line by line
    app.py       the Starlette application: middleware and table of routes
    routes_read.py, routes_write.py, git_http.py   the handlers
    run.py       sockets, uvicorn, signals, `running_hub`
"""

from pallas_hub.registry.server.app import create_app
from pallas_hub.registry.server.run import Hub, ServeError, running_hub, serve
from pallas_hub.registry.server.store import Store, StoreError

__all__ = ["Hub", "ServeError", "Store", "StoreError", "create_app", "running_hub", "serve"]
