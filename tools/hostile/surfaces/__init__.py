"""One module per kind of hostile input. A surface writes a case into the working directory and names its commands."""

from __future__ import annotations

from importlib.util import find_spec

from hostile.surfaces.archives import Archives
from hostile.surfaces.base import Surface
from hostile.surfaces.conversations import Conversations
from hostile.surfaces.databases import Databases
from hostile.surfaces.files import Files
from hostile.surfaces.gguf import Gguf
from hostile.surfaces.logs import Logs
from hostile.surfaces.markers import Markers
from hostile.surfaces.models import Models
from hostile.surfaces.objects import Objects
from hostile.surfaces.remotes import Remotes
from hostile.surfaces.runs import Runs
from hostile.surfaces.schemas import Schemas
from hostile.surfaces.scripts import Scripts
from hostile.surfaces.signed import Signed
from hostile.surfaces.traces import Traces

SURFACES: dict[str, type[Surface]] = {
    kind.name: kind
    for kind in (
        Objects,
        Archives,
        Traces,
        Models,
        Remotes,
        Databases,
        Scripts,
        Runs,
        Files,
        Logs,
        Signed,
        Conversations,
        Markers,
        Schemas,
    )
}
if find_spec("llama_cpp") and find_spec("gguf"):  # make test-llamacpp's environment
    SURFACES[Gguf.name] = Gguf
