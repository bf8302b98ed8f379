"""Demos. Nothing here reports to anybody: set before Gradio and the hub's client are imported, which read it once."""

import os


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
