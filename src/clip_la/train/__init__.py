"""Training: one loop, and the parts it is made of."""
