"""The build: kernel tree -> kernel sets. Standard library only: it runs in an isolated build environment."""
