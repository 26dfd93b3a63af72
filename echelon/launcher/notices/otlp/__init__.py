"""Send a job's metrics and notices to an OpenTelemetry collector, from a separate process."""
