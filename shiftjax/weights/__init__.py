"""Reading, checking, placing and converting checkpoints."""
