"""Send a job's metrics and notices to an OpenTelemetry collector, from a process of their own."""
