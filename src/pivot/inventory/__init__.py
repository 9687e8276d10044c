"""An inventory: what its variables say, and everything that can be known before anything is touched."""
