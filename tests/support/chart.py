"""The Helm chart, rendered by Helm itself (its Go library, which helm-python-sdk brings).

`python -m tests.support.chart` (or `make docs`) writes what comes of it: the plain manifests, and
the settings in the schema of the values. tests/integration/test_chart.py compares.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from millstream.shared.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/millstream"
EXAMPLES = sorted((ROOT / "deploy/helm/examples").glob("*.yaml"))
SCHEMA = CHART / "values.schema.json"
MANIFESTS = ROOT / "deploy/kubernetes/millstream.yaml"
HEAD = """\
# What `helm template millstream deploy/helm/millstream` gives; `make docs` writes it anew.
# kubectl create secret generic millstream-keys --from-literal=MILLSTREAM_API_KEYS=ann:SECRET
# kubectl apply -f deploy/kubernetes/millstream.yaml
"""

# What the templates set themselves, what is a secret, and what is of those who ask the fleet.
SET_BY_THE_CHART = {
    *("redis_url", "host", "port", "metrics_port", "model", "on_demand_models", "model_source"),
    *("engine", "device", "allow_anonymous", "api_keys", "api_keys_file", "jwt_secret"),
    *("url", "api_key"),
}
# What workers of one fleet may differ in.
OF_ONE_WORKER = {"dtype", "trust_remote_code", "max_concurrent", "fake_tokens_per_s", "log_level"}


def settings_schema() -> dict[str, Any]:
    """The parts of the values' schema that repeat the settings."""
    fields = Settings.model_json_schema()["properties"]
    bounds = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "maxLength", "pattern")

    def part(names: set[str]) -> dict[str, Any]:
        properties = {
            name.upper(): {bound: fields[name][bound] for bound in bounds if bound in fields[name]}
            for name in Settings.model_fields
            if name in names
        }
        return {"type": "object", "additionalProperties": False, "properties": properties}

    return {
        "engine": {"enum": fields["engine"]["enum"]},
        "settings": part(fields.keys() - SET_BY_THE_CHART),
        "workerSettings": part(OF_ONE_WORKER),
    }


def schema_text() -> str:
    """The schema with the settings of today."""
    schema = json.loads(SCHEMA.read_text("utf-8"))
    schema["$defs"] |= settings_schema()
    return json.dumps(schema, indent=2) + "\n"


def render_texts(values: dict[str, Any], *, name: str = "millstream") -> dict[str, str]:
    """Each template's text, by its path in the chart.

    Raises:
        helm_python.HelmError: the values are refused.
    """
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=name, namespace="default")
    return {path: text for path, text in sorted(texts.items()) if path.endswith(".yaml")}


def render(values: dict[str, Any], *, name: str = "millstream") -> list[dict[str, Any]]:
    """All objects of a release."""
    texts = render_texts(values, name=name).values()
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


def manifests_text() -> str:
    """The plain manifests: a release with the default values."""
    parts = [text.strip().removeprefix("---").strip() for text in render_texts({}).values()]
    parts = [f"---\n{part}\n" for part in parts if part]
    # Of Helm's own; without a release they would only mislead.
    lines = "".join(parts).splitlines(keepends=True)
    own = ("helm.sh/chart:", "app.kubernetes.io/managed-by:")
    return HEAD + "".join(line for line in lines if not line.strip().startswith(own))


def setting_names() -> set[str]:
    """The names of all settings, as in an environment."""
    return {PREFIX + name.upper() for name in Settings.model_fields}


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), "utf-8")
    MANIFESTS.write_text(manifests_text(), "utf-8")
