"""The HTTP server: a front process without torch (this package but for engine_process.py) and the engine's process."""
