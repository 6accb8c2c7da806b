"""What surrounds a connection to Ray: descriptors, and the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PRINTS = """
import os
from pictool.cluster.session import _redirected
print("before")
with _redirected(1, 2):
    os.write(1, b"of a library\\n")
    print("of Ray")
print("after")
"""


def test_what_a_library_prints_is_not_on_stdout() -> None:
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\nafter\n", "of a library\nof Ray\n")


def test_a_replica_s_store_is_its_owner_s(tmp_path: Path) -> None:
    from pictool.cluster.loading import ModelSpec
    from pictool.cluster.replica import ReplicaSpec
    from pictool.linker.policies import make_policy
    from pictool.serve.backends.base import BackendSettings
    from pictool.store.remote.remote import Remote

    before = os.umask(0o022)
    try:
        remote, settings = Remote(str(tmp_path / "remote")), BackendSettings(make_policy("naive"))
        spec = ReplicaSpec(ModelSpec(), remote, str(tmp_path / "store"), settings)
        spec.open_tier("0").ensure_store()
    finally:
        os.umask(before)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
