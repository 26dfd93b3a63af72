"""Provide the engines that move data, each in its own folder or file, behind `interface.Engine`."""
