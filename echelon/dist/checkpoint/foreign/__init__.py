"""Read files written by other programs: torch.save and safetensors."""
