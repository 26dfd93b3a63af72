"""Provide the c10d backend `echelon`, which runs unmodified torch programs on echelon's groups.

`init_process_group("echelon")` does not need an import of this package; see
`echelon_torch_autoload`.
"""
