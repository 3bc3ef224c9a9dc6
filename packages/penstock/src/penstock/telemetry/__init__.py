"""Observation of a process by its operators: Prometheus metrics of journeys and members, and OpenTelemetry spans."""
