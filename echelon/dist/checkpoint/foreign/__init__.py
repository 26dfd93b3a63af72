"""Reads files of other programs: torch.save and safetensors."""
