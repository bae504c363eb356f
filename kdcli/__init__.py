"""kdcli: make Hugging Face encoders small and fast, and prove it."""

__version__ = "0.1.0"
