"""The engines that move the data, each in its own folder or file, behind `interface.Engine`."""
