"""What operators see of a process: Prometheus metrics of its journeys and members, and OpenTelemetry spans."""
