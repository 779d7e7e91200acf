"""Large imports, without a search for garbage in them."""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Keep the garbage collector away from what is imported within, then and later.

    It stays, and there is much of it: the search takes a twelfth of the time in which the API is
    imported, and a third of torch's and transformers'. Later it would hold up the event loop.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
