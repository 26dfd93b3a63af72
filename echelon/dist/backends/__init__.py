"""Provide the engines that move data; each has its own folder or file.

All of them implement `interface.Engine`.
"""
