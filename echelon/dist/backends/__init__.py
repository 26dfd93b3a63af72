"""The engines that move the data, one folder or file each, behind `interface.Engine`."""
