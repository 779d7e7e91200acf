"""The worker process: it owns one model and writes the logs of its tasks."""
