"""Messages between two ranks: matching, flow control, and the thread that moves the bytes."""
