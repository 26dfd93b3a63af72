"""Call the oneCCL library through its C API, on Intel GPUs or with its CPU plugin."""
