"""JSON schemas of the custom resources that the chart makes: the fields it uses, and no others.

Written by hand from the documentation of KEDA (keda.sh/v1alpha1) and the Prometheus operator
(monitoring.coreos.com/v1): a misspelt or misplaced field is found; nothing else is promised.
"""

from typing import Any

STRING = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def _closed(required: str, /, **properties: Any) -> dict[str, Any]:
    """An object that must have these fields (names in a row), and none but its own."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _resource(kind: str, version: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _closed(
        "name", name=STRING, labels={"type": "object", "additionalProperties": STRING}
    )
    return _closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_PROMETHEUS = _closed(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_closed(
        "serverAddress query threshold",
        serverAddress={"type": "string", "pattern": "^https?://"},
        query=STRING,
        threshold={"type": "string", "pattern": r"^\d+$"},
        activationThreshold={"type": "string", "pattern": r"^\d+$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
_BEHAVIOR = _closed("", scaleDown=_closed("", stabilizationWindowSeconds=COUNT | {"maximum": 3600}))

CUSTOM: dict[str, dict[str, Any]] = {
    "ScaledObject": _resource(
        "ScaledObject",
        "keda.sh/v1alpha1",
        _closed(
            "scaleTargetRef triggers",
            scaleTargetRef=_closed("name", name=STRING),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            pollingInterval=COUNT,
            cooldownPeriod=COUNT,
            fallback=_closed("failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT),
            advanced=_closed("", horizontalPodAutoscalerConfig=_closed("", behavior=_BEHAVIOR)),
            triggers={"type": "array", "minItems": 1, "items": _PROMETHEUS},
        ),
    ),
    "PodMonitor": _resource(
        "PodMonitor",
        "monitoring.coreos.com/v1",
        _closed(
            "selector podMetricsEndpoints",
            selector=_closed("matchLabels", matchLabels={"type": "object"}),
            podMetricsEndpoints={
                "type": "array",
                "items": _closed("port", port=STRING, path=STRING, interval=STRING),
            },
        ),
    ),
}
