"""Files of other programs: torch.save's and safetensors."""
