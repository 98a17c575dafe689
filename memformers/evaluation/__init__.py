"""Measurements of trained models: whole texts, memory ablation, recall, and conformance."""
