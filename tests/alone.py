"""`compile` and `link` of documents that are computed alone, after nothing, as the dense reference of linking has them.

Documents after a context are those of linker/contexts_test.py.
"""

from __future__ import annotations

from functools import partial

from pictool import api

compile = partial(api.compile, after="none")
link = partial(api.link, after="none")
