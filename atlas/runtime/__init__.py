"""The runtime: programs, memory, backends, and the runner that puts a model on one of them."""
