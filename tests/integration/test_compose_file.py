"""docker-compose.yml against the specification, the settings, the images and nginx's limits."""

import json
import re

import jsonschema
import yaml
from tests.support.compose_file import ROOT, Image, load, seconds, used_variables

from millstream.api.body import largest_body
from millstream.api.server import KEEP_ALIVE_S
from millstream.shared.settings import PREFIX, Settings

CLIENTS = {PREFIX + "URL", PREFIX + "API_KEY"}  # of who talks to a fleet, not of its processes
SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields} - CLIENTS
# A worker answers no callers, so it is told none of their secrets.
OF_PODS_ALONE = {PREFIX + "PORT", PREFIX + "ALLOW_ANONYMOUS"} | {
    name for name in SETTINGS if name.startswith((PREFIX + "API_KEYS", PREFIX + "JWT_"))
}
OF_OTHERS = {"OTEL_EXPORTER_OTLP_ENDPOINT"}  # OpenTelemetry reads it by itself
OURS = ("api", "worker", "worker-gpu")
NGINX_CONF = (ROOT / "deploy/nginx.conf").read_text()


def test_the_file_follows_the_specification() -> None:
    schema = json.loads((ROOT / "tests/support/compose-spec.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(load())
    assert "version" not in load()


def test_only_settings_that_exist_are_passed_on() -> None:
    """A misspelt name would stop every process; one left out could not be set in a cluster."""
    services = load()["services"]
    for name in OURS:
        passed = {key for key in services[name]["environment"] if key.startswith(PREFIX)}
        assert passed <= SETTINGS, name
    assert set(services["api"]["environment"]) == SETTINGS | OF_OTHERS
    assert set(services["worker"]["environment"]) == (SETTINGS | OF_OTHERS) - OF_PODS_ALONE
    # `.env` is read by Compose and by a local `millstream` alike, which refuses what it knows not.
    assert {name for name in used_variables() if name.startswith(PREFIX)} <= SETTINGS


def test_settings_come_from_the_shell() -> None:
    services = load(MILLSTREAM_MODEL_SOURCE="org/name", MILLSTREAM_PORT="9000")["services"]
    assert services["worker"]["environment"]["MILLSTREAM_MODEL_SOURCE"] == "org/name"
    assert services["nginx"]["ports"][0] == "127.0.0.1:9000:8080"
    assert services["api"]["environment"]["MILLSTREAM_PORT"] == "8000"


def test_every_service_is_hardened() -> None:
    for name, service in load()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert service["init"] is True, name
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys(), name
        assert service["healthcheck"]["test"], name
        if name in OURS:
            user = Image.read(ROOT / service["build"]["dockerfile"]).last("USER")
        else:
            user = service["user"]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), name


def test_only_the_front_door_is_published() -> None:
    services = load(PUBLISH_ADDRESS="0.0.0.0")["services"]
    # What PUBLISH_ADDRESS opens to all are not the operators' ports.
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "nginx": ["0.0.0.0:8000:8080", "127.0.0.1:8001:8081"],
        "nginx-tls": ["0.0.0.0:8443:8443"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    assert services["nginx"]["networks"] == services["nginx-tls"]["networks"] == ["edge"]
    assert services["prometheus"]["networks"] == services["grafana"]["networks"] == ["monitoring"]
    assert services["redis"]["networks"] == ["backend"]


def test_the_grace_is_longer_than_the_drain() -> None:
    for name in OURS:
        service = load()["services"][name]
        drain_s = float(service["environment"]["MILLSTREAM_DRAIN_S"])
        assert seconds(service["stop_grace_period"]) >= drain_s + 5, name


def test_profiles() -> None:
    services = load()["services"]
    assert {name: service.get("profiles") for name, service in services.items()} == {
        "nginx": None,
        "nginx-tls": ["tls"],
        "api": None,
        "worker": None,
        "worker-gpu": ["gpu"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
        "redis": None,
    }


def test_what_is_mounted_from_here_is_here() -> None:
    for name, service in load()["services"].items():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            if source.startswith("./") and source != "./tls":
                assert (ROOT / source).exists(), name
            if source.startswith("./"):
                assert mode == ["ro"], name
                assert target.startswith("/etc/"), name


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = load()["services"]
    folder = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards/millstream.yml").read_text())["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert f"./deploy/grafana/millstream.json:{home}:ro" in services["grafana"]["volumes"]
    dashboard = json.loads((ROOT / "deploy/grafana/millstream.json").read_text())
    variables = [item for item in dashboard["templating"]["list"] if item["type"] == "datasource"]
    assert source["uid"] in json.dumps(dashboard) or variables


def test_prometheus_finds_pods_and_workers() -> None:
    """By the names and ports that services have in their network, and by no other."""
    services = load()["services"]
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    found = {
        (name, lookup["port"])
        for job in config["scrape_configs"]
        for lookup in job.get("dns_sd_configs", [])
        for name in lookup["names"]
    }
    worker_port = int(services["worker"]["environment"]["MILLSTREAM_METRICS_PORT"])
    ours = {("api", int(services["api"]["environment"]["MILLSTREAM_PORT"]))}
    ours |= {(name, worker_port) for name in ("worker", "worker-gpu")}
    assert found == ours
    assert all("monitoring" in services[name]["networks"] for name, _ in ours)
    for pattern in config.get("rule_files", []):
        assert list((ROOT / "deploy/prometheus").glob(pattern)), pattern


def test_the_gpu_is_asked_for() -> None:
    services = load()["services"]
    assert services["worker-gpu"]["environment"]["MILLSTREAM_DEVICE"] == "cuda"
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


def test_health_checks_are_those_of_the_images() -> None:
    for name in OURS:
        service = load()["services"][name]
        instruction = Image.read(ROOT / service["build"]["dockerfile"]).last("HEALTHCHECK")
        options, _, command = instruction.partition(" CMD ")
        check = service["healthcheck"]
        assert ["CMD", *json.loads(command)] == check["test"]
        for option in options.split():
            key, value = option.removeprefix("--").replace("-", "_").split("=")
            assert str(check[key]) == value, (name, option)


def test_limits_of_nginx_fit_those_of_the_api() -> None:
    (upstream_keepalive,) = re.findall(
        r"upstream api \{.*?keepalive_timeout (\w+);", NGINX_CONF, re.S
    )
    assert seconds(upstream_keepalive) <= KEEP_ALIVE_S - 10
    (largest,) = re.findall(r"client_max_body_size (\d+)m;", NGINX_CONF)
    assert int(largest) * 2**20 > 2 * largest_body(Settings().max_prompt_chars)
    (read_timeout,) = re.findall(r"proxy_read_timeout (\w+);", NGINX_CONF)
    assert seconds(read_timeout) >= Settings().max_task_s
    assert seconds(read_timeout) > 10 * Settings().keepalive_s
    (shutdown,) = re.findall(r"worker_shutdown_timeout (\w+);", NGINX_CONF)
    assert seconds(shutdown) < seconds(load()["services"]["nginx"]["stop_grace_period"])
    # The compressor would hold events back.
    assert "event-stream" not in "".join(re.findall(r"gzip_types [^;]*;", NGINX_CONF))
