"""The oneCCL library, called through its C API: for Intel GPUs, or with its CPU plugin."""
