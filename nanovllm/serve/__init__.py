"""The HTTP server: a process without torch, which drives the engines of host/."""
