"""Write the ring file: its slots, its texts and the operations kept out of reuse."""
