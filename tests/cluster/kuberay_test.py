"""`examples/kuberay*.yaml` against the fields of KubeRay's RayJob (ray.io/v1) and of Kubernetes' pods that it may use.

KubeRay's own schema is a megabyte, and no package has it: these are its names, as of KubeRay 1.3.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
VERBS = {"kuberay.yaml": "compile", "kuberay-serve.yaml": "serve"}
Schema = dict[
    str, Any
]  # a name to a type, a schema, or a list with that of its items; `?` ends one that may be left out

RESOURCES: Schema = {"requests?": {"*": str}, "limits?": {"*": str}}
CONTAINER: Schema = {
    "name": str, "image": str, "resources": RESOURCES, "ports?": [{"containerPort": int, "name": str}],
    "envFrom?": [{"secretRef": {"name": str}}], "volumeMounts?": [{"name": str, "mountPath": str}],
}  # fmt: skip
POD: Schema = {
    "spec": {
        "containers": [CONTAINER],
        "volumes?": [
            {
                "name": str, "persistentVolumeClaim?": {"claimName": str},
                "secret?": {"secretName": str, "defaultMode?": int},
            }
        ],
    }
}  # fmt: skip
HEAD: Schema = {"rayStartParams": {"*": str}, "template": POD}
WORKERS: Schema = HEAD | {"groupName": str, "replicas?": int, "minReplicas?": int, "maxReplicas?": int}
RAY_JOB: Schema = {
    "apiVersion": str, "kind": str, "metadata": {"name": str},
    "spec": {
        "entrypoint": str, "shutdownAfterJobFinishes?": bool, "ttlSecondsAfterFinished?": int, "backoffLimit?": int,
        "rayClusterSpec": {
            "rayVersion": str, "enableInTreeAutoscaling?": bool, "headGroupSpec": HEAD, "workerGroupSpecs": [WORKERS],
        },
    },
}  # fmt: skip


def problems(value: Any, schema: Any, where: str = "") -> list[str]:
    """What is wrong with a value, by place."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [text for i, item in enumerate(value) for text in problems(item, schema[0], f"{where}[{i}]")]
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{where}: {value!r} is no {schema.__name__}"]
    if not isinstance(value, dict):
        return [f"{where}: no mapping"]
    known = {name.rstrip("?"): kind for name, kind in schema.items()}
    missing = [name for name in schema if not name.endswith(("?", "*")) and name not in value]
    unknown = [name for name in value if name not in known and "*" not in known]
    inner = [text for name in value if name not in unknown
             for text in problems(value[name], known.get(name, known.get("*")), f"{where}.{name}")]  # fmt: skip
    return [
        *(f"{where}.{name}: missing" for name in missing),
        *(f"{where}.{name}: unknown" for name in unknown),
        *inner,
    ]


@pytest.fixture(params=VERBS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifest(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def test_the_manifest_has_the_fields_of_a_ray_job(manifest: Any) -> None:
    assert problems(manifest, RAY_JOB) == []
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")


def test_the_checker_finds_what_is_wrong(manifest: Any) -> None:
    cluster = manifest["spec"]["rayClusterSpec"]
    del cluster["headGroupSpec"]["rayStartParams"]
    cluster["workerGroupSpec"] = []
    cluster["workerGroupSpecs"][0]["replicas"] = "4"
    assert problems(manifest, RAY_JOB) == [
        ".spec.rayClusterSpec.workerGroupSpec: unknown", ".spec.rayClusterSpec.headGroupSpec.rayStartParams: missing",
        ".spec.rayClusterSpec.workerGroupSpecs[0].replicas: '4' is no int",
    ]  # fmt: skip


def test_its_ray_is_the_one_that_is_tested_and_names_are_those_of_kubernetes(manifest: Any) -> None:
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for part in pod["containers"] for mount in part.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
        assert all(re.fullmatch(r"[a-z0-9-]{1,63}", part["name"]) for part in pod["containers"])
        for amounts in (amount for part in pod["containers"] for amount in part["resources"].values()):
            assert all(re.fullmatch(r"\d+(Gi|Mi|m)?", amount) for amount in amounts.values())


def test_its_command_is_one_of_ours(manifest: Any, name: str) -> None:
    import typer

    app = import_module(f"pictool.commands.{VERBS[name]}").app
    words = manifest["spec"]["entrypoint"].split()
    known = {name for one in typer.main.get_command(app).params for name in one.opts}
    assert words[:2] == ["pic", VERBS[name]] and {word for word in words if word.startswith("-")} <= known
