"""What happens, told: records of requests, numbers for Prometheus, traces."""
