"""Provide the c10d backend `echelon`, which runs unmodified torch programs on echelon's groups.

A program can call `init_process_group("echelon")` without importing this package; see
`echelon_torch_autoload`.
"""
