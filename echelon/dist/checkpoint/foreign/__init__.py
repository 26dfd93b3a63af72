"""Files of other programs: those of torch.save and safetensors."""
