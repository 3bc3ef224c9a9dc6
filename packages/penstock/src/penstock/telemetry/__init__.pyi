# Written by scripts/stubs.py.
from penstock.phases import phase as phase
from penstock.telemetry.endpoint import MetricsEndpoint as MetricsEndpoint
from penstock.telemetry.endpoint import serve_metrics as serve_metrics
__all__: list[str] = [
    "MetricsEndpoint",
    "phase",
    "serve_metrics",
]
