"""What a step would cost: the time side of simulation. No torch."""
