"""Pretraining of small models on transformers' Trainer."""
