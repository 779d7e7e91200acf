"""What processes tell of themselves: plain numbers, made into Prometheus's text when read."""
