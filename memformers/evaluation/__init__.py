"""Measurements of trained models: whole texts, effective context, attention by distance, and recall."""
