"""Read files in the formats of torch.save and safetensors."""
