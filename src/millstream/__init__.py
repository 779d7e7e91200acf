"""Millstream: a self-hosted fleet that serves language models as durable, numbered logs."""

__version__ = "0.1.0"
