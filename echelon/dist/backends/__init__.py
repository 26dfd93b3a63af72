"""Provide the engines that move data. Every engine implements `interface.Engine`."""
