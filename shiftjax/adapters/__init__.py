"""Low-rank adapters: which requests want which, and which slots of the devices have them."""
