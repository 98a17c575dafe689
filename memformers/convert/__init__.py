"""Weights of labml-nn's and Hugging Face's models for ours, and trained models with their tokenizers."""
