"""Adapters of low rank (LoRA): requests for them, PEFT folders, the parameters that they change."""
