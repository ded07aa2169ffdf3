"""The serving loop on modelled machines and a virtual clock. Nothing here needs JAX."""
