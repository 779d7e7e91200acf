"""The Helm chart: rendered by Helm, checked by Kubernetes's own schemas, and against the code."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from tests.support.compose_file import ROOT, Image, load
from tests.support.crds import CUSTOM

from millstream.api.app import create_app
from millstream.shared.settings import PREFIX, Settings

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this system")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

from tests.support import chart  # noqa: E402

MONITORING = (ROOT / "docs/monitoring.md").read_text("utf-8")
Object = dict[str, Any]
CASES: dict[str, Object] = {
    "defaults": {},
    "open": {"auth": {"existingSecret": "", "allowAnonymous": True}},
    "fixed": {
        "api": {"autoscaling": {"enabled": False}},
        "networkPolicy": {"enabled": False},
    },
    "own redis": {"redis": {"url": "rediss://user:secret@redis.example.com:6380/0"}},
    **{path.stem: yaml.safe_load(path.read_text()) for path in chart.EXAMPLES},
}
every_case = pytest.mark.parametrize("case", CASES)
OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()


@pytest.fixture(scope="module")
def releases() -> dict[str, list[Object]]:
    return {case: chart.render(values) for case, values in CASES.items()}


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [item for item in of_kind(objects, kind) if item["metadata"]["name"] == name]
    return found


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """The pods that come of a release, by their component."""
    for item in of_kind(objects, "Deployment", "StatefulSet"):
        template = item["spec"]["template"]
        yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]


def container_of(spec: Object) -> Object:
    (container,) = spec["containers"]
    return container


def environment(container: Object) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def paths_of_the_api() -> set[str]:
    app, _ = create_app(Settings())
    others = {path for route in app.routes if (path := getattr(route, "path", ""))}
    return {*app.openapi()["paths"], *others, "/", "/fleet"}


def documented_metrics() -> set[str]:
    return set(re.findall(r"^\| `(millstream_\w+)` \|", MONITORING, re.MULTILINE))


@every_case
def test_kubernetes_takes_it(case: str, releases: dict[str, list[Object]]) -> None:
    for item in releases[case]:
        if item["kind"] in CUSTOM:
            jsonschema.validate(item, CUSTOM[item["kind"]])
            continue
        # The oldest that the chart is for, and the newest there is a schema of.
        for version in (OLDEST, NEWEST) if case == "gpu-on-demand" else (NEWEST,):
            kubernetes_validate.validate(item, version, strict=True)


def test_names_of_a_release_are_its_own() -> None:
    for name in ("millstream", "eu"):
        objects = chart.render({}, name=name)
        names = [(item["kind"], item["metadata"]["name"]) for item in objects]
        assert len(set(names)) == len(names)
        assert all(of.startswith(name) for _, of in names)
        url = environment(container_of(dict(pod_specs(objects))["api"]))["MILLSTREAM_REDIS_URL"]
        (host,) = [of for kind, of in names if kind == "Service" and of.endswith("-redis")]
        assert url == f"redis://{host}:6379/0"


@every_case
def test_pods_have_no_rights(case: str, releases: dict[str, list[Object]]) -> None:
    for component, spec in pod_specs(releases[case]):
        assert spec["automountServiceAccountToken"] is False
        # Kubernetes would set MILLSTREAM_PORT and others for a Service of that name.
        assert spec["enableServiceLinks"] is False
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        container = container_of(spec)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"], component
        assert "cpu" not in container["resources"]["limits"], component
        service = load()["services"][component]
        if component == "redis":
            user = service["user"]
        else:
            image = Image.read(ROOT / service["build"]["dockerfile"])
            user = image.last("USER")
        assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


@every_case
def test_settings_are_real_and_the_code_takes_them(
    case: str, releases: dict[str, list[Object]]
) -> None:
    (config,) = of_kind(releases[case], "ConfigMap")
    for component, spec in pod_specs(releases[case]):
        container = container_of(spec)
        if component == "redis":
            continue
        values = {**config["data"], **environment(container)}
        ours = {name: value for name, value in values.items() if name.startswith(PREFIX)}
        assert ours.keys() <= chart.setting_names()
        fields = {name.removeprefix(PREFIX).lower(): value for name, value in ours.items() if value}
        settings = Settings(**fields)
        assert settings.host == "0.0.0.0"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == (
            {"http": settings.port} if component == "api" else {"metrics": settings.metrics_port}
        )


def test_large_numbers_stay_numbers() -> None:
    values = {"settings": {"MAX_PROMPT_CHARS": 12_000_000, "LEASE_S": 2.5, "CORS_ORIGINS": "*"}}
    (config,) = of_kind(chart.render(values), "ConfigMap")
    assert config["data"]["MILLSTREAM_MAX_PROMPT_CHARS"] == "12000000"
    assert config["data"]["MILLSTREAM_LEASE_S"] == "2.5"


@every_case
def test_commands_and_probes_are_those_of_the_images(
    case: str, releases: dict[str, list[Object]]
) -> None:
    services = load()["services"]
    routes = paths_of_the_api()
    for component, spec in pod_specs(releases[case]):
        container, service = container_of(spec), services[component]
        assert container["args"] == service["command"]
        assert "command" not in container  # the image's entry point
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            action = container.get(probe, {})
            if "httpGet" in action:
                assert action["httpGet"]["path"] in routes
                assert action["httpGet"]["port"] == "http"
            if "exec" in action and component == "worker":
                assert ["CMD", *action["exec"]["command"]] == service["healthcheck"]["test"]
        # No probe that asks Redis may restart a pod.
        living = container.get("livenessProbe", {})
        assert living.get("httpGet", {}).get("path", "/health") == "/health"
        assert "exec" not in living
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert (
            mounts
            >= {
                "api": {"/tmp"},
                "worker": {
                    "/tmp",
                    Image.read(ROOT / "deploy/worker.Dockerfile").environment["HOME"],
                },
                "redis": {"/tmp", "/data"},
            }[component]
        )
        volumes = {volume["name"] for volume in spec["volumes"]}
        if component == "redis":
            volumes.add("data")
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("drain_s", [None, 20, 61.5])
def test_the_grace_is_longer_than_the_drain(drain_s: float | None) -> None:
    values = {} if drain_s is None else {"settings": {"DRAIN_S": drain_s}}
    specs = dict(pod_specs(chart.render(values)))
    drain = drain_s or Settings().drain_s
    assert specs["worker"]["terminationGracePeriodSeconds"] >= drain + 9
    api = specs["api"]
    before = container_of(api)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert api["terminationGracePeriodSeconds"] >= drain + before + 9


def test_a_rollout_takes_no_pod_away_before_the_next_is_ready() -> None:
    objects = chart.render(CASES["gpu-on-demand"])
    for item in of_kind(chart.render({}), "Deployment") + of_kind(objects, "Deployment"):
        rolling = item["spec"]["strategy"]["rollingUpdate"]
        gpu = "nvidia.com/gpu" in json.dumps(item["spec"]["template"]["spec"])
        assert rolling == {"maxSurge": 0 if gpu else 1, "maxUnavailable": 1 if gpu else 0}
    # Who scales must not be overruled by each upgrade.
    assert not any("replicas" in item["spec"] for item in of_kind(objects, "Deployment"))


def test_selectors_meet_their_pods_and_no_others() -> None:
    for case in ("defaults", "gpu-on-demand"):
        objects = chart.render(CASES[case])
        pods = {
            item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"]
            for item in of_kind(objects, "Deployment", "StatefulSet")
        }

        def chosen(labels: Object, among: dict[str, Object] = pods) -> list[str]:
            return [name for name, has in among.items() if labels.items() <= has.items()]

        for item in of_kind(objects, "Deployment", "StatefulSet"):
            assert chosen(item["spec"]["selector"]["matchLabels"]) == [item["metadata"]["name"]]
        assert chosen(named(objects, "Service", "millstream")["spec"]["selector"]) == [
            "millstream-api"
        ]
        workers = sorted(name for name in pods if "worker" in name)
        for item in of_kind(objects, "NetworkPolicy"):
            component = item["metadata"]["name"].removeprefix("millstream-")
            found = chosen(item["spec"]["podSelector"]["matchLabels"])
            assert sorted(found) == (
                workers if component == "worker" else [f"millstream-{component}"]
            )
        # An upgrade of the chart alone restarts no Redis.
        assert not any("helm" in key for labels in pods.values() for key in labels)


def test_nobody_but_pods_and_workers_reaches_redis() -> None:
    policy = named(chart.render({}), "NetworkPolicy", "millstream-redis")["spec"]
    (rule,) = policy["ingress"]
    components = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]
    ]
    assert sorted(components) == ["api", "worker"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy


def test_redis_is_as_in_the_compose_file() -> None:
    spec = dict(pod_specs(chart.render({"redis": {"maxmemory": "3gb"}})))["redis"]
    assert container_of(spec)["args"] == load(REDIS_MAXMEMORY="3gb")["services"]["redis"]["command"]
    assert not of_kind(chart.render(CASES["own redis"]), "StatefulSet")


def test_one_waiting_task_starts_a_worker() -> None:
    """KEDA is active above the threshold, so that is 0; and pods know the models before (B94)."""
    objects = chart.render(CASES["gpu-on-demand"])
    scaled = of_kind(objects, "ScaledObject")
    models: list[str] = []
    for item in scaled:
        spec = item["spec"]
        deployment = named(objects, "Deployment", spec["scaleTargetRef"]["name"])
        model = environment(container_of(deployment["spec"]["template"]["spec"]))[PREFIX + "MODEL"]
        assert model is not None
        models.append(model)
        assert spec["minReplicaCount"] == 0
        assert spec["fallback"]["replicas"] == 1
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["activationThreshold"] == "0"
        query = trigger["metadata"]["query"]
        assert query.count(f'model="{model}"') == 2
        # docs/monitoring.md lists what pods serve; its own test holds it against them.
        assert set(re.findall(r"millstream_\w+", query)) <= documented_metrics()
    (api,) = [spec for component, spec in pod_specs(objects) if component == "api"]
    told = environment(container_of(api))[PREFIX + "ON_DEMAND_MODELS"]
    assert told is not None
    assert told.split(",") == models == ["qwen2.5-7b-instruct", "private-8b"]


def test_workers_may_be_on_gpus_and_machines_that_are_taken_away() -> None:
    deployment = named(chart.render(CASES["gpu-on-demand"]), "Deployment", "millstream-worker-qwen")
    spec = deployment["spec"]["template"]["spec"]
    assert container_of(spec)["resources"]["limits"]["nvidia.com/gpu"] == 1
    tolerated = {toleration["key"] for toleration in spec["tolerations"]}
    assert {"nvidia.com/gpu", "cloud.google.com/gke-spot"} <= tolerated
    assert spec["affinity"]["nodeAffinity"]
    plain = dict(pod_specs(chart.render({})))["worker"]
    assert "tolerations" not in plain


def test_the_ingress_has_all_for_callers_and_nothing_for_operators() -> None:
    (ingress,) = of_kind(chart.render(CASES["gpu-on-demand"]), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    paths = [(path["pathType"], path["path"]) for path in rule["http"]["paths"]]

    def passed(asked: str) -> bool:
        prefixes = [prefix for kind, prefix in paths if kind == "Prefix"]
        exact = [prefix for kind, prefix in paths if kind == "Exact"]
        return asked in exact or any(f"{asked}/".startswith(f"{prefix}/") for prefix in prefixes)

    routes = paths_of_the_api()
    kept = {route for route in routes if not passed(route)}
    assert all(route.startswith(("/fleet", "/metrics")) for route in kept), kept
    assert {"/fleet", "/fleet.json"} <= kept


BAD: dict[str, tuple[Object, str]] = {
    "an unknown setting": ({"settings": {"LEASES": 3}}, "LEASES"),
    "a bad value of a setting": ({"settings": {"LEASE_S": "soon"}}, "LEASE_S"),
    "a setting out of bounds": ({"settings": {"LEASE_S": 0.1}}, "LEASE_S"),
    "a secret among the settings": ({"settings": {"API_KEYS": "a:b"}}, "API_KEYS"),
    "an unknown value": ({"replicas": 3}, "replicas"),
    "a worker without a model": ({"workers": [{"name": "x", "source": "y"}]}, "model"),
    "a worker's bad name": (
        {"workers": [{"name": "X_y", "model": "m", "source": "y"}]},
        "X_y",
    ),
    "an engine that is none": ({"workerDefaults": {"engine": "torch"}}, "engine"),
    "a bad address of Redis": ({"redis": {"url": "http://redis"}}, "redis"),
    "no way to ask": ({"auth": {"existingSecret": ""}}, "allowAnonymous"),
    "an ingress without a host": ({"ingress": {"enabled": True}}, "host"),
    "KEDA without Prometheus": (
        {"workerDefaults": {"autoscaling": {"enabled": True}}},
        "monitoring.prometheusUrl",
    ),
    "a setting of ours in extraEnv": (
        {"api": {"extraEnv": [{"name": "MILLSTREAM_PORT", "value": "1"}]}},
        "extraEnv",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_values_are_refused(case: str) -> None:
    values, word = BAD[case]
    with pytest.raises(helm.HelmError) as caught:
        chart.render(copy.deepcopy(values))
    assert word in str(caught.value)


def test_what_was_written_is_what_comes_of_it() -> None:
    assert chart.schema_text() == chart.SCHEMA.read_text("utf-8"), "run `make docs`"
    assert chart.manifests_text() == chart.MANIFESTS.read_text("utf-8"), "run `make docs`"


def test_helm_finds_no_fault() -> None:
    found = helm.lint(str(chart.CHART))
    # Severity 1 is advice: it would like an icon.
    assert [message for message in found["messages"] if message["severity"] > 1] == []
    assert found["errors"] == []


def test_the_chart_has_the_version_of_the_package() -> None:
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{about["appVersion"]}"\n' in project
