"""Beside the engine: weights made ready, and the engine measured."""
